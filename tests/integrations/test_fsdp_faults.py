"""One decision for the whole model: what one rank finds, or that it fails or dies, is known to all ranks."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import thinwire
from support.optimizers import make, make_scaler
from support.oracle import bytes_of
from support.sharded import (
    SECONDS,
    Call,
    call_all,
    local_bits,
    make_mesh,
    options,
    sharded_net,
    spoil_last_rank,
    take_step,
)
from support.training import make_batch, sync_bits
from thinwire import Collective
from thinwire.collectives.transport.link import GlooLink, LinkBroken
from thinwire.testing import LOST, RankPool, store_barrier


def state_bits(model: nn.Module, optimizer: Any) -> dict[Any, bytes]:
    kept = optimizer.state_dict()["state"]
    moments = {
        (number, kind): bytes_of(one[kind]) for number, one in kept.items() for kind in optimizer._parameters.vectors
    }
    return {**local_bits(model), **sync_bits(optimizer.sync), **moments}


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
    optimizer = make(
        "AdamW", model, group=mesh["replicate"], collective=Collective(timeout=SECONDS), **options("AdamW")
    )
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
    optimizer = make(
        "AdamW", model, group=mesh["replicate"], collective=Collective(timeout=SECONDS), **options("AdamW")
    )
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
