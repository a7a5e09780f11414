"""All-reduces of some steps as data: inputs on every rank, the calls, and what must come out, computed in one process.

The expected values share no code with the collectives: ranks' own compressed tensors, decoded and added one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from support.oracle import same_bits
from thinwire.kernels.layout import residual_dtype

KEY = 11


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
    steps: Sequence[int] = (0, 1)
    max_bytes: int | None = None
    poison: tuple[int, int, float] | None = None
    """In step 1, on this rank this element has this value."""

    @property
    def compressor(self) -> thinwire.Compressor:
        return thinwire.compressor(self.spec)

    def second_of(self, world_size: int) -> thinwire.Compressor:
        return thinwire.compressor(self.second) if self.second else self.compressor.for_sum(world_size)

    def tensor(self, rank: int, step: int) -> Tensor:
        """Normal numbers of another size on every rank, so that no two ranks and no two steps look alike."""
        generator = torch.Generator().manual_seed(1000 * rank + step)
        tensor = ((1 + rank) * torch.randn(self.shape, generator=generator)).to(self.dtype)
        if self.poison is not None and (rank, step) == (self.poison[0], 1):
            tensor[self.poison[1]] = self.poison[2]
        return tensor

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=residual_dtype(self.dtype))


class Outcome(NamedTuple):
    """What one rank has after the last step, and the results of all steps."""

    results: list[Tensor]
    residual: Tensor | None
    owned: Tensor | None
    """What this rank keeps as an owner, at its place in the whole tensor: in segments it owns other elements."""
    reports: list[Any]


def perform(rank: int, world_size: int, cases: Sequence[Case], nodes: int = 0, group: Any = None) -> list[Outcome]:
    group = init_device_mesh("cpu", (nodes, world_size // nodes)) if nodes else group
    return [perform_one(rank, case, group) for case in cases]


def perform_one(rank: int, case: Case, group: Any) -> Outcome:
    residual, owned = (case.zeros() if case.residual else None for _ in range(2))
    state = thinwire.ShardState() if case.residual else None
    results, reports = [], []
    for step in case.steps:
        tensor = case.tensor(rank, step)
        work = thinwire.all_reduce_compressed(
            tensor, case.spec, residual, op=dist.ReduceOp.AVG if case.average else dist.ReduceOp.SUM, group=group,
            algorithm=case.algorithm, key=KEY + step, shard_compressor=case.second, state=state,
            max_bytes=case.max_bytes,
        )  # fmt: skip
        assert work.wait() is True
        results.append(tensor)
        reports.append(work.report)
    if owned is not None and state is not None and state.residual is not None:
        owned.view(-1)[[at for start, stop in state.spans for at in range(start, stop)]] = state.residual
    return Outcome(results, residual, owned, reports)


def expected(case: Case, world_size: int) -> list[Outcome]:
    """What `perform` must return on each rank, except for the reports."""
    is_sharded = case.algorithm == "sharded"
    case = replace(case, spec="none") if case.algorithm == "dense" else case
    residuals, owned = ([case.zeros() if case.residual else None for _ in range(world_size)] for _ in range(2))
    cut = shares(case, world_size) if is_sharded else []
    weight = 1 / world_size if case.average else 1.0
    results = []
    for step in case.steps:
        total = case.zeros()
        for rank, residual in enumerate(residuals):
            ct = case.compressor.compress(case.tensor(rank, step), residual, key=KEY + step)
            case.compressor.accumulate(ct, total, 1.0 if is_sharded else weight)
        if is_sharded:
            second = case.second_of(world_size)
            for (start, stop), kept in zip(cut, owned, strict=True):
                part = total.view(-1)[start:stop]
                ct = second.compress(part, None if kept is None else kept.view(-1)[start:stop], key=KEY + step)
                second.accumulate(ct, part.zero_(), weight)
        results.append(total.to(case.dtype))
    return [Outcome(results, residual, own, []) for residual, own in zip(residuals, owned, strict=True)]


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
        pairs = [
            *zip(have.results, want.results, strict=True),
            (have.residual, want.residual),
            (have.owned, want.owned),
        ]
        names = [*(f"result of step {step}" for step in case.steps), "residual", "share"]
        for name, (mine, right) in zip(names, pairs, strict=True):
            if right is not None:
                where = f"{name}, rank {rank} of {world_size}, {case}"
                assert mine is not None, where
                assert mine.shape == right.shape, where
                assert same_bits(mine, right), f"{where}: {int((mine != right).sum())} elements differ"
