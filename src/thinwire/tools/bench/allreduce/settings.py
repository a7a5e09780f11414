"""The options, checked, and what follows from them: `ValueError` for what cannot be run, before anything runs."""

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
    compressor: Compressor
    parts: tuple[str, ...]
    cases: tuple[Case, ...]
    """Whose bytes are counted, those of one world side by side; none if bytes are not asked for."""
    numel: int
    """Of the tensor that is timed and simulated."""
    ranks: int
    """To time."""
    repeats: int
    dtype: torch.dtype = torch.float32

    @property
    def workers(self) -> int:
        """Processes that all of it takes."""
        return max([0, *(case.world for case in self.cases), *([self.ranks] if "time" in self.parts else [])])

    @property
    def steps(self) -> int:
        """For the progress: a case, or a turn of timing."""
        return len(self.cases) + (1 + self.repeats if "time" in self.parts else 0)


def settings(options: Options) -> Settings:
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
