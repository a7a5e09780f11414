"""Reads the rows of `thinwire bench link` and groups them by their conditions."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.tools.record import read as lines

from ..link.settings import parse_rate

_NEEDED = (
    "model", "parameters", "batch", "cpu", "cores", "worker_threads", "torch", "date", "load_average", "links",
    "command",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """Time and bytes of a step."""

    ms: float
    nbytes: float
    """Bytes that a rank sends in a step."""


@dataclass(frozen=True)
class World:
    """Results at one world size."""

    ranks: int
    points: dict[tuple[str, str], Point]
    """Points by way and rate."""

    @property
    def ways(self) -> list[str]:
        """All ways, in the order of the rows."""
        return list(dict.fromkeys(way for way, _ in self.points))

    @property
    def rates(self) -> list[str]:
        """All rates, from slow to fast."""
        return sorted({rate for _, rate in self.points}, key=parse_rate)


@dataclass(frozen=True)
class Set:
    """Rows of one run of the benchmark."""

    file: Path
    conditions: dict[str, Any]
    worlds: tuple[World, ...]


def read(files: Iterable[Path]) -> list[Set]:
    """Return the rows of all runs in the files. Raises ValueError with the file if a row is not one of bench link."""
    sets: list[Set] = []
    for file in files:
        runs: list[tuple[dict[str, Any], dict[int, World]]] = []
        for line in lines(file):
            missing = [name for name in _NEEDED if name not in line["conditions"]]
            if line["kind"] != "link" or missing:
                reason = f"conditions without {missing[0]}" if missing else f"a line of kind {line['kind']!r}"
                raise ValueError(f"{file}: {reason}, expected what thinwire bench link --out wrote")
            if not runs or runs[-1][0] is not line["conditions"]:
                runs.append((line["conditions"], {}))
            world = runs[-1][1].setdefault(line["world"], World(line["world"], {}))
            world.points[line["way"], line["rate"]] = Point(float(line["ms"]), float(line["bytes_per_step"]))
        if not runs:
            raise ValueError(f"{file}: no rows")
        sets += [Set(file, conditions, tuple(worlds[n] for n in sorted(worlds))) for conditions, worlds in runs]
    return sets
