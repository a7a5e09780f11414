"""What users of FSDP do with their models: policies, tied and frozen weights, micro-batches; and what is refused."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thinwire
from support.optimizers import make
from support.sharded import Call, Found, apart, call_all, local_bits, shard, sharded_net, take_step, whole
from support.training import TOPK, make_batch, make_net, policy, raises, seeded
from thinwire.sync.buckets import plain_name
from thinwire.testing import RankPool


@pytest.fixture(scope="module")
def found(ranks: RankPool) -> Found:
    cases: dict[str, Call] = {case: (as_users_do, case) for case in CASES}
    return call_all(ranks, {**cases, **{name: (scene,) for name, scene in SCENES.items()}})


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


def make_blocks(case: str = "") -> Blocks:
    """The model before it is sharded, with what these cases change in it; also for one process."""
    with seeded(0):
        model = Blocks()
    if case == "tied":
        model.blocks[1].up.weight = model.blocks[0].up.weight
    elif case == "frozen":
        model.blocks[0].requires_grad_(False)
    elif case == "frozen_and_plain":
        model.norm.requires_grad_(False)
    elif case == "run_twice":
        model.blocks = nn.ModuleList([model.blocks[0], model.blocks[0]])
    return model


CASES = (
    "plain", "kept_gathered", "smaller_groups", "second_dimension", "offloaded", "low_precision", "tied", "frozen",
    "frozen_and_plain", "checkpointed", "run_twice",
)  # fmt: skip


def sharded(mesh: Any, case: str = "plain") -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    model = make_blocks(case)
    if case == "frozen_and_plain":
        return fully_shard(model, mesh=mesh["shard"], ignored_params=set(model.norm.parameters()))
    if case == "checkpointed":
        model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    elif case == "compiled":
        warnings.simplefilter("ignore")  # torch.compile itself warns
        model.blocks = nn.ModuleList(torch.compile(block, backend="aot_eager") for block in model.blocks)
    parts: dict[str, Any] = {"tied": [], "run_twice": [model.blocks[0]]}
    options: dict[str, dict[str, Any]] = {
        "kept_gathered": {"reshard_after_forward": False},
        "smaller_groups": {"reshard_after_forward": 1},
        "second_dimension": {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 else None},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "low_precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    }
    return shard(model, mesh, parts.get(case, model.blocks), **options.get(case, {}))


def as_users_do(rank: int, mesh: Any, case: str) -> Any:
    """Dense beside torch's AdamW in one process, then compressed."""
    model, reference = sharded(mesh, case), make_blocks(case)
    mine = thinwire.AdamW(model, lr=1e-3, compressor="none", group=mesh["replicate"], warmup_steps=0)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(4):
        take_step(model, mine, [rank], step)
        take_step(reference, theirs, range(4), step)
    found = {plain_name(each): tensor for each, tensor in whole(model).items()}
    assert found.keys() == dict(reference.named_parameters()).keys()
    assert apart(found, whole(reference)) < (5e-3 if case == "low_precision" else 2e-5)
    optimizer = thinwire.AdamW(
        model, lr=1e-3, compressor=policy(TOPK), group=mesh["replicate"], warmup_steps=1, refresh_every=3
    )
    before = whole(model)
    for step in range(4, 12):
        take_step(model, optimizer, [rank], step)
    after, trained = whole(model), [name for name, p in model.named_parameters() if p.requires_grad]
    assert not [name for name in trained if torch.equal(after[name], before[name])]
    assert optimizer.sync.stats.bytes_sent > 0
    return local_bits(model)


def test_what_users_of_fsdp_do(found: Found) -> None:
    """Shards are uneven here, and that of one bias is empty on half of the ranks."""
    for case in CASES:
        check(found, case)


@pytest.mark.slow
def test_compiled_blocks(ranks: RankPool) -> None:
    check(call_all(ranks, {"compiled": (as_users_do, "compiled")}), "compiled")


def check(found: Found, case: str) -> None:
    """Replicas have the same bits, and shards their own."""
    first, second, *others = found[case]
    assert others == [first, second], case
    assert first != second, case


def accumulate(rank: int, mesh: Any) -> None:
    """Two micro-batches for each step, of which the first is not reduced; beside one batch of both."""
    model, reference = sharded(mesh), make_blocks()
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
    mine.zero_grad()
    assert apart(whole(model), whole(reference)) < 2e-5


def freeze(rank: int, mesh: Any) -> None:
    """A block that is frozen between steps is not exchanged from then on, so that it takes no step."""
    model: Any = sharded(mesh)
    optimizer = thinwire.AdamW(model, lr=1e-3, compressor=policy(TOPK), group=mesh["replicate"], warmup_steps=1)
    for step in range(2):
        take_step(model, optimizer, [rank], step)
    before = local_bits(model.blocks[0].requires_grad_(False))
    for step in range(2, 4):
        take_step(model, optimizer, [rank], step)
    assert local_bits(model.blocks[0]) == before
    state = optimizer.state_dict()["state"]
    assert (state[0]["step"], state[len(state) - 1]["step"]) == (2, 4)


def refused(rank: int, mesh: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    between, inside = mesh["replicate"], mesh["shard"]

    def adamw(model: nn.Module, **options: Any) -> Any:
        return thinwire.AdamW(model, **{"group": between, **options})

    with raises(ValueError, "2 dimensions", 'mesh=mesh["shard"]', 'group=mesh["replicate"]'):
        adamw(fully_shard(make_net(), mesh=mesh))
    for group, words in ((None, "without group="), (mesh, "expected one process group"), (inside, "of this replica")):
        with raises(ValueError, words, 'group=mesh["replicate"]'):
            adamw(sharded_net(mesh), group=group)
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


def changes_gradients(rank: int, mesh: Any) -> None:
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


class Reentrant(nn.Sequential):
    def forward(self, given: Tensor) -> Tensor:
        for layer in self:
            given = checkpoint(layer, given, use_reentrant=True)
        return given


def reentrant(rank: int, mesh: Any) -> None:
    model = shard(Reentrant(*make_net()), mesh)
    optimizer = make("SGD", model, group=mesh["replicate"])
    given, wanted = make_batch(rank, 0)
    with raises(RuntimeError, "a second exchange", "use_reentrant=False"):
        (model(given.requires_grad_()) - wanted).square().mean().backward()
    optimizer.zero_grad()


SCENES = {scene.__name__: scene for scene in (accumulate, freeze, refused, changes_gradients, reentrant)}


@pytest.mark.parametrize("scene", SCENES)
def test_scenes(found: Found, scene: str) -> None:
    assert found[scene] == [None] * 4
