"""Compares this run with thinwire's performance targets for 25 million float32 elements on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .rows import CompressorRow, Row

NUMEL, DTYPE, DEVICE = 25_000_000, "float32", "cpu"
SPARSE = "topk:ratio=1/64,bits=2,chunk=4096"
EIGHT_BITS = "quantize:bits=8,block=256,rounding=nearest,seed=0"
ONE_BIT = "quantize:bits=1,block=256,rounding=nearest,seed=0"


@dataclass(frozen=True)
class Figure:
    """A measured value and its target."""

    name: str
    value: float
    unit: str
    comparison: Literal["<=", ">=", "<"]
    target: float

    @property
    def ok(self) -> bool:
        """Whether the value meets the target."""
        if self.comparison == ">=":
            return self.value >= self.target
        return self.value < self.target or (self.comparison == "<=" and self.value == self.target)

    def record(self) -> dict[str, object]:
        """Return the figure as a dict for one line of JSON."""
        return {
            "kind": "figure",
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "target": f"{self.comparison} {self.target:g}",
            "ok": self.ok,
        }

    def __str__(self) -> str:
        wanted = f"target {self.comparison} {self.target:g}"
        return f"{self.name:58} {self.value:8.2f} {self.unit:18} {wanted:15} {'ok' if self.ok else 'missed'}"


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Return the figures whose rows are in this run. There are none without rows of 25 million float32 on the CPU."""
    measured = {
        row.spec: row
        for row in rows
        if isinstance(row, CompressorRow) and (row.numel, row.dtype, row.device) == (NUMEL, DTYPE, DEVICE)
    }
    found = []
    if sparse := measured.get(SPARSE):
        found += [
            Figure(f"{sparse.label} compress", sparse.times_add, "x add_", "<=", 4),
            Figure(f"{sparse.label} accumulate", sparse.accumulate_times_add, "x add_", "<=", 1),
            Figure(f"{sparse.label} bytes, frame header included", sparse.frame_ratio, "x smaller", ">=", 195),
        ]
        if sparse.speedup is not None:
            found.insert(1, Figure(f"{sparse.label} speed-up", sparse.speedup, "x over torch ops", ">=", 20))
    for spec in (EIGHT_BITS, ONE_BIT):
        if row := measured.get(spec):
            found.append(Figure(f"{row.label} compress", row.times_add, "x add_", "<=", 3))
    shares = [(row.working_share, row.label) for row in measured.values() if row.working_share is not None]
    if shares:
        share, label = max(shares)
        found.append(Figure(f"largest working memory ({label})", 100 * share, "% of the tensor", "<", 5))
    return found


def print_figures(found: Sequence[Figure]) -> None:
    """Print the figures to stdout. Print nothing if there are none."""
    if found:
        print(f"\nFigures at {NUMEL:,} x {DTYPE}:")
        for figure in found:
            print(f"  {figure}")
