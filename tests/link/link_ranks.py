"""Ranks that tell what a step raised, and that reduce one tensor."""

import time

import torch

import thinwire
from thinwire.tools.bench.link.rank import LinkRank


class TestedRank(LinkRank):
    __test__ = False

    def load_kernels(self, spec: str) -> None:
        """Before a time-out counts: they may have to be compiled."""
        thinwire.compressor(spec).compress(torch.randn(100_000), torch.zeros(100_000)).decompress()

    def attempt(self) -> tuple[str, float]:
        """What one step raises, and after how many seconds; nothing if it ends well."""
        started = time.monotonic()
        try:
            self.steps(1)
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - started
        return "", time.monotonic() - started

    def reduce(self, spec: str, numel: int, times: int) -> None:
        """All-reduce a tensor, again and again."""
        residual = torch.zeros(numel)
        for _ in range(times):
            thinwire.all_reduce_compressed(torch.randn(numel), spec, residual)
