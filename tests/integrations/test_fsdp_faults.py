"""Sharded runs survive: what one rank finds, or that it fails or dies, is known to all ranks; and checkpoints."""

import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.optimizers import make, make_scaler
from support.oracle import bytes_of
from support.sharded import (
    SECONDS,
    Call,
    Found,
    call_all,
    local_bits,
    make_mesh,
    options,
    sharded_net,
    spoil_last_rank,
    take_step,
    whole,
)
from support.training import TOPK, make_batch, make_net, policy, raises, sync_bits
from thinwire import Collective
from thinwire.collectives.transport.link import GlooLink, LinkBroken
from thinwire.testing import LOST, RankPool, store_barrier


def state_bits(model: nn.Module, optimizer: Any) -> dict[Any, bytes]:
    kept = optimizer.state_dict()["state"]
    moments = {
        (number, kind): bytes_of(one[kind]) for number, one in kept.items() for kind in optimizer._parameters.vectors
    }
    return {**local_bits(model), **sync_bits(optimizer.sync), **moments}


def three_steps(rank: int, mesh: Any, model: nn.Module) -> Any:
    given = {"group": mesh["replicate"], "collective": Collective(timeout=SECONDS), **options("AdamW")}
    optimizer = make("AdamW", model, **given)
    for step in range(3):
        take_step(model, optimizer, [rank], step)
    return optimizer


def not_finite(rank: int, mesh: Any, scaled: bool) -> Any:
    """Rank 3 has a NaN in its shard at step 3: no shard of any replica changes, and the scale falls everywhere."""
    model, scaler = sharded_net(mesh), make_scaler(64.0, enabled=scaled)
    bad = spoil_last_rank(model, rank)
    given = {"group": mesh["replicate"], "grad_scaler": scaler if scaled else None}
    optimizer = make("AdamW", model, **given, **options("AdamW"))
    changed = []
    for step in range(6):
        bad[0] = step == 3
        before = state_bits(model, optimizer)
        optimizer.zero_grad()
        batch, wanted = make_batch(rank, step)
        scaler.scale((model(batch) - wanted).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        changed.append(state_bits(model, optimizer) != before)
    return changed, optimizer.skipped, scaler.get_scale(), local_bits(model)


def fails_once(rank: int, mesh: Any, where: str) -> Any:
    """Rank 3 fails in its fourth step: in the backward pass, or by its link to rank 1."""
    model = sharded_net(mesh)
    optimizer = three_steps(rank, mesh, model)
    before = local_bits(model)

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("the disk is on fire") if where == "backward" else LinkBroken(0, False, "the wire is cut")

    try:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 3:
                patch.setattr(*((optimizer, "add_bucket") if where == "backward" else (GlooLink, "post")), fail)
            take_step(model, optimizer, [rank], 3)
    except (ValueError, thinwire.CollectiveError) as error:
        store_barrier("all have failed", 4)
        return f"{type(error).__name__}: {error}", local_bits(model) == before
    return "", False


def test_what_one_rank_finds_reaches_all_before_anything_changes(ranks: RankPool) -> None:
    """A NaN voids the step of all; an error is raised on all."""
    calls: dict[str, Call] = {"NaN": (not_finite, False), "scaled": (not_finite, True)}
    found = call_all(ranks, {**calls, "backward": (fails_once, "backward")})
    for name in calls:
        for changed, skipped, scale, _ in found[name]:
            assert changed == [True, True, True, False, True, True], name
            assert (skipped, scale) == (1, 32.0 if name == "scaled" else 1.0), name
        assert [bits for *_, bits in found[name][:2]] == [bits for *_, bits in found[name][2:]], name
    for rank, (error, is_unchanged) in enumerate(found["backward"]):
        assert "the disk is on fire" in error, rank
        assert "rank 3" in error or rank == 3, rank
        assert is_unchanged, rank
    for rank, (error, is_unchanged) in enumerate(call_all(ranks, {"link": (fails_once, "link")})["link"]):
        assert "the wire is cut" in error, rank
        assert is_unchanged, rank


def killed(rank: int, world_size: int, where: str, folder: Path) -> Any:
    """The last rank dies in its fourth step: in the forward or backward pass, or between them and the step."""
    mesh = make_mesh(world_size, world_size // 2)
    model = sharded_net(mesh)
    optimizer = three_steps(rank, mesh, model)

    def die(*_: Any) -> None:
        if rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if where == "backward":
        model[4].register_full_backward_hook(die)  # type: ignore[index, operator]
    elif where == "forward":
        model[4].register_forward_pre_hook(die)  # type: ignore[index, operator]
    try:
        given, wanted = make_batch(rank, 3)
        optimizer.zero_grad()
        (model(given) - wanted).square().mean().backward()
        if where == "step":
            store_barrier("all have sent", world_size)
            if rank == world_size - 1:
                optimizer.sync._step.wait()  # so that rank 1 has all that it needs, and learns it from rank 0 alone
            die()
        optimizer.step()
    except thinwire.CollectiveError as error:
        return str(error)
    except RuntimeError as error:
        (folder / f"rank {rank}").write_text(str(error))
        os._exit(1)  # as a program does that does not catch it
    return ""


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_killed_rank_ends_all_ranks(ranks: RankPool, where: str, tmp_path: Path) -> None:
    """With its name, but for the rank that waits for it in a collective of FSDP: that one gets torch's error."""
    in_fsdp = where != "step"
    found = ranks.run(killed, 4, where, tmp_path, timeout=SECONDS, lost=[2, 3] if in_fsdp else [3])
    assert found[3] is LOST
    assert (tmp_path / "rank 2").exists() == in_fsdp
    for rank, error in enumerate(found[: 2 if in_fsdp else 3]):
        assert re.search(r"rank (2|3) is lost" if in_fsdp else "rank 3 (is )?lost", error), f"rank {rank}: {error}"


# Checkpoints: other numbers of shards, of replicas, of both; the same bits with the same numbers.

ALGORITHMS = ("gather", "sharded")
AT, STEPS = 6, 10
"""The step at which a checkpoint is saved, and the steps of the run."""


def made(mesh: Any, algorithm: str = "auto") -> tuple[nn.Module, thinwire.AdamW]:
    model = sharded_net(mesh)
    given = {"compressor": policy(TOPK), "warmup_steps": 2, "refresh_every": 4, "group": mesh["replicate"]}
    return model, thinwire.AdamW(model, **given, collective=Collective(algorithm=algorithm))


def save(path: Path, model: nn.Module, optimizer: thinwire.AdamW) -> None:
    state = {"model": model.state_dict(), "optimizer": thinwire.per_rank(optimizer)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own use of torch
        dcp.save(state, checkpoint_id=path)


def load(path: Path, model: nn.Module, optimizer: thinwire.AdamW) -> None:
    weights = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(weights, checkpoint_id=path)
    model.load_state_dict(weights["model"])
    optimizer.load_state_dict(thinwire.load_per_rank(path, "optimizer", owner=optimizer))


def sums(mesh: Any, optimizer: thinwire.AdamW) -> dict[str, Tensor]:
    """What replicas have on average: residuals and momentum, over all shards; a new replica has none."""
    found = {}
    state = thinwire.per_rank(optimizer)[f"replica{optimizer.sync.rank}"]
    shards = optimizer.sync.shards
    assert shards is not None
    for number, (name, _) in enumerate(optimizer.named_parameters()):
        for path in (f"thinwire/residuals/{name}", f"state/{number}/exp_avg"):
            kept: Any = state.get(path)
            if kept is None:
                kept = shards.distributed(name, torch.zeros_like(shards.shard(name)))
            mean = kept.full_tensor().double()
            torch.distributed.all_reduce(mean, group=mesh.get_group("replicate"))
            found[path] = mean / mesh["replicate"].size()
    return found


def halves(rank: int, mesh: Any, path: Path, algorithm: str, shards: int = 0) -> Any:
    """Train and save, or with a number of shards load; then what there is in the middle, and at the end."""
    mesh = make_mesh(mesh.size(), shards) if shards else mesh
    model, optimizer = made(mesh, algorithm)
    if shards:
        load(path, model, optimizer)
    else:
        for step in range(AT):
            take_step(model, optimizer, [rank], step)
        save(path, model, optimizer)
    kept, weights = sums(mesh, optimizer), whole(model)
    for step in range(AT, STEPS):
        take_step(model, optimizer, [rank], step)
    return kept, weights, local_bits(model), optimizer.sync.steps, optimizer.sync.stats.algorithms


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(ranks: RankPool, folder: Path) -> Found:
    calls = {algorithm: (halves, folder / algorithm, algorithm) for algorithm in ALGORITHMS}
    return call_all(ranks, {**calls, "other_ways": (other_ways, folder)})


def test_the_same_and_other_numbers_of_shards_and_replicas(ranks: RankPool, saved: Found, folder: Path) -> None:
    """The same bits with the same numbers; DDP, too, loads what a sharded model has saved."""
    same: dict[str, Call] = {each: (halves, folder / each, each, 2) for each in ALGORITHMS}
    more: dict[str, Call] = {str(shards): (halves, folder / "gather", "auto", shards) for shards in (1, 4)}
    fewer: dict[str, Call] = {"1": more["1"], "without_shards": (without_shards, folder / "gather")}
    four, two = call_all(ranks, {**same, **more}), call_all(ranks, fewer, world_size=2)
    for algorithm in ALGORITHMS:
        for one, other in zip(saved[algorithm], four[algorithm], strict=True):
            assert one[2] == other[2], algorithm
            assert algorithm in one[4]
    for found, shards in ((four, 1), (four, 4), (two, 1)):
        check(saved, found[str(shards)], shards)
    kept, residuals = saved["gather"][0][0], two["without_shards"][0]
    assert len(residuals) > 3
    for name, residual in residuals.items():
        torch.testing.assert_close(residual, kept[name].flatten(), msg=name)


@pytest.mark.slow
def test_three_shards(ranks: RankPool, saved: Found, folder: Path) -> None:
    calls: dict[str, Call] = {"3": (halves, folder / "gather", "auto", 3)}
    check(saved, call_all(ranks, calls, world_size=3, shards=3)["3"], 3)


def check(saved: Found, found: list[Any], shards: int) -> None:
    kept, weights, *_ = saved["gather"][0]
    assert kept.keys() == found[0][0].keys()
    for name, mean in found[0][0].items():
        torch.testing.assert_close(mean, kept[name], msg=name)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found[0][1].items())
    for rank, each in enumerate(found):
        assert each[2] == found[rank % shards][2]
        assert each[3] == STEPS
        assert each[2] != {name: bytes_of(tensor) for name, tensor in each[1].items()}


def other_ways(rank: int, mesh: Any, path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = made(mesh)
    for step in range(3):
        take_step(model, optimizer, [rank], step)
    own = optimizer.state_dict()
    optimizer.load_state_dict(own)  # the state of this rank's own shard
    other = {**own, "thinwire": {**own["thinwire"], "shard": [1 - own["thinwire"]["shard"][0], 2]}}
    with raises(ValueError, "shard", "thinwire.per_rank"):
        optimizer.load_state_dict(other)
    with raises(ValueError, "all shards", "thinwire.per_rank"):
        optimizer.consolidate_state_dict()
    optimizer.zero_grad()
    with raises(RuntimeError, "get_optimizer_state_dict", "thinwire.per_rank"):
        get_optimizer_state_dict(model, optimizer)
    optimizer.zero_grad()
    torchs = torch.optim.AdamW(model.parameters())
    torchs.load_state_dict(optimizer.torch_state_dict())
    take_step(model, torchs, [rank], 3)


def test_other_ways_to_save_say_what_to_do(saved: Found) -> None:
    assert saved["other_ways"] == [None] * 4


def without_shards(rank: int, mesh: Any, path: Path) -> dict[str, Tensor]:
    """DDP loads what a sharded model has saved."""
    ddp = DistributedDataParallel(make_net())
    optimizer = thinwire.AdamW(ddp, compressor=policy(TOPK), warmup_steps=2, refresh_every=4)
    optimizer.load_state_dict(thinwire.load_per_rank(path, "optimizer"))
    kept = {f"thinwire/residuals/{name}": residual.double() for name, residual in optimizer.sync.residuals.items()}
    for residual in kept.values():
        torch.distributed.all_reduce(residual)
        residual /= mesh.size()
    take_step(ddp, optimizer, [rank], AT)
    return kept
