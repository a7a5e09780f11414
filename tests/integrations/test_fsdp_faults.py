"""One decision for the whole model: what one rank finds, or that it fails or dies, is known to all ranks."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from support.optimizers import make
from support.oracle import bytes_of
from support.sharded import SECONDS, call_all, local_bits, make_mesh, options, sharded_net, take_step
from support.training import make_batch, sync_bits
from thinwire.collectives.transport.link import GlooLink, LinkBroken
from thinwire.testing import LOST, RankPool, store_barrier


def state_bits(model: nn.Module, optimizer: Any) -> dict[Any, bytes]:
    kept = optimizer.state_dict()["state"]
    moments = {(number, kind): bytes_of(one[kind]) for number, one in kept.items() for kind in optimizer.moments}
    return {**local_bits(model), **sync_bits(optimizer.sync), **moments}


def not_finite(rank: int, mesh: Any) -> Any:
    """Rank 3 has a NaN in its shard at step 3: no shard of any replica changes."""
    model = sharded_net(mesh)
    bad = [False]

    def spoil(parameter: Any) -> None:
        if bad[0]:
            parameter.grad.to_local().view(-1)[0] = torch.nan

    if rank == 3:
        dict(model.named_parameters())["4.weight"].register_post_accumulate_grad_hook(spoil)
    optimizer = make("AdamW", model, group=mesh["replicate"], **options("AdamW"))
    changed = []
    for step in range(6):
        bad[0] = step == 3
        before = state_bits(model, optimizer)
        take_step(model, optimizer, [rank], step)
        changed.append(state_bits(model, optimizer) != before)
    return changed, optimizer.skipped, local_bits(model)


def test_a_nan_in_one_shard_voids_the_step_everywhere(ranks: RankPool) -> None:
    each = call_all(ranks, {"not_finite": (not_finite,)})["not_finite"]
    for changed, skipped, _ in each:
        assert changed == [True, True, True, False, True, True]
        assert skipped == 1
    assert each[0][2] == each[2][2]
    assert each[1][2] == each[3][2]


def fails_once(rank: int, mesh: Any, where: str) -> Any:
    """Rank 3 fails in its fourth step: in the backward pass, or by its link to rank 1."""
    model = sharded_net(mesh)
    optimizer = make("AdamW", model, group=mesh["replicate"], timeout=SECONDS, **options("AdamW"))
    for step in range(3):
        take_step(model, optimizer, [rank], step)
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


@pytest.mark.parametrize(("where", "reason"), [("backward", "the disk is on fire"), ("link", "the wire is cut")])
def test_an_error_on_one_rank_reaches_all_before_anything_changes(ranks: RankPool, where: str, reason: str) -> None:
    each = call_all(ranks, {"fails_once": (fails_once, where)})["fails_once"]
    for rank, (error, is_unchanged) in enumerate(each):
        assert reason in error, rank
        assert is_unchanged, rank
    assert where != "backward" or all("rank 3" in error for error, _ in each[:3])


def killed(rank: int, world_size: int, where: str, folder: Path) -> Any:
    """The last rank dies in its fourth step: in the forward or backward pass, or between them and the step."""
    mesh = make_mesh(world_size, world_size // 2)
    model = sharded_net(mesh)
    optimizer = make("AdamW", model, group=mesh["replicate"], timeout=SECONDS, **options("AdamW"))
    for step in range(3):
        take_step(model, optimizer, [rank], step)

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
