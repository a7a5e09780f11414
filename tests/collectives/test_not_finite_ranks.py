"""A NaN or Inf on one rank: every rank learns it from the exchange, and nothing that is kept is touched."""

from dataclasses import replace
from typing import Any

import torch

import thinwire
from support.by_threads import by_threads
from support.group import run_group
from support.oracle import same_bits
from support.reductions import Case, Outcome, perform
from thinwire.collectives import LocalGroup
from thinwire.testing import RankPool

NUMEL = 20_000
TOPK, QUANTIZE, RANDOMK = "topk:ratio=1/64,bits=2", "quantize:bits=8", "randomk:ratio=1/8"
NAN, INF = float("nan"), float("inf")


def poisoned(spec: str, algorithm: str, *poison: Any, **options: Any) -> Case:
    """Three steps, of which the second is poisoned: (rank, element, value)."""
    return Case(spec, algorithm, (NUMEL,), poison=poison, steps=range(3), average=True, **options)


POISONS = [
    poisoned(TOPK, "gather", 0, 0, NAN),
    poisoned(TOPK, "gather", 1, NUMEL - 1, INF, dtype=torch.bfloat16),
    poisoned(TOPK, "sharded", 1, 9000, NAN),
    poisoned(TOPK, "sharded", 0, NUMEL - 1, -INF, dtype=torch.float16),
    poisoned(QUANTIZE, "gather", 0, 5000, INF),
    poisoned(QUANTIZE, "sharded", 1, 0, NAN, dtype=torch.float64),
    poisoned(TOPK, "dense", 1, 17, NAN),
    poisoned(TOPK, "dense", 0, 17, INF, dtype=torch.bfloat16),
    poisoned(RANDOMK, "values", 0, 19_999, NAN),
    poisoned(RANDOMK, "values", 1, 3, INF, dtype=torch.float16),
    poisoned(TOPK, "gather", 1, NUMEL - 1, NAN, max_bytes=100_000),
    poisoned(TOPK, "sharded", 0, 0, NAN, max_bytes=400_000),
]
POISONS_OF_NODES = [
    poisoned(TOPK, "gather", 3, 12_000, NAN),
    poisoned(TOPK, "sharded", 0, 0, INF),
    poisoned(QUANTIZE, "sharded", 1, NUMEL - 1, NAN),
    poisoned(RANDOMK, "values", 2, 7, NAN),
]


def check_poisoned(found: list[list[Outcome]], cases: list[Case]) -> None:
    """Beside those of a rank, the first and the third step alone."""
    for rank, outcomes in enumerate(found):
        for case, bad, right in zip(cases, outcomes, outcomes[len(cases) :], strict=False):
            where = f"rank {rank} of {len(found)}, {case}"
            assert bad.results[1].isnan().all(), f"{where}: {int(bad.results[1].isnan().sum())} elements are NaN"
            assert [report.finite for report in bad.reports] == [True, False, True], where
            assert same_bits(bad.results[2], right.results[1]), f"{where}: the next step is another one"
            for name in ("residual", "owned"):
                assert same_bits(getattr(bad, name), getattr(right, name)), f"{where}: {name} has changed"


def test_a_poisoned_step_changes_nothing(ranks: RankPool) -> None:
    for world_size, cases in ((2, POISONS), (8, POISONS), (4, POISONS_OF_NODES)):
        both = [*cases, *(replace(case, poison=None, steps=[0, 2]) for case in cases)]
        nodes = cases is POISONS_OF_NODES
        found = ranks.run(perform, world_size, both, 2) if nodes else run_group(perform, world_size, both)
        check_poisoned(found, cases)


@by_threads(2)
def test_a_sum_that_overflows_is_not_finite_and_poisons_nothing(group: LocalGroup) -> None:
    """Finite on every rank, but not in the sum, and there only at the end: in segments the first ones are fine."""
    for algorithm, spec in (("gather", QUANTIZE), ("sharded", QUANTIZE), ("dense", TOPK), ("values", RANDOMK)):
        for max_bytes in (None, 400_000) if algorithm != "values" else (None,):
            name = f"{algorithm}, {max_bytes}"
            residual, state = torch.full((300_000,), 0.3), thinwire.ShardState()
            tensor = torch.ones(300_000)
            tensor[-100:] = torch.finfo(torch.float32).max * 0.9
            options: Any = {"algorithm": algorithm, "state": state, "max_bytes": max_bytes, "group": group}
            work = thinwire.all_reduce_compressed(tensor, spec, residual, key=1, **options)
            assert not tensor.isfinite().all(), name
            if not work.report.finite:
                assert tensor.isnan().all(), name
                assert (residual == 0.3).all(), f"{name}: the report says that nothing has changed"
            assert residual.isfinite().all(), name
            assert state.residual is None or state.residual.isfinite().all(), name
