"""Models sharded by FSDP2: compressed between replicas, with one decision for all shards of the model.

Four ranks are two replicas of two shards: ranks 0 and 1 hold one replica, ranks 2 and 3 the other.
"""

import gc
import os
import signal
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import thinwire
from support.optimizers import BOTH, make, make_scaler
from support.oracle import bytes_of
from support.sharded import local_bits, local_parts, make_mesh, shard, sharded_net, take_step, whole
from support.slow import slow
from support.training import TOPK, make_batch, make_net, policy, raises, seeded, sync_bits, weight_bits
from thinwire.collectives.transport.link import GlooLink, LinkBroken
from thinwire.sync.buckets import plain_name
from thinwire.testing import LOST, RankPool, store_barrier

SECONDS = 120.0
"""The time-out of a run; loading FSDP takes seconds on each rank."""


def options(kind: str, **others: Any) -> dict[str, Any]:
    return {"warmup_steps": 2, **({"refresh_every": 4} if kind == "AdamW" else {}), **others}


# What is computed.


def beside_ddp(rank: int, world_size: int, kind: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    mesh = make_mesh(world_size, 1)
    sharded, ddp = sharded_net(mesh), DistributedDataParallel(make_net(), find_unused_parameters=True)
    mine = make(kind, sharded, group=mesh["replicate"], **options(kind))
    theirs = make(kind, ddp, **options(kind))
    for step in range(20):
        take_step(ddp, theirs, [rank], step)
        mine.sync.wanted_layout = theirs.sync.layout  # parameters in another order would give other bits
        take_step(sharded, mine, [rank], step)
    return local_bits(sharded), weight_bits(ddp)


@BOTH
def test_one_shard_is_ddp_to_the_last_bit(ranks: RankPool, kind: str) -> None:
    for sharded, ddp in ranks.run(beside_ddp, 2, kind, timeout=SECONDS):
        assert sharded == ddp


def long_run(rank: int, world_size: int) -> Any:
    """200 steps, beside DDP with as many replicas, whose batches are those of all shards of a replica."""
    mesh = make_mesh(world_size, 2)
    replica = mesh["replicate"].get_local_rank()
    sharded = sharded_net(mesh)
    ddp = DistributedDataParallel(make_net(), process_group=mesh.get_group("replicate"))
    mine = thinwire.AdamW(sharded, lr=1e-3, compressor=policy(TOPK), group=mesh["replicate"], refresh_every=50)
    theirs = thinwire.AdamW(ddp, lr=1e-3, compressor=policy(TOPK), refresh_every=50)
    losses, reference, bits = [], [], []
    for step in range(200):
        losses.append(take_step(sharded, mine, [rank], step))
        reference.append(take_step(ddp, theirs, [2 * replica, 2 * replica + 1], step))
        if step % 20 == 19:
            bits.append(local_bits(sharded))
    return bits, losses, reference, mine.second_moment_scale


def test_replicas_have_the_same_bits_for_200_steps_and_the_loss_of_ddp(ranks: RankPool) -> None:
    found = ranks.run(long_run, 4, timeout=2 * SECONDS)
    bits = [each[0] for each in found]
    assert bits[:2] == bits[2:]
    assert bits[0][-1] != bits[0][0]
    assert bits[0] != bits[1]
    sharded = sum(sum(losses[-40:]) for _, losses, _, _ in found) / 160
    ddp = sum(sum(losses[-40:]) for _, _, losses, _ in found) / 160
    first = sum(losses[0] for _, losses, _, _ in found) / 4
    assert ddp < 0.5 * first
    assert abs(sharded - ddp) < 0.01 * first
    assert all(scale == found[0][3] for *_, scale in found)  # c is that of the whole tensor
    assert found[0][3]


def apart(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return max(float((tensor - second[name]).abs().max()) for name, tensor in first.items())


def clipped(rank: int, world_size: int) -> list[float]:
    """The largest difference to DDP, dense, with clipping that depends on the norm over all shards."""
    mesh = make_mesh(world_size, 2)
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


def test_clipping_is_by_the_norm_over_all_shards(ranks: RankPool) -> None:
    for to_ddp, to_unclipped in ranks.run(clipped, 4, timeout=SECONDS):
        assert to_ddp < 1e-6
        assert to_unclipped > 1e-3


def global_rule(rank: int, world_size: int) -> tuple[set[str], set[str]]:
    """Of 4,096 elements and more a parameter is compressed, though this rank has half of them."""
    mesh = make_mesh(world_size, 2)
    model = sharded_net(mesh)
    optimizer = thinwire.AdamW(model, group=mesh["replicate"], warmup_steps=1)
    for step in range(3):
        take_step(model, optimizer, [rank], step)
    sent = {
        name for slot in optimizer.sync.last_step.slots for name in slot.slice.names if slot.slice.compressor.sparse
    }
    return {name for name in sent if name}, {name for name, part in local_parts(model).items() if part.numel() >= 4096}


def test_small_is_by_the_size_over_all_shards(ranks: RankPool) -> None:
    for compressed, large in ranks.run(global_rule, 4, timeout=SECONDS):
        assert compressed == {"2.weight", "4.weight"}
        assert large == set()


def auto(rank: int, world_size: int) -> Any:
    mesh = make_mesh(world_size, 2)
    model = sharded_net(mesh)
    optimizer = thinwire.AdamW(model, compressor=policy("auto"), warmup_steps=1, group=mesh["replicate"])
    for step in range(40):
        take_step(model, optimizer, [rank], step)
    assert optimizer.sync.choice is not None
    return optimizer.sync.choice.record(), local_bits(model)


def test_auto_makes_one_choice_for_all_shards(ranks: RankPool) -> None:
    found = ranks.run(auto, 4, timeout=SECONDS)
    assert all(choice == found[0][0] for choice, _ in found)
    assert found[0][0]["step_seconds"]
    assert found[0][1] == found[2][1]
    assert found[1][1] == found[3][1]


# One decision for the whole model.


def state_bits(model: nn.Module, optimizer: Any) -> dict[Any, bytes]:
    kept = optimizer.state_dict()["state"]
    moments = {(number, kind): bytes_of(one[kind]) for number, one in kept.items() for kind in optimizer.moments}
    return {**local_bits(model), **sync_bits(optimizer.sync), **moments}


def not_finite(rank: int, world_size: int) -> Any:
    """Rank 3 has a NaN in its shard at step 3: no shard of any replica changes."""
    mesh = make_mesh(world_size, 2)
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
    found = ranks.run(not_finite, 4, timeout=SECONDS)
    for changed, skipped, _ in found:
        assert changed == [True, True, True, False, True, True]
        assert skipped == 1
    assert found[0][2] == found[2][2]
    assert found[1][2] == found[3][2]


def fails_once(rank: int, world_size: int, where: str) -> Any:
    """Rank 3 fails in its fourth step: in the backward pass, or by its link to rank 1."""
    mesh = make_mesh(world_size, 2)
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
        store_barrier("all have failed", world_size)
        return f"{type(error).__name__}: {error}", local_bits(model) == before
    return "", False


@pytest.mark.parametrize(("where", "reason"), [("backward", "the disk is on fire"), ("link", "the wire is cut")])
def test_an_error_on_one_rank_reaches_all_before_anything_changes(ranks: RankPool, where: str, reason: str) -> None:
    found = ranks.run(fails_once, 4, where, timeout=SECONDS)
    for rank, (error, is_unchanged) in enumerate(found):
        assert reason in error, rank
        assert is_unchanged, rank
    assert where != "backward" or all("rank 3" in error for error, _ in found[:3])


def killed(rank: int, world_size: int) -> Any:
    """Rank 3 dies between its backward pass and its step."""
    mesh = make_mesh(world_size, 2)
    model = sharded_net(mesh)
    optimizer = make("AdamW", model, group=mesh["replicate"], timeout=SECONDS, **options("AdamW"))
    for step in range(3):
        take_step(model, optimizer, [rank], step)
    optimizer.zero_grad()
    given, wanted = make_batch(rank, 3)
    (model(given) - wanted).square().mean().backward()
    store_barrier("all have sent", world_size)
    if rank == 3:
        optimizer.sync._step.wait()  # so that rank 1 has all that it needs, and learns it from rank 0 alone
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        optimizer.step()
        optimizer.zero_grad()
        (model(given) - wanted).square().mean().backward()
        optimizer.step()
    except (thinwire.CollectiveError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_killed_rank_ends_all_ranks_with_its_name(ranks: RankPool) -> None:
    found = ranks.run(killed, 4, timeout=SECONDS, lost=[3])
    assert found[3] is LOST
    for error in found[:3]:
        assert "rank 3" in error


# What users of FSDP do.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, given: Tensor) -> Tensor:
        return given + self.down(torch.tanh(self.up(given)))


class Blocks(nn.Module):
    """A small model with what models have: blocks, a norm, and a head of three and of one output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(32)
        self.head, self.last = nn.Linear(32, 7), nn.Linear(32, 1)

    def forward(self, given: Tensor) -> Tensor:
        for block in self.blocks:
            given = block(given)
        given = self.norm(given)
        return torch.cat([self.head(given), self.last(given)], 1)


def make_blocks() -> Blocks:
    with seeded(0):
        return Blocks()


def as_blocks(mesh: Any, **options: Any) -> nn.Module:
    model = make_blocks()
    return shard(model, mesh, model.blocks, **options)


def plain(mesh: Any) -> nn.Module:
    return as_blocks(mesh)


def kept_gathered(mesh: Any) -> nn.Module:
    return as_blocks(mesh, reshard_after_forward=False)


def smaller_groups(mesh: Any) -> nn.Module:
    return as_blocks(mesh, reshard_after_forward=1)


def second_dimension(mesh: Any) -> nn.Module:
    from torch.distributed.tensor import Shard

    return as_blocks(mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)


def offloaded(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return as_blocks(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def low_precision(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy_ = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return as_blocks(mesh, mp_policy=policy_)


def tied(mesh: Any) -> nn.Module:
    model = make_blocks()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return shard(model, mesh, [])


def frozen(mesh: Any) -> nn.Module:
    model = make_blocks()
    model.blocks[0].requires_grad_(False)
    return shard(model, mesh, model.blocks)


def frozen_and_plain(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = make_blocks()
    model.norm.requires_grad_(False)
    fully_shard(model, mesh=mesh["shard"], ignored_params=set(model.norm.parameters()))
    return model


def checkpointed(mesh: Any) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = make_blocks()
    model.blocks = nn.ModuleList([checkpoint_wrapper(block) for block in model.blocks])
    return shard(model, mesh, model.blocks)


def compiled(mesh: Any) -> nn.Module:
    model = make_blocks()
    model.blocks = nn.ModuleList([torch.compile(block, backend="aot_eager") for block in model.blocks])
    return shard(model, mesh, model.blocks)


def run_twice(mesh: Any) -> nn.Module:
    model = make_blocks()
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[0]])
    return shard(model, mesh, [model.blocks[0]])


CASES = [
    plain, kept_gathered, smaller_groups, second_dimension, offloaded, low_precision, tied, frozen, frozen_and_plain,
    checkpointed, run_twice,
]  # fmt: skip


def references(build: Any) -> nn.Module:
    """The same model for one process, which sees all batches."""
    model = make_blocks()
    if build is tied:
        model.blocks[1].up.weight = model.blocks[0].up.weight
    if build is frozen:
        model.blocks[0].requires_grad_(False)
    if build is frozen_and_plain:
        model.norm.requires_grad_(False)
    if build is run_twice:
        model.blocks = nn.ModuleList([model.blocks[0], model.blocks[0]])
    return model


def as_users_do(rank: int, world_size: int, name: str) -> Any:
    """Dense beside torch's AdamW in one process, then compressed."""
    build = globals()[name]
    if build is compiled:
        warnings.simplefilter("ignore")  # torch.compile itself warns
    mesh = make_mesh(world_size, 2)
    model, reference = build(mesh), references(build)
    mine = thinwire.AdamW(model, lr=1e-3, compressor="none", group=mesh["replicate"], warmup_steps=0)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(4):
        take_step(model, mine, [rank], step)
        take_step(reference, theirs, range(4), step)
    found = {plain_name(each): tensor for each, tensor in whole(model).items()}
    assert found.keys() == dict(reference.named_parameters()).keys()
    distance = apart(found, whole(reference))
    optimizer = thinwire.AdamW(
        model, lr=1e-3, compressor=policy(TOPK), group=mesh["replicate"], warmup_steps=1, refresh_every=3
    )
    before = whole(model)
    for step in range(4, 12):
        take_step(model, optimizer, [rank], step)
    moved = {each: float((tensor - before[each]).abs().max()) for each, tensor in whole(model).items()}
    trained = [each for each, p in model.named_parameters() if p.requires_grad]
    return distance, local_bits(model), min(moved[each] for each in trained), optimizer.sync.stats.bytes_sent


@pytest.mark.parametrize("name", [*(case.__name__ for case in CASES), slow("compiled")])
def test_what_users_of_fsdp_do(ranks: RankPool, name: str) -> None:
    """Shards are uneven here, and that of one bias is empty on half of the ranks."""
    found = ranks.run(as_users_do, 4, name, timeout=SECONDS)
    for distance, _, moved, sent in found:
        assert distance < (5e-3 if name == "low_precision" else 2e-5)
        assert moved > 0
        assert sent > 0
    assert found[0][1] == found[2][1]
    assert found[1][1] == found[3][1]
    assert found[0][1] != found[1][1]


def accumulate(rank: int, world_size: int) -> Any:
    """Two micro-batches for each step, of which the first is not reduced; beside one batch of both."""
    mesh = make_mesh(world_size, 2)
    model, reference = as_blocks(mesh), make_blocks()
    mine = thinwire.AdamW(model, lr=1e-3, compressor="none", group=mesh["replicate"], warmup_steps=0)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(4):
        mine.zero_grad()
        for half in (0, 1):
            given, wanted = make_batch(2 * rank + half, step)
            model.set_requires_gradient_sync(half == 1)  # type: ignore[operator]
            (0.5 * (model(given) - wanted).square().mean()).backward()
        mine.step()
        take_step(reference, theirs, range(8), step)
    mine.zero_grad()
    given, wanted = make_batch(rank, 9)
    (model(given) - wanted).square().mean().backward()
    with raises(RuntimeError, "a second exchange", "set_requires_gradient_sync(False)"):
        (model(given) - wanted).square().mean().backward()
    return apart(whole(model), whole(reference))


class Reentrant(nn.Sequential):
    def forward(self, given: Tensor) -> Tensor:
        for layer in self:
            given = checkpoint(layer, given, use_reentrant=True)
        return given


def reentrant(rank: int, world_size: int) -> None:
    mesh = make_mesh(world_size, 2)
    model = shard(Reentrant(*make_net()), mesh)
    optimizer = make("SGD", model, group=mesh["replicate"])
    given, wanted = make_batch(rank, 0)
    with raises(RuntimeError, "a second exchange", "use_reentrant=False"):
        (model(given.requires_grad_()) - wanted).square().mean().backward()
    optimizer.zero_grad()


def test_reentrant_checkpoints_are_refused(ranks: RankPool) -> None:
    ranks.run(reentrant, 4, timeout=SECONDS)


def scaled(rank: int, world_size: int) -> Any:
    """A GradScaler finds Inf in a shard of rank 3: the step is void everywhere, and all scales fall."""
    mesh = make_mesh(world_size, 2)
    model = sharded_net(mesh)
    scaler = make_scaler(64.0)
    optimizer = make("AdamW", model, group=mesh["replicate"], grad_scaler=scaler, **options("AdamW"))
    changed = []
    for step in range(5):
        before = local_bits(model)
        optimizer.zero_grad()
        given, wanted = make_batch(rank, step)
        loss = (model(given) - wanted).square().mean()
        if step == 3 and rank == 3:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        changed.append(local_bits(model) != before)
    return changed, scaler.get_scale(), local_bits(model)


def test_a_grad_scaler_has_the_same_scale_on_all_shards(ranks: RankPool) -> None:
    found = ranks.run(scaled, 4, timeout=SECONDS)
    for changed, scale, _ in found:
        assert changed == [True, True, True, False, True]
        assert scale == 32.0
    assert [bits for *_, bits in found[:2]] == [bits for *_, bits in found[2:]]


def test_micro_batches_are_reduced_once(ranks: RankPool) -> None:
    assert max(ranks.run(accumulate, 4, timeout=SECONDS)) < 2e-5


def refused(rank: int, world_size: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = make_mesh(world_size, 2)
    between, inside = mesh["replicate"], mesh["shard"]

    def adamw(model: nn.Module, **options: Any) -> Any:
        return thinwire.AdamW(model, **{"group": between, **options})

    with raises(ValueError, "2 dimensions", 'mesh=mesh["shard"]', 'group=mesh["replicate"]'):
        adamw(fully_shard(make_net(), mesh=mesh))
    with raises(ValueError, "without group=", 'group=mesh["replicate"]'):
        adamw(sharded_net(mesh), group=None)
    with raises(ValueError, "expected one process group", 'group=mesh["replicate"]'):
        adamw(sharded_net(mesh), group=mesh)
    with raises(ValueError, "of this replica", 'group=mesh["replicate"]'):
        adamw(sharded_net(mesh), group=inside)
    partly = make_net()
    fully_shard(partly[0], mesh=inside)
    with raises(ValueError, "'2.weight' is a plain tensor", "'0.weight' is sharded"):
        adamw(partly)
    copied = make_net()
    copied[0].weight = nn.Parameter(distribute_tensor(copied[0].weight.detach(), inside, [Replicate()]))
    for parameter in list(copied.parameters())[1:]:
        parameter.requires_grad_(False)
    with raises(ValueError, "(Replicate(),)", "expected one Shard"):
        adamw(copied)
    with raises(ValueError, "FullyShardedDataParallel", "fully_shard"):
        adamw(FullyShardedDataParallel(make_net(), process_group=inside.get_group(), device_id=torch.device("cpu")))
    gathered = sharded_net(mesh)
    for module in gathered.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    with raises(ValueError, "gathered at this moment", "reshard()"):
        adamw(gathered)
    with raises(ValueError, "sharded", "thinwire.attach"):
        sync = thinwire.Synchronizer("quantize:bits=8", group=between)
        sync.all_reduce_gradients(sharded_net(mesh).named_parameters())

    model = sharded_net(mesh)
    optimizer = adamw(model)
    with raises(ValueError, "part of the backward pass"):
        optimizer.exchange()
    given, wanted = make_batch(rank, 0)
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    (model(given) - wanted).square().mean().backward()
    with raises(RuntimeError, "no gradients were exchanged", "set_requires_gradient_sync(True)"):
        optimizer.step()


def test_refusals_say_what_to_do(ranks: RankPool) -> None:
    ranks.run(refused, 4, timeout=SECONDS)


def changes_gradients(rank: int, world_size: int) -> None:
    mesh = make_mesh(world_size, 2)
    model = sharded_net(mesh)
    optimizer = make("SGD", model, group=mesh["replicate"])
    given, wanted = make_batch(rank, 0)
    for change in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        lambda: model[0].weight.grad.to_local().mul_(2),  # type: ignore[index,union-attr,operator]
        lambda: setattr(model[0].weight, "grad", model[0].weight.grad.clone()),  # type: ignore[index,union-attr]
    ):
        optimizer.zero_grad()
        (model(given) - wanted).square().mean().backward()
        change()
        before = local_bits(model)
        with raises(RuntimeError, "was changed after it was exchanged", "max_grad_norm="):
            optimizer.step()
        assert local_bits(model) == before
    optimizer.zero_grad()


def test_a_gradient_changed_after_it_was_sent_is_an_error(ranks: RankPool) -> None:
    ranks.run(changes_gradients, 4, timeout=SECONDS)


def count_bytes(rank: int, world_size: int) -> tuple[int, int, int]:
    """Bytes that this rank sends to other replicas, with DDP and with two shards; and of a payload."""
    mesh = make_mesh(world_size, 2)

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


def test_a_rank_sends_its_share_of_the_bytes_of_ddp(ranks: RankPool) -> None:
    for sharded, ddp, dense in ranks.run(count_bytes, 4, timeout=SECONDS):
        assert sharded == pytest.approx(ddp / 2, rel=0.02)
        assert sharded < dense / 4


# `attach`, for any optimizer.


def attached(rank: int, world_size: int) -> Any:
    """SGD on gradients of 8 bits beside DDP with as many replicas; a NaN in one shard makes all gradients NaN."""
    mesh = make_mesh(world_size, 2)
    replica = mesh["replicate"].get_local_rank()
    model, reference = sharded_net(mesh), make_net()
    bad = [False]

    def spoil(parameter: Any) -> None:
        if bad[0]:
            parameter.grad.to_local().view(-1)[0] = torch.nan

    if rank == 3:
        dict(model.named_parameters())["4.weight"].register_post_accumulate_grad_hook(spoil)
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


def test_attach_averages_gradients_between_replicas(ranks: RankPool) -> None:
    found = ranks.run(attached, 4, timeout=SECONDS)
    for distance, _, sent, finite, all_nan in found:
        assert distance < 2e-3
        assert sent > 0
        assert finite is False
        assert all_nan
    assert [bits for _, bits, *_ in found[:2]] == [bits for _, bits, *_ in found[2:]]


def attached_twice_the_same(rank: int, world_size: int) -> bool:
    """One shard, uncompressed: to the last bit as DDP with the same hook."""
    mesh = make_mesh(world_size, 1)
    model, ddp = sharded_net(mesh), DistributedDataParallel(make_net(), find_unused_parameters=True)
    mine, theirs = thinwire.attach(model, policy(TOPK), group=mesh["replicate"]), thinwire.attach(ddp, policy(TOPK))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, ddp)]
    for step in range(6):
        take_step(ddp, optimizers[1], [rank], step)
        mine.wanted_layout = theirs.layout
        take_step(model, optimizers[0], [rank], step)
    return local_bits(model) == weight_bits(ddp)


def test_attach_with_one_shard_is_ddp_to_the_last_bit(ranks: RankPool) -> None:
    assert ranks.run(attached_twice_the_same, 2, timeout=SECONDS) == [True, True]


def released(rank: int, world_size: int, kind: str) -> tuple[bool, bool]:
    """Whether the gradients are freed by zero_grad, and the model with its last reference."""
    mesh = make_mesh(world_size, 2)
    model = sharded_net(mesh)
    if kind == "attach":
        thinwire.attach(model, policy(TOPK), group=mesh["replicate"])
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    else:
        optimizer = make(kind, model, group=mesh["replicate"])
    for step in range(3):
        take_step(model, optimizer, [rank], step)
    parameter = next(iter(model.parameters()))
    gradient = weakref.ref(parameter.grad.to_local().untyped_storage())  # type: ignore[union-attr,attr-defined]
    shard_ = weakref.ref(parameter)
    optimizer.zero_grad()
    gc.collect()
    is_freed = gradient() is None
    del optimizer, model, parameter
    gc.collect()
    return is_freed, shard_() is None


@pytest.mark.parametrize("kind", ["AdamW", "attach"])
def test_nothing_keeps_gradients_or_the_model(ranks: RankPool, kind: str) -> None:
    assert ranks.run(released, 4, kind, timeout=SECONDS) == [(True, True)] * 4


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
            optimizer = thinwire.AdamW(model, group=mesh["replicate"])
        given = torch.randn(4, width)
        for step in range(13):
            if step == 10:
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
def test_memory_beyond_torch_is_one_residual_and_scratch(ranks: RankPool) -> None:
    with RankPool() as first, RankPool() as second:
        torchs = max(first.run(use_memory, 4, "torch", timeout=2 * SECONDS))
        ours = max(second.run(use_memory, 4, "thinwire", timeout=2 * SECONDS))
    print(f"\ntorch {torchs:.2f}, thinwire {ours:.2f} copies of the shard's parameters")
    assert 0.8 < ours - torchs < 1.8
