"""Runs the operation whose bytes are counted, on each rank."""

import torch

from thinwire.collectives import Report, ShardState, all_reduce_compressed
from thinwire.compressors import compressor

from .cases import TORCH, Case, keeps


class Reducer:
    """Runs on each rank and repeats one operation."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank

    def take(self, case: Case) -> None:
        """Set the operation that `reduce` runs, and run it once, so that all ranks are connected and agree on it."""
        self._algorithm = "dense" if case.algorithm == TORCH else case.algorithm
        self._compressor = compressor(case.spec)
        self._gradient = torch.randn(case.numel, generator=torch.Generator().manual_seed(self._rank))
        self._tensor = torch.empty_like(self._gradient)
        kept = case.algorithm != TORCH and keeps(self._compressor)
        self._residual = torch.zeros_like(self._gradient) if kept else None
        self._state = ShardState() if kept else None
        self.reduce()

    def reduce(self) -> Report:
        """Run the operation on a copy of the gradient and return its report."""
        self._tensor.copy_(self._gradient)
        return all_reduce_compressed(
            self._tensor, self._compressor, self._residual, algorithm=self._algorithm, state=self._state
        ).report
