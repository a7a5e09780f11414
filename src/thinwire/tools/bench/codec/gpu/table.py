"""Prints each row as soon as it is measured, because a run takes minutes and may be interrupted."""

import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .clock import SETS
from .rows import Row

NOTES = """
p20, p50, p80: of single calls, in milliseconds. GB/s: every byte that must be moved, counted once.
of floor: the time its bytes take at the speed of the float32 residual.add_(grad) above, over its own. For decode:
          that of writing the result once. of add_: the same by torch's residual.add_(grad) of these very dtypes.
x torch: how many times faster than add, topk, gather, a cast to float16 and clear in torch operations, as many kept.
* not captured in a CUDA graph: Python's part shows in what is short."""


class Column(NamedTuple):
    """A column of the table."""

    header: str
    width: int
    cell: Callable[[Row], str]
    always: bool = True
    """Whether a narrow terminal shows the column too."""


def share(value: float | None) -> str:
    """Format a share as a percentage, and None as an empty string.

    >>> share(0.7649), share(None)
    ('76.5%', '')
    """
    return "" if value is None else f"{value:.1%}"


COLUMNS = (
    Column("p20", 8, lambda row: f"{row.time.p20:.3f}", always=False),
    Column("p50 ms", 8, lambda row: f"{row.time.p50:.3f}"),
    Column("p80", 8, lambda row: f"{row.time.p80:.3f}", always=False),
    Column("GB/s", 7, lambda row: f"{row.gb_per_s:.0f}"),
    Column("of floor", 9, lambda row: share(row.of_floor)),
    Column("of add_", 8, lambda row: share(row.of_torch_floor), always=False),
    Column("x torch", 8, lambda row: "" if row.speedup is None else f"{row.speedup:.1f}"),
)
NAME_WIDTH = 45


class Table:
    """Prints rows to stdout, with fewer columns on a narrow terminal."""

    def __init__(self, conditions: Mapping[str, Any], name_width: int = NAME_WIDTH) -> None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
        wide = width >= name_width + sum(column.width for column in COLUMNS)
        self._columns = [column for column in COLUMNS if wide or column.always]
        self._name_width, self._cache, self._tensors = name_width, conditions["device_cache"], (0, "")
        print(
            "{device_name}, driver {driver}, torch {torch}, Triton {triton}, thinwire {thinwire}, kernels {kernels}, "
            "{repeats} samples, {date}".format(**conditions)
        )

    def print(self, row: Row) -> None:
        """Print a row, below a heading if it is the first of its size and dtype."""
        if (row.numel, row.dtype) != self._tensors:
            self._tensors = row.numel, row.dtype
            headers = "".join(f"{column.header:>{column.width}}" for column in self._columns)
            print(f"\n{f'{row.numel:,} x {row.dtype}':<{self._name_width}}{headers}")
            if SETS * row.numel * 8 <= 2 * self._cache:
                print("So few elements stay in the device's cache: these times are not those of its memory.")
        name = row.name if row.graph else f"{row.name} *"
        print(
            f"{name:<{self._name_width}}" + "".join(f"{column.cell(row):>{column.width}}" for column in self._columns),
            flush=True,
        )

    def print_notes(self) -> None:
        """Print the explanation of the columns."""
        print(NOTES)
