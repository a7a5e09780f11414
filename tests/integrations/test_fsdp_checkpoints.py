"""Checkpoints of sharded models: other numbers of shards, of replicas, of both; the same bits with the same numbers."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.oracle import bytes_of
from support.sharded import Call, Found, call_all, local_bits, make_mesh, sharded_net, take_step, whole
from support.training import TOPK, make_net, policy, raises
from thinwire import Collective
from thinwire.testing import RankPool

ALGORITHMS = ("gather", "sharded")
AT, STEPS = 6, 10
"""The step at which a checkpoint is saved, and the steps of the run."""


def make(mesh: Any, algorithm: str = "auto") -> tuple[nn.Module, thinwire.AdamW]:
    model = sharded_net(mesh)
    optimizer = thinwire.AdamW(
        model,
        compressor=policy(TOPK),
        warmup_steps=2,
        refresh_every=4,
        group=mesh["replicate"],
        collective=Collective(algorithm=algorithm),
    )
    return model, optimizer


def save(path: Path, model: nn.Module, optimizer: thinwire.AdamW) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as save_all

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own use of torch
        save_all({"model": model.state_dict(), "optimizer": thinwire.per_rank(optimizer)}, checkpoint_id=path)


def load(path: Path, model: nn.Module, optimizer: thinwire.AdamW) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load as load_all

    weights = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_all(weights, checkpoint_id=path)
    model.load_state_dict(weights["model"])
    optimizer.load_state_dict(thinwire.load_per_rank(path, "optimizer", owner=optimizer))


def sums(mesh: Any, optimizer: thinwire.AdamW) -> dict[str, Tensor]:
    """What replicas have on average: residuals and momentum, over all shards; a new replica has none."""
    made = {}
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
            made[path] = mean / mesh["replicate"].size()
    return made


def first_half(rank: int, mesh: Any, path: Path, algorithm: str) -> Any:
    model, optimizer = make(mesh, algorithm)
    for step in range(AT):
        take_step(model, optimizer, [rank], step)
    save(path, model, optimizer)
    kept, weights = sums(mesh, optimizer), whole(model)
    for step in range(AT, STEPS):
        take_step(model, optimizer, [rank], step)
    return kept, weights, local_bits(model), optimizer.sync.stats.algorithms


def second_half(rank: int, mesh: Any, path: Path, shards: int, algorithm: str) -> Any:
    mesh = make_mesh(mesh.size(), shards)
    model, optimizer = make(mesh, algorithm)
    load(path, model, optimizer)
    kept, weights = sums(mesh, optimizer), whole(model)
    for step in range(AT, STEPS):
        take_step(model, optimizer, [rank], step)
    return kept, weights, local_bits(model), optimizer.sync.steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(ranks: RankPool, folder: Path) -> Found:
    calls = {algorithm: (first_half, folder / algorithm, algorithm) for algorithm in ALGORITHMS}
    return call_all(ranks, {**calls, "other_ways": (other_ways, folder)})


def test_the_same_and_other_numbers_of_shards_and_replicas(ranks: RankPool, saved: Found, folder: Path) -> None:
    """The same bits with the same numbers; DDP, too, loads what a sharded model has saved."""
    same: dict[str, Call] = {each: (second_half, folder / each, 2, each) for each in ALGORITHMS}
    more: dict[str, Call] = {str(shards): (second_half, folder / "gather", shards, "auto") for shards in (1, 4)}
    fewer: dict[str, Call] = {"1": more["1"], "without_shards": (without_shards, folder / "gather")}
    four, two = call_all(ranks, {**same, **more}), call_all(ranks, fewer, world_size=2)
    for algorithm in ALGORITHMS:
        for one, other in zip(saved[algorithm], four[algorithm], strict=True):
            assert one[2] == other[2], algorithm
            assert algorithm in one[3]
    for found, shards in ((four, 1), (four, 4), (two, 1)):
        check(saved, found[str(shards)], shards)
    kept, residuals = saved["gather"][0][0], two["without_shards"][0]
    assert len(residuals) > 3
    for name, residual in residuals.items():
        torch.testing.assert_close(residual, kept[name].flatten(), msg=name)


@pytest.mark.slow
def test_three_shards(ranks: RankPool, saved: Found, folder: Path) -> None:
    calls: dict[str, Call] = {"3": (second_half, folder / "gather", 3, "auto")}
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

    model, optimizer = make(mesh)
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
