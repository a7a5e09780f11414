"""Runs the timed jobs on each rank: the whole operation and its parts, each once in a turn, on all ranks at once."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from thinwire.collectives import ShardState, all_reduce_compressed

from .cases import flat, keeps

PARTS = ("compress", "all_gather of payloads", "decompress")
WHOLE = "gather"
TORCH = "torch all_reduce"
BARRIER = "barrier"
_SHIFTS, _STRIDE = 4, 1088  # in elements; keeps every gradient aligned to 128 bytes

Span = tuple[float, float]
"""Start and end of a job on a rank, in seconds."""


class Timer:
    """Runs on each rank and times every job once in a turn.

    Gradients are windows of one pool of random numbers, and successive jobs get different ones.
    """

    def __init__(self, rank: int, size: int, spec: str, numel: int) -> None:
        compressor = thinwire.compressor(spec)
        self._pool = torch.randn(numel + _SHIFTS * _STRIDE, generator=torch.Generator().manual_seed(rank))
        self._turn = 0
        self._tensor = torch.empty(numel)
        alone, gathered, other = (torch.zeros(numel) if keeps(compressor) else None for _ in range(3))
        state = ShardState() if keeps(compressor) else None
        rows = torch.empty(size, compressor.nbytes(numel), dtype=torch.uint8)
        payload = torch.empty_like(rows[0])
        key = 0 if compressor.draws else None
        tensor, algorithm = self._tensor, flat(compressor, numel)
        sent = compressor.compress(self._pool[:numel], key=key, out=payload)
        self._jobs: dict[str, Callable[[], object]] = {
            BARRIER: lambda: None,
            PARTS[0]: lambda: compressor.compress(tensor, alone, key=key, out=payload),
            PARTS[1]: lambda: dist.all_gather(list(rows), payload),
            PARTS[2]: lambda: compressor.decompress(sent, tensor, payloads=rows),
            WHOLE: lambda: all_reduce_compressed(tensor, compressor, gathered, algorithm=WHOLE),
            algorithm: lambda: all_reduce_compressed(tensor, compressor, other, algorithm=algorithm, state=state),
            TORCH: lambda: dist.all_reduce(tensor),
        }

    def turn(self) -> dict[str, Span]:
        """Run every job once and return its start and end."""
        return {name: self._time(job) for name, job in self._jobs.items()}

    def _time(self, job: Callable[[], object]) -> Span:
        self._tensor.copy_(self._gradient())
        dist.barrier()
        started = time.perf_counter()
        job()
        ended = time.perf_counter()
        dist.barrier()  # else the next copy would take the core from a rank that is not done
        return started, ended

    def _gradient(self) -> Tensor:
        self._turn += 1
        return self._pool[self._turn % _SHIFTS * _STRIDE :][: self._tensor.numel()]
