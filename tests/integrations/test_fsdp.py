"""What ranks compute for a model sharded by FSDP2: that of DDP, compressed between replicas."""

import gc
import hashlib
import weakref
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


def beside_ddp(rank: int, mesh: Any, kind: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
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
    return local_bits(sharded), weight_bits(ddp)


def test_one_shard_is_ddp_to_the_last_bit(ranks: RankPool) -> None:
    kinds: dict[str, Call] = {kind: (beside_ddp, kind) for kind in ("AdamW", "SGD", "attach")}
    found = call_all(ranks, kinds, world_size=2, shards=1)
    for kind in kinds:
        for sharded, ddp in found[kind]:
            assert sharded == ddp, kind


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


# Two replicas of two shards.


@pytest.fixture(scope="module")
def found(ranks: RankPool) -> Found:
    calls = {each.__name__: (each,) for each in (clipped, auto, count_bytes, attached)}
    return call_all(ranks, {**calls, **{f"released {kind}": (released, kind) for kind in ("AdamW", "attach")}})


def clipped(rank: int, mesh: Any) -> list[float]:
    """The largest difference to DDP, dense, with clipping that depends on the norm over all shards."""
    replica = mesh["replicate"].get_local_rank()
    sharded = sharded_net(mesh)
    ddp = DistributedDataParallel(make_net(), process_group=mesh.get_group("replicate"))
    common = {"lr": 0.1, "compressor": "none", "max_grad_norm": 0.05}
    mine = thinwire.SGD(sharded, group=mesh["replicate"], **common)
    theirs = thinwire.SGD(ddp, **common)
    unclipped = make_net()
    free = torch.optim.SGD(unclipped.parameters(), lr=0.1)
    for step in range(4):
        take_step(sharded, mine, [rank], step)
        take_step(ddp, theirs, [2 * replica, 2 * replica + 1], step)
        take_step(unclipped, free, range(4), step)
    return [apart(whole(sharded), whole(ddp.module)), apart(whole(sharded), whole(unclipped))]


def test_clipping_is_by_the_norm_over_all_shards(found: Found) -> None:
    for to_ddp, to_unclipped in found["clipped"]:
        assert to_ddp < 1e-6
        assert to_unclipped > 1e-3


def auto(rank: int, mesh: Any) -> Any:
    model = sharded_net(mesh)
    optimizer = thinwire.AdamW(model, compressor=policy("auto"), warmup_steps=1, group=mesh["replicate"])
    for step in range(40):
        take_step(model, optimizer, [rank], step)
    assert optimizer.sync.choice is not None
    return optimizer.sync.choice.record(), local_bits(model)


def test_auto_makes_one_choice_for_all_shards(found: Found) -> None:
    each = found["auto"]
    assert all(choice == each[0][0] for choice, _ in each)
    assert each[0][0]["step_seconds"]
    assert each[0][1] == each[2][1]
    assert each[1][1] == each[3][1]


def count_bytes(rank: int, mesh: Any) -> tuple[int, int, int]:
    """Bytes that this rank sends to other replicas, with DDP and with two shards; and of a payload."""

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
    return mine.sync.stats.bytes_sent, theirs.sync.stats.bytes_sent, mine.sync.stats.bytes_dense


def test_a_rank_sends_its_share_of_the_bytes_of_ddp(found: Found) -> None:
    for sharded, ddp, dense in found["count_bytes"]:
        assert sharded == pytest.approx(ddp / 2, rel=0.02)
        assert sharded < dense / 4


def attached(rank: int, mesh: Any) -> Any:
    """SGD on gradients of 8 bits beside DDP with as many replicas; a NaN in one shard makes all gradients NaN."""
    replica = mesh["replicate"].get_local_rank()
    model, reference = sharded_net(mesh), make_net()
    bad = spoil_last_rank(model, rank)
    sync = thinwire.attach(model, policy("quantize:bits=8"), group=mesh["replicate"])
    mine, theirs = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, reference))
    for step in range(6):
        take_step(model, mine, [rank], step)
        take_step(reference, theirs, range(4), step)
    distance, bits, sent = apart(whole(model), whole(reference)), local_bits(model), sync.stats.bytes_sent
    bad[0] = True
    mine.zero_grad()
    given, wanted = make_batch(replica, 9)
    (model(given) - wanted).square().mean().backward()
    gradients = [local for p in model.parameters() if (local := p.grad.to_local()).numel()]  # type: ignore[union-attr,attr-defined]
    return distance, bits, sent, sync.finite, all(bool(each.isnan().all()) for each in gradients)


def test_attach_averages_gradients_between_replicas(found: Found) -> None:
    each = found["attached"]
    for distance, _, sent, finite, all_nan in each:
        assert distance < 2e-3
        assert sent > 0
        assert finite is False
        assert all_nan
    assert [bits for _, bits, *_ in each[:2]] == [bits for _, bits, *_ in each[2:]]


def released(rank: int, mesh: Any, kind: str) -> tuple[set[str], bool, bool]:
    """What is compressed, whether the gradients are freed by zero_grad, and the model with its last reference."""
    model, between = sharded_net(mesh), mesh["replicate"]
    if kind == "attach":
        sync = thinwire.attach(model, policy(TOPK), group=between)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    else:
        optimizer = thinwire.AdamW(model, group=between, warmup_steps=1)
        sync = optimizer.sync
    for step in range(3):
        take_step(model, optimizer, [rank], step)
    slots = sync.last_step.slots_used if kind == "AdamW" else []  # type: ignore[union-attr]
    compressed = {name for slot in slots if slot.slice.compressor.sparse for name in slot.slice.names if name}
    assert all(part.numel() < 4096 for part in local_parts(model).values())
    parameter = next(iter(model.parameters()))
    gradient = weakref.ref(parameter.grad.to_local().untyped_storage())  # type: ignore[union-attr,attr-defined]
    shard_ = weakref.ref(parameter)
    optimizer.zero_grad()
    gc.collect()
    is_freed = gradient() is None
    del optimizer, model, parameter, sync, slots
    gc.collect()
    return compressed, is_freed, shard_() is None


def test_small_is_by_the_size_over_all_shards_and_nothing_keeps_gradients_or_the_model(found: Found) -> None:
    """Of 4,096 elements and more a parameter is compressed, though this rank has half of them."""
    assert found["released AdamW"] == [({"2.weight", "4.weight"}, True, True)] * 4
    assert found["released attach"] == [(set(), True, True)] * 4
