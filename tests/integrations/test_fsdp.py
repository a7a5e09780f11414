"""What ranks compute for a model sharded by FSDP2, that of DDP, compressed between replicas; and how much memory."""

import gc
import hashlib
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.optimizers import make
from support.sharded import (
    SECONDS,
    Call,
    Found,
    apart,
    call_all,
    local_bits,
    local_parts,
    make_mesh,
    options,
    shard,
    sharded_net,
    spoil_last_rank,
    take_step,
    whole,
)  # fmt: skip
from support.slow import slow
from support.training import TOPK, make_batch, make_net, policy, seeded, weight_bits
from thinwire.testing import RankPool

# One shard.


def beside_ddp(rank: int, mesh: Any, kind: str) -> None:
    sharded, ddp = sharded_net(mesh), DistributedDataParallel(make_net(), find_unused_parameters=True)
    between = mesh["replicate"]
    if kind == "attach":
        mine, theirs = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (sharded, ddp))
        syncs = thinwire.attach(sharded, policy(TOPK), group=between), thinwire.attach(ddp, policy(TOPK))
    else:
        mine, theirs = make(kind, sharded, group=between, **options(kind)), make(kind, ddp, **options(kind))
        syncs = mine.sync, theirs.sync
    for step in range(6 if kind == "attach" else 20):
        take_step(ddp, theirs, [rank], step)
        syncs[0].wanted_layout = syncs[1].layout  # parameters in another order would give other bits
        take_step(sharded, mine, [rank], step)
    assert local_bits(sharded) == weight_bits(ddp)


def test_one_shard_is_ddp_to_the_last_bit(ranks: RankPool) -> None:
    kinds: dict[str, Call] = {kind: (beside_ddp, kind) for kind in ("AdamW", "SGD", "attach")}
    found = call_all(ranks, kinds, world_size=2, shards=1)
    assert [found[kind] for kind in kinds] == [[None, None]] * 3


# Many steps.


def long_run(rank: int, world_size: int, shards: int) -> Any:
    """200 steps, beside DDP with as many replicas, whose batches are those of all shards of a replica."""
    mesh = make_mesh(world_size, shards)
    replica = mesh["replicate"].get_local_rank()
    sharded = shard(make_net(), mesh, [])
    mine = thinwire.AdamW(sharded, lr=1e-3, compressor=policy(TOPK), group=mesh["replicate"], refresh_every=50)
    is_reference = mesh["shard"].get_local_rank() == 0  # one rank of each replica is enough
    if is_reference:
        ddp = DistributedDataParallel(make_net(), process_group=mesh.get_group("replicate"))
        theirs = thinwire.AdamW(ddp, lr=1e-3, compressor=policy(TOPK), refresh_every=50)
    losses, reference, bits = [], [], []
    for step in range(200):
        losses.append(take_step(sharded, mine, [rank], step))
        if is_reference:
            reference.append(take_step(ddp, theirs, range(shards * replica, shards * (replica + 1)), step))
        bits.append(hashlib.sha256(b"".join(local_bits(sharded).values())).hexdigest())
    return bits, losses, reference, mine.second_moment_scale


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), slow(2, 4), slow(4, 2)])
def test_replicas_have_the_same_bits_for_200_steps_and_the_loss_of_ddp(
    ranks: RankPool, replicas: int, shards: int
) -> None:
    found = ranks.run(long_run, replicas * shards, shards, timeout=4 * SECONDS)
    bits, losses, reference, scales = zip(*found, strict=True)
    for rank, own in enumerate(bits):
        assert own == bits[rank % shards], rank  # after every step
        assert len(set(own)) == 200
    assert len({own[-1] for own in bits}) == shards
    sharded = sum(sum(each[-40:]) for each in losses) / len(found) / 40
    ddp = sum(sum(each[-40:]) for each in reference) / replicas / 40
    first = sum(each[0] for each in losses) / len(found)
    print(f"\n{replicas} x {shards}: loss {first:.4f} at first, at the end {sharded:.5f}, of DDP {ddp:.5f}")
    assert ddp < 0.5 * first
    assert sharded == pytest.approx(ddp, rel=0.01)
    assert scales[0]
    assert all(scale == scales[0] for scale in scales)  # c is that of the whole tensor


# Two replicas of two shards. What scenes return is the same on both replicas.


def clipping_is_by_the_norm_over_all_shards(rank: int, mesh: Any) -> None:
    """Dense training beside DDP, with clipping that depends on the norm."""
    replica = mesh["replicate"].get_local_rank()
    sharded, unclipped = sharded_net(mesh), make_net()
    ddp = DistributedDataParallel(make_net(), process_group=mesh.get_group("replicate"))
    common = {"lr": 0.1, "compressor": "none", "max_grad_norm": 0.05}
    mine = thinwire.SGD(sharded, group=mesh["replicate"], **common)
    theirs = thinwire.SGD(ddp, **common)
    free = torch.optim.SGD(unclipped.parameters(), lr=0.1)
    for step in range(4):
        take_step(sharded, mine, [rank], step)
        take_step(ddp, theirs, [2 * replica, 2 * replica + 1], step)
        take_step(unclipped, free, range(4), step)
    assert apart(whole(sharded), whole(ddp.module)) < 1e-6
    assert apart(whole(sharded), whole(unclipped)) > 1e-3


def auto_makes_one_choice_for_all_shards(rank: int, mesh: Any) -> Any:
    model = sharded_net(mesh)
    optimizer = thinwire.AdamW(model, compressor=policy("auto"), warmup_steps=1, group=mesh["replicate"])
    for step in range(40):
        take_step(model, optimizer, [rank], step)
    choice = optimizer.sync.choice.record()
    assert choice["step_seconds"]
    choices: list[Any] = [None] * 4
    torch.distributed.all_gather_object(choices, choice)
    assert choices == [choice] * 4
    return local_bits(model)


def a_rank_sends_its_share_of_the_bytes_of_ddp(rank: int, mesh: Any) -> None:
    def model() -> nn.Module:
        with seeded(0):
            return nn.Sequential(nn.Linear(32, 2048), nn.Linear(2048, 256), nn.Linear(256, 8))

    ddp = DistributedDataParallel(model(), process_group=mesh.get_group("replicate"))
    sharded = shard(model(), mesh)
    theirs = thinwire.AdamW(ddp, warmup_steps=1, refresh_every=2)
    mine = thinwire.AdamW(sharded, warmup_steps=1, refresh_every=2, group=mesh["replicate"])
    for step in range(5):
        take_step(ddp, theirs, [rank], step)
        take_step(sharded, mine, [rank], step)
    assert mine.sync.stats.bytes_sent == pytest.approx(theirs.sync.stats.bytes_sent / 2, rel=0.02)
    assert mine.sync.stats.bytes_sent < mine.sync.stats.bytes_dense / 4


def attach_averages_gradients_between_replicas(rank: int, mesh: Any) -> Any:
    """SGD on gradients of 8 bits beside DDP with as many replicas; a NaN in one shard makes all gradients NaN."""
    model, reference = sharded_net(mesh), make_net()
    bad = spoil_last_rank(model, rank)
    sync = thinwire.attach(model, policy("quantize:bits=8"), group=mesh["replicate"])
    mine, theirs = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, reference))
    for step in range(6):
        take_step(model, mine, [rank], step)
        take_step(reference, theirs, range(4), step)
    assert apart(whole(model), whole(reference)) < 2e-3
    assert sync.stats.bytes_sent > 0
    bits, bad[0] = local_bits(model), True
    mine.zero_grad()
    given, wanted = make_batch(mesh["replicate"].get_local_rank(), 9)
    (model(given) - wanted).square().mean().backward()
    assert sync.finite is False
    for parameter in model.parameters():
        assert parameter.grad.to_local().isnan().all()  # type: ignore[union-attr,attr-defined]
    return bits


def nothing_keeps_gradients_or_the_model(rank: int, mesh: Any) -> None:
    """zero_grad frees gradients, and the model ends with its last reference; with AdamW, then with `attach`.

    Of 4,096 elements and more a parameter is compressed, though this rank has half of them.
    """
    for kind in ("AdamW", "attach"):
        model, between = sharded_net(mesh), mesh["replicate"]
        if kind == "attach":
            sync = thinwire.attach(model, policy(TOPK), group=between)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        else:
            optimizer = thinwire.AdamW(model, group=between, warmup_steps=1)
            sync = optimizer.sync
        for step in range(3):
            take_step(model, optimizer, [rank], step)
        if kind == "AdamW":
            slots = [slot.slice for slot in sync.last_step.slots_used if slot.slice.compressor.sparse]  # type: ignore[union-attr]
            assert {name for slice_ in slots for name in slice_.names if name} == {"2.weight", "4.weight"}
            assert all(part.numel() < 4096 for part in local_parts(model).values())
            del slots
        parameter = next(iter(model.parameters()))
        gradient = weakref.ref(parameter.grad.to_local().untyped_storage())  # type: ignore[union-attr,attr-defined]
        kept = weakref.ref(parameter)
        optimizer.zero_grad()
        gc.collect()
        assert gradient() is None, kind
        del optimizer, model, parameter, sync
        gc.collect()
        assert kept() is None, kind


SCENES = {
    scene.__name__: scene
    for scene in (
        clipping_is_by_the_norm_over_all_shards, auto_makes_one_choice_for_all_shards,
        a_rank_sends_its_share_of_the_bytes_of_ddp, attach_averages_gradients_between_replicas,
        nothing_keeps_gradients_or_the_model,
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def found(ranks: RankPool) -> Found:
    return call_all(ranks, {name: (scene,) for name, scene in SCENES.items()})


@pytest.mark.parametrize("scene", SCENES)
def test_two_replicas_of_two_shards(found: Found, scene: str) -> None:
    returned = found[scene]
    assert returned[:2] == returned[2:]


# Memory beyond FSDP with torch's optimizer.


def use_memory(rank: int, world_size: int, kind: str) -> float:
    """Peak of memory in a step, in copies of this rank's parameters; all that is loaded once is loaded before."""
    for width in (128, 2048):
        mesh = make_mesh(world_size, 2)
        gc.collect()
        base = resident("VmRSS")
        model = shard(nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]), mesh)
        if kind == "torch":
            optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=False)
        else:
            optimizer = thinwire.AdamW(model, group=mesh["replicate"], warmup_steps=2)
        given = torch.randn(4, width)
        for step in range(6):
            if step == 3:
                Path("/proc/self/clear_refs").write_text("5")
            optimizer.zero_grad()
            model(given).square().mean().backward()
            optimizer.step()
        peak = resident("VmHWM") - base
    return peak / sum(part.nbytes for part in local_parts(model).values())


def resident(kind: str) -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(kind))


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs /proc")
def test_memory_beyond_torch_is_one_residual_and_scratch() -> None:
    with RankPool() as first, RankPool() as second:
        torchs = max(first.run(use_memory, 4, "torch", timeout=2 * SECONDS))
        ours = max(second.run(use_memory, 4, "thinwire", timeout=2 * SECONDS))
    print(f"\ntorch {torchs:.2f}, thinwire {ours:.2f} copies of the shard's parameters")
    assert 0.8 < ours - torchs < 1.8
