"""One all-reduce as data: its inputs on every rank, the call, and what must come out, computed in one process.

The expected values share no code with the collectives: ranks' own compressed tensors, decoded and added one by one.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from support.oracle import same_bits
from thinwire.kernels.layout import residual_dtype

KEY = 11


def placed(state: thinwire.ShardState, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank keeps as an owner, at its place in the whole tensor."""
    owned, at = torch.zeros(numel, dtype=dtype), 0
    for start, stop in state.spans:
        owned[start:stop] = state.residual[at : (at := at + stop - start)]  # type: ignore[index]
    return owned


@dataclass(frozen=True)
class Case:
    """What all ranks call alike. `str` names it in failures."""

    spec: str
    algorithm: str
    shape: tuple[int, ...] = (9001,)
    dtype: torch.dtype = torch.float32
    average: bool = False
    residual: bool = True
    second: str | None = None
    steps: int = 2

    @property
    def compressor(self) -> thinwire.Compressor:
        return thinwire.compressor(self.spec)

    def second_of(self, world_size: int) -> thinwire.Compressor:
        return thinwire.compressor(self.second) if self.second else self.compressor.for_sum(world_size)

    @property
    def keeps(self) -> bool:
        return self.residual

    def tensor(self, rank: int, step: int) -> Tensor:
        """Normal numbers of another size on every rank, so that no two ranks and no two steps look alike."""
        generator = torch.Generator().manual_seed(1000 * rank + step)
        return ((1 + rank) * torch.randn(self.shape, generator=generator)).to(self.dtype)

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=residual_dtype(self.dtype))


class Outcome(NamedTuple):
    """What one rank has after the last step, and the results of all steps."""

    results: list[Tensor]
    residual: Tensor | None
    owned: Tensor | None
    """The residual of the share that this rank owns."""
    reports: list[Any]


def perform(rank: int, world_size: int, cases: list[Case], group: Any = None) -> list[Outcome]:
    return [perform_one(rank, case, group) for case in cases]


def perform_one(rank: int, case: Case, group: Any = None) -> Outcome:
    residual = case.zeros() if case.keeps else None
    state = thinwire.ShardState() if case.keeps else None
    results, reports = [], []
    for step in range(case.steps):
        tensor = case.tensor(rank, step)
        work = thinwire.all_reduce_compressed(
            tensor, case.spec, residual,
            op=dist.ReduceOp.AVG if case.average else dist.ReduceOp.SUM,
            group=group, algorithm=case.algorithm, key=KEY + step, shard_compressor=case.second, state=state,
        )  # fmt: skip
        assert work.wait() is True
        results.append(tensor)
        reports.append(work.report)
    return Outcome(results, residual, state.residual if state else None, reports)


def expected(case: Case, world_size: int) -> list[Outcome]:
    """What `perform` must return on each rank, except for the reports."""
    is_sharded = case.algorithm == "sharded"
    case = replace(case, spec="none") if case.algorithm == "dense" else case
    residuals = [case.zeros() if case.keeps else None for _ in range(world_size)]
    cut = shares(case, world_size) if is_sharded else []
    owned = [torch.zeros(stop - start, dtype=residual_dtype(case.dtype)) for start, stop in cut]
    weight = 1 / world_size if case.average else 1.0
    results = []
    for step in range(case.steps):
        total = case.zeros()
        for rank, residual in enumerate(residuals):
            ct = case.compressor.compress(case.tensor(rank, step), residual, key=KEY + step)
            case.compressor.accumulate(ct, total, 1.0 if is_sharded else weight)
        if is_sharded:
            second = case.second_of(world_size)
            for (start, stop), kept in zip(cut, owned, strict=True):
                part = total.view(-1)[start:stop]
                ct = second.compress(part, kept if case.keeps else None, key=KEY + step)
                second.accumulate(ct, part.zero_(), weight)
        results.append(total.to(case.dtype))
    kept = owned if is_sharded and case.keeps else [None] * world_size
    return [Outcome(results, residual, own, []) for residual, own in zip(residuals, kept, strict=True)]


def shares(case: Case, world_size: int) -> list[tuple[int, int]]:
    """Whole records, as even as can be; all to the last rank where a share would not be a slice of the payload."""
    numel, compressor = case.zeros().numel(), case.compressor
    record = 1
    if compressor.nbytes(numel, case.dtype) < numel * case.dtype.itemsize:
        assert isinstance(compressor, thinwire.TopK | thinwire.Quantize), case
        record = compressor.chunk or numel if isinstance(compressor, thinwire.TopK) else 16 * compressor.block
    records = ceil(numel / record)
    bounds = [min(numel, record * (records * rank // world_size)) for rank in range(world_size + 1)]
    short = [size for size in (stop - start for start, stop in pairwise(bounds)) if 0 < size < record]
    if any(compressor.nbytes(size, case.dtype) == size * case.dtype.itemsize for size in short):
        return [(0, 0)] * (world_size - 1) + [(0, numel)]
    return list(pairwise(bounds))


def check_expected(found: list[list[Outcome]], case: Case, index: int) -> None:
    """Every rank has what was computed here, to the last bit."""
    world_size = len(found)
    for rank, want in enumerate(expected(case, world_size)):
        have = found[rank][index]
        pairs = {
            f"result of step {step}": pair for step, pair in enumerate(zip(have.results, want.results, strict=True))
        }
        pairs |= {"residual": (have.residual, want.residual), "share": (have.owned, want.owned)}
        for name, (mine, right) in pairs.items():
            if right is not None:
                where = f"{name}, rank {rank} of {world_size}, {case}"
                assert mine is not None, where
                assert mine.shape == right.shape, where
                apart = (mine.double() - right.double()).abs()
                assert same_bits(mine, right), (
                    f"{where}: off by {apart.max():.3g} in {int((mine != right).sum())} elements"
                )
