"""A NaN or Inf on one rank: every rank learns it from the exchange, and nothing that is kept is touched."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from support.group import run_group
from support.oracle import same_bits
from thinwire.testing import RankPool

NUMEL = 20_000


class Poison(NamedTuple):
    spec: str
    algorithm: str
    rank: int
    place: int
    value: float
    dtype: torch.dtype = torch.float32
    max_bytes: int | None = None


TOPK, QUANTIZE, RANDOMK = "topk:ratio=1/64,bits=2", "quantize:bits=8", "randomk:ratio=1/8"
NAN, INF = float("nan"), float("inf")
POISONS = [
    Poison(TOPK, "gather", 0, 0, NAN),
    Poison(TOPK, "gather", 1, NUMEL - 1, INF, torch.bfloat16),
    Poison(TOPK, "sharded", 1, 9000, NAN),
    Poison(TOPK, "sharded", 0, NUMEL - 1, -INF, torch.float16),
    Poison(QUANTIZE, "gather", 0, 5000, INF),
    Poison(QUANTIZE, "sharded", 1, 0, NAN, torch.float64),
    Poison(TOPK, "dense", 1, 17, NAN),
    Poison(TOPK, "dense", 0, 17, INF, torch.bfloat16),
    Poison(RANDOMK, "values", 0, 19_999, NAN),
    Poison(RANDOMK, "values", 1, 3, INF, torch.float16),
    Poison(TOPK, "gather", 1, NUMEL - 1, NAN, max_bytes=100_000),
    Poison(TOPK, "sharded", 0, 0, NAN, max_bytes=400_000),
]
POISONS_OF_NODES = [
    Poison(TOPK, "gather", 3, 12_000, NAN),
    Poison(TOPK, "sharded", 0, 0, INF),
    Poison(QUANTIZE, "sharded", 1, NUMEL - 1, NAN),
    Poison(RANDOMK, "values", 2, 7, NAN),
]


def poison(rank: int, world_size: int, poisons: list[Poison], nodes: bool = False, group: Any = None) -> list[str]:
    """Three steps, of which the second is poisoned, beside the first and the third alone; says what is wrong."""
    wrong = []
    if nodes:
        group = init_device_mesh("cpu", (2, world_size // 2))
    for case in poisons:
        run, without = Run(rank, case, group), Run(rank, case, group)
        right = [without.step(step) for step in (0, 2)][1]
        run.step(0)
        before = run.kept()
        if not (bad := run.step(1, poisoned=rank == case.rank)).isnan().all():
            wrong.append(f"{case}: {int(bad.isnan().sum())} of {NUMEL} elements are NaN")
        if run.finite:
            wrong.append(f"{case}: the report says finite")
        if len(before) != len(after := run.kept()) or not all(map(same_bits, before, after)):
            wrong.append(f"{case}: the residual, or that of the share, has changed")
        if not same_bits(run.step(2), right):
            wrong.append(f"{case}: the next step is not what it would have been")
        if not run.finite:
            wrong.append(f"{case}: the report of the next step says not finite")
    return wrong


class Run:
    """One rank's tensors and what it keeps."""

    def __init__(self, rank: int, case: Poison, group: object) -> None:
        self.rank, self.case, self.group = rank, case, group
        self.residual = torch.zeros(NUMEL, dtype=torch.float64 if case.dtype == torch.float64 else torch.float32)
        self.state, self.finite = thinwire.ShardState(), True

    def step(self, step: int, poisoned: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.rank + step)
        tensor = torch.randn(NUMEL, generator=generator).to(self.case.dtype)
        if poisoned:
            tensor[self.case.place] = self.case.value
        self.finite = thinwire.all_reduce_compressed(
            tensor, self.case.spec, self.residual, algorithm=self.case.algorithm, key=step, state=self.state,
            group=self.group, op=dist.ReduceOp.AVG, max_bytes=self.case.max_bytes,
        ).report.finite  # fmt: skip
        return tensor

    def kept(self) -> list[Tensor]:
        return [kept.clone() for kept in (self.residual, self.state.residual) if kept is not None]


def test_a_poisoned_step_changes_nothing(ranks: RankPool) -> None:
    for world_size in (2, 8):
        for rank, wrong in enumerate(run_group(poison, world_size, POISONS)):
            assert not wrong, f"rank {rank} of {world_size}: {wrong}"
    for rank, wrong in enumerate(ranks.run(poison, 4, POISONS_OF_NODES, True)):
        assert not wrong, f"rank {rank}: {wrong}"


def overflow(rank: int, world_size: int, group: Any = None) -> list[str]:
    """Finite on every rank, but not in the sum, and there only at the end: in segments the first ones are fine."""
    wrong = []
    for algorithm, spec in (("gather", QUANTIZE), ("sharded", QUANTIZE), ("dense", TOPK), ("values", RANDOMK)):
        for max_bytes in (None, 400_000) if algorithm != "values" else (None,):
            name = f"{algorithm}, {max_bytes}"
            residual, state = torch.full((300_000,), 0.3), thinwire.ShardState()
            tensor = torch.ones(300_000)
            tensor[-100:] = torch.finfo(torch.float32).max * 0.9
            options: Any = {"algorithm": algorithm, "state": state, "max_bytes": max_bytes, "group": group}
            work = thinwire.all_reduce_compressed(tensor, spec, residual, key=1, **options)
            if tensor.isfinite().all():
                wrong.append(f"{name}: the result is finite")
            if not work.report.finite and not (tensor.isnan().all() and (residual == 0.3).all()):
                wrong.append(f"{name}: the report says that nothing has changed, but the residual has")
            if not residual.isfinite().all() or not (state.residual is None or state.residual.isfinite().all()):
                wrong.append(f"{name}: what is kept is not finite")
    return wrong


def test_a_sum_that_overflows_is_not_finite_and_poisons_nothing() -> None:
    for rank, wrong in enumerate(run_group(overflow, 2)):
        assert not wrong, f"rank {rank}: {wrong}"
