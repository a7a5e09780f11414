"""What users of FSDP do with their models: policies, tied and frozen weights, checkpointing, micro-batches, scalers."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from support.sharded import Found, apart, call_all, local_bits, shard, take_step, whole
from support.training import TOPK, make_batch, policy, raises, seeded
from thinwire.sync.buckets import plain_name
from thinwire.testing import RankPool


@pytest.fixture(scope="module")
def found(ranks: RankPool) -> Found:
    cases = {name: (as_users_do, name) for name in CASES if name != "compiled"}
    return call_all(ranks, {**cases, "accumulate": (accumulate,), "freeze": (freeze,)})


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


def changed(name: str) -> Blocks:
    """The model before it is sharded, with what these cases change in it; also for one process."""
    model = make_blocks()
    if name == "tied":
        model.blocks[1].up.weight = model.blocks[0].up.weight
    if name == "frozen":
        model.blocks[0].requires_grad_(False)
    if name == "frozen_and_plain":
        model.norm.requires_grad_(False)
    if name == "run_twice":
        model.blocks = nn.ModuleList([model.blocks[0], model.blocks[0]])
    return model


def frozen_and_plain(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = changed("frozen_and_plain")
    fully_shard(model, mesh=mesh["shard"], ignored_params=set(model.norm.parameters()))
    return model


def checkpointed(mesh: Any) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = make_blocks()
    model.blocks = nn.ModuleList([checkpoint_wrapper(block) for block in model.blocks])
    return shard(model, mesh, model.blocks)


def compiled(mesh: Any) -> nn.Module:
    warnings.simplefilter("ignore")  # torch.compile itself warns
    model = make_blocks()
    model.blocks = nn.ModuleList([torch.compile(block, backend="aot_eager") for block in model.blocks])
    return shard(model, mesh, model.blocks)


def run_twice(mesh: Any) -> nn.Module:
    model = changed("run_twice")
    return shard(model, mesh, [model.blocks[0]])


CASES: dict[str, Callable[[Any], nn.Module]] = {
    "plain": as_blocks,
    "kept_gathered": lambda mesh: as_blocks(mesh, reshard_after_forward=False),
    "smaller_groups": lambda mesh: as_blocks(mesh, reshard_after_forward=1),
    "second_dimension": second_dimension,
    "offloaded": offloaded,
    "low_precision": low_precision,
    "tied": lambda mesh: shard(changed("tied"), mesh, []),
    "frozen": lambda mesh: shard(model := changed("frozen"), mesh, model.blocks),
    "frozen_and_plain": frozen_and_plain,
    "checkpointed": checkpointed,
    "run_twice": run_twice,
    "compiled": compiled,
}


def as_users_do(rank: int, mesh: Any, name: str) -> Any:
    """Dense beside torch's AdamW in one process, then compressed."""
    model, reference = CASES[name](mesh), changed(name)
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


def test_what_users_of_fsdp_do(found: Found) -> None:
    """Shards are uneven here, and that of one bias is empty on half of the ranks."""
    for name in CASES:
        if name != "compiled":
            check(found, name)


@pytest.mark.slow
def test_compiled_blocks(ranks: RankPool) -> None:
    check(call_all(ranks, {"compiled": (as_users_do, "compiled")}), "compiled")


def check(found: Found, name: str) -> None:
    each = found[name]
    for distance, _, moved, sent in each:
        assert distance < (5e-3 if name == "low_precision" else 2e-5), name
        assert min(moved, sent) > 0, name
    assert each[0][1] == each[2][1], name
    assert each[1][1] == each[3][1], name
    assert each[0][1] != each[1][1], name


def accumulate(rank: int, mesh: Any) -> Any:
    """Two micro-batches for each step, of which the first is not reduced; beside one batch of both."""
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


def freeze(rank: int, mesh: Any) -> Any:
    """A block that is frozen between steps is not exchanged from then on, so that it takes no step."""
    model: Any = as_blocks(mesh)
    optimizer = thinwire.AdamW(model, lr=1e-3, compressor=policy(TOPK), group=mesh["replicate"], warmup_steps=1)
    for step in range(2):
        take_step(model, optimizer, [rank], step)
    before = local_bits(model.blocks[0].requires_grad_(False))
    for step in range(2, 4):
        take_step(model, optimizer, [rank], step)
    state = optimizer.state_dict()["state"]
    return local_bits(model.blocks[0]) == before, float(state[0]["step"]), float(state[len(state) - 1]["step"])


def test_micro_batches_are_reduced_once_and_a_frozen_block_takes_no_step(found: Found) -> None:
    assert max(found["accumulate"]) < 2e-5
    assert set(found["freeze"]) == {(True, 2.0, 4.0)}
