"""What was sent plus what was kept is what came in, over all ranks and over many steps; and owners need a state."""

from dataclasses import replace

import pytest
import torch

import thinwire
from support.by_threads import by_threads
from support.group import run_group
from support.reductions import Case, Outcome, perform
from support.slow import slow
from thinwire.collectives import LocalGroup
from thinwire.testing import RankPool

TOPK, SMALL, QUANTIZE, RANDOMK = (
    "topk:ratio=1/64,bits=2", "topk:ratio=1/16,bits=4,chunk=64", "quantize:bits=2,block=64", "randomk:ratio=1/16",
)  # fmt: skip
FEW = [
    Case(SMALL, "gather"),
    Case(SMALL, "sharded", average=True),
    Case(QUANTIZE, "sharded"),
    Case(QUANTIZE, "gather"),
    Case(RANDOMK, "values", average=True),
]
MORE = [
    Case(TOPK, "gather"),
    Case(SMALL, "gather", average=True),
    Case(SMALL, "sharded"),
    Case(TOPK, "sharded", average=True),
    Case(QUANTIZE, "gather", average=True),
    Case(TOPK, "dense"),
    Case(TOPK, "dense", average=True),
    Case(RANDOMK, "values"),
    Case(SMALL, "sharded", dtype=torch.float64),
    Case(SMALL, "gather", dtype=torch.bfloat16),
]


def over(steps: int, cases: list[Case]) -> list[Case]:
    return [replace(case, shape=(5000,), steps=range(steps)) for case in cases]


def check_ledgers(cases: list[Case], found: list[list[Outcome]]) -> None:
    for case, outcomes in zip(cases, zip(*found, strict=True), strict=True):
        world_size = len(outcomes)
        came_in = sum(case.tensor(rank, step).double() for rank in range(world_size) for step in case.steps)
        came_out = sum(result.double() for result in outcomes[0].results) * (world_size if case.average else 1)
        kept, owned = (sum(getattr(each, name).double() for each in outcomes) for name in ("residual", "owned"))
        assert (case.algorithm == "sharded") == bool(owned.any()), case
        # Every step rounds once or twice; steps are independent, so errors grow with the root of their number.
        rounding = torch.finfo(case.dtype).eps * len(case.steps) ** 0.5
        error = float((came_out + kept + owned - came_in).abs().max() / came_in.abs().max())
        assert error < 2 * rounding, f"{case}: {error:.2g} of what came in is lost"
        sent = float(came_out.norm() / came_in.norm())
        assert sent > 0.5, f"{case}: only {sent:.2g} of what came in went out"


@pytest.mark.parametrize(
    ("world_size", "cases", "steps"),
    [(2, FEW, 200), slow(3, FEW + MORE, 200), slow(4, FEW, 60), slow(8, FEW, 30)],
    ids=["2", "3", "4", "8"],
)
def test_nothing_is_lost_in_a_small_or_a_larger_world(world_size: int, cases: list[Case], steps: int) -> None:
    cases = over(steps, cases)
    check_ledgers(cases, run_group(perform, world_size, cases, timeout=120))


@pytest.mark.parametrize(("nodes", "each", "steps"), [(2, 2, 60), slow(2, 4, 15)])
def test_nothing_is_lost_between_nodes(ranks: RankPool, nodes: int, each: int, steps: int) -> None:
    cases = over(steps, FEW)
    check_ledgers(cases, ranks.run(perform, nodes * each, cases, nodes, timeout=120))


NUMEL = 10_000


@by_threads(2)
def test_a_state_is_asked_for_and_must_fit(group: LocalGroup) -> None:
    def call(numel: int, state: thinwire.ShardState | None) -> None:
        thinwire.all_reduce_compressed(
            torch.ones(numel), SMALL, torch.zeros(numel), algorithm="sharded", state=state, group=group
        )

    state = thinwire.ShardState()
    with pytest.raises(ValueError, match="state"):
        call(NUMEL, None)
    call(NUMEL, state)
    with pytest.raises(ValueError, match="made for another tensor"):
        call(NUMEL // 2, state)
    with pytest.raises(ValueError, match="a state with"):
        state.load_state_dict({"something": "else"})
    tensor = torch.full((NUMEL,), 127.0)  # without a residual there is nothing to keep, and so no need of a state
    thinwire.all_reduce_compressed(tensor, "quantize:bits=8", algorithm="sharded", group=group)
    assert (tensor == 127 * group.size).all()
