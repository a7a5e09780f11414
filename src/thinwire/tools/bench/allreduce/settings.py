"""Checks the options before anything runs. Raises `ValueError` for options that cannot be run."""

from dataclasses import dataclass

import torch

from thinwire import compressors
from thinwire.compressors import Compressor
from thinwire.tools.bench.codec.cases import parse_size

from .cases import Case, cases
from .options import Options

LARGEST_WORLD = 64


@dataclass(frozen=True)
class Settings:
    """The checked options."""

    compressor: Compressor
    parts: tuple[str, ...]
    cases: tuple[Case, ...]
    """Cases whose bytes are counted, ordered by world size. Empty if bytes are not requested."""
    numel: int
    """Number of elements of the tensor that is timed and simulated."""
    ranks: int
    """World size of the timing."""
    repeats: int
    dtype: torch.dtype = torch.float32

    @property
    def workers(self) -> int:
        """Number of processes that the bytes and the timing need."""
        return max([0, *(case.world for case in self.cases), *([self.ranks] if "time" in self.parts else [])])

    @property
    def steps(self) -> int:
        """Number of progress steps: one for each case, one to prepare the timing and one for each turn."""
        return len(self.cases) + (1 + self.repeats if "time" in self.parts else 0)


def settings(options: Options) -> Settings:
    """Return the checked options. Raises ValueError for options that cannot be run."""
    compressor = compressors.compressor(options.spec)
    bytes_numel, numel = parse_size(options.bytes_size), parse_size(options.size)
    if not options.parts:
        raise ValueError("--parts without a part, expected bytes, time or simulation")
    if not options.worlds:
        raise ValueError("--worlds without a number of ranks, expected one or more")
    for name, world in [*(("--worlds", world) for world in options.worlds), ("--ranks", options.ranks)]:
        if not 2 <= world <= LARGEST_WORLD:
            raise ValueError(f"{name} {world}, expected 2 to {LARGEST_WORLD} ranks")
    if options.repeats < 1:
        raise ValueError(f"--repeats {options.repeats}, expected 1 or more")
    worlds = sorted(set(options.worlds)) if "bytes" in options.parts else []
    counted = tuple(case for world in worlds for case in cases(options.spec, compressor, bytes_numel, world))
    return Settings(compressor, options.parts, counted, numel, options.ranks, options.repeats)
