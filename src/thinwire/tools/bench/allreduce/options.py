"""The options of `thinwire bench allreduce`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

Part = Literal["bytes", "time", "simulation"]


@dataclass(frozen=True)
class Options:
    """Bytes and time of compressed all-reduces between processes on this machine, and bytes at any scale."""

    spec: str = "topk:ratio=1/64,bits=2"
    """The compressor."""
    parts: Annotated[tuple[Part, ...], arg(metavar="PART ...")] = ("bytes", "time", "simulation")
    """What to do: bytes, time, simulation."""
    worlds: Annotated[tuple[int, ...], arg(metavar="INT ...")] = (2, 4, 8)
    """Numbers of ranks to count bytes for."""
    bytes_size: str = "4M"
    """Entries of the float32 tensor whose bytes are counted: 1e6, 25_000_000 or 25M."""
    size: str = "25M"
    """Entries of the float32 tensor that is timed and simulated."""
    ranks: int = 4
    """Number of ranks to time."""
    repeats: int = 15
    """Samples of each time."""
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write JSON lines to this file: the conditions, then the rows."""
