"""Prints the rows as tables, one for each size and dtype."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.tools.bench.measure import Timing

from .rows import CompressorRow, Row

NOTES = """
Times are medians; GB/s counts the bytes of the dense tensor.
x add_: time against residual.add_(grad), measured in turns with it: "add_ ms" is its time beside this row.
vs torch: speed-up over add, topk of everything, gather and clear in torch operations, at the same density.
bits/position: spent on each kept element, beside log2 C(n,k)/k. memory: peak beyond tensor, residual and payload."""


DISTURBED = 1.5


class Column(NamedTuple):
    """A column of the tables."""

    header: str
    cell: Callable[[Row], str]
    rank: int = 0
    """Columns with the highest rank are the first that a narrow terminal leaves out."""


def print_tables(rows: Sequence[Row], conditions: dict[str, Any]) -> None:
    """Print the tables to stdout: all columns into a file, only those that fit on a terminal."""
    print(
        "thinwire {thinwire}, torch {torch}, {cpu}, {cores} cores, {threads} threads, device {device}, "
        "kernels {kernels}, {repeats} repeats, {date}".format(**conditions)
    )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)
    rank = _rank_that_fits(rows, console)
    columns = [column for column in COLUMNS if column.rank <= rank]
    for (numel, dtype, dense_bytes), group in groupby(rows, lambda row: (row.numel, row.dtype, row.dense_bytes)):
        console.print(f"\n[bold]{numel:,} x {dtype}[/] ({dense_bytes / 1e6:,.4g} MB)")
        console.print(_table(list(group), columns))
    print(NOTES)
    if disturbed := count_disturbed(rows):
        print(
            f"Not a quiet machine: beside {disturbed} of {len(rows)} rows residual.add_(grad) took over {DISTURBED} "
            "times as long as beside others in the same table. Run again before you trust those."
        )
    if len(columns) < len(COLUMNS):
        print(f"{len(COLUMNS) - len(columns)} columns did not fit this terminal; --out has everything.")


def count_disturbed(rows: Sequence[Row]) -> int:
    """Return the number of rows during which `residual.add_(grad)` took more than `DISTURBED` times its best time."""
    best: dict[tuple[int, str], float] = {}
    for row in rows:
        tensors = row.numel, row.dtype
        best[tensors] = min(row.add.p50, best.get(tensors, row.add.p50))
    return sum(row.add.p50 > DISTURBED * best[row.numel, row.dtype] for row in rows)


def _rank_that_fits(rows: Sequence[Row], console: Console) -> int:
    for rank in range(max(column.rank for column in COLUMNS), 0, -1):
        table = _table(rows, [column for column in COLUMNS if column.rank <= rank])
        if console.measure(table, options=console.options.update(width=1000)).maximum <= console.width:
            return rank
    return 0


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        text = column.header.strip() in ("compressor", "kernels")
        table.add_column(column.header, justify="left" if text else "right", overflow="fold")
    for row in rows:
        style = None if isinstance(row, CompressorRow) else "dim"
        table.add_row(*(column.cell(row) for column in columns), style=style)
    return table


def _for_compressors(cell: Callable[[CompressorRow], str]) -> Callable[[Row], str]:
    """Return a cell that is empty in the rows of baselines."""
    return lambda row: cell(row) if isinstance(row, CompressorRow) else ""


def _speed(timing: Timing, row: Row) -> str:
    return short(timing.gb_per_s(row.dense_bytes))


def _memory(row: Row) -> str:
    return "n/a" if row.working_share is None else f"{100 * row.working_share:.1f}%"


def _positions(row: CompressorRow) -> str:
    if row.position_bits is None or row.position_bound is None:
        return ""
    return f"{row.position_bits:.2f} ({row.position_bound:.2f})"


def short(value: float) -> str:
    """Format a number with about three digits and no exponent.

    >>> short(1234.5), short(12.345), short(1.2345), short(0.012345)
    ('1234', '12.3', '1.23', '0.012')
    """
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:.{decimals}f}"


COLUMNS = (
    Column("\ncompressor", lambda row: row.label),
    Column("compress\nms", lambda row: short(row.time.p50)),
    Column("\np20-p80", lambda row: f"({short(row.time.p20)}-{short(row.time.p80)})", rank=3),
    Column("\nGB/s", lambda row: _speed(row.time, row), rank=3),
    Column("\nadd_ ms", lambda row: short(row.add.p50), rank=3),
    Column("\nx add_", lambda row: short(row.times_add)),
    Column("\nvs torch", _for_compressors(lambda row: "" if row.speedup is None else short(row.speedup))),
    Column("decompress\nms", _for_compressors(lambda row: short(row.decompress.p50)), rank=2),
    Column("\nGB/s", _for_compressors(lambda row: _speed(row.decompress, row)), rank=3),
    Column("accumulate\nms", _for_compressors(lambda row: short(row.accumulate.p50)), rank=1),
    Column("\nGB/s", _for_compressors(lambda row: _speed(row.accumulate, row)), rank=3),
    Column("\nx add_", _for_compressors(lambda row: short(row.accumulate_times_add)), rank=1),
    Column("\nbytes", _for_compressors(lambda row: f"{row.payload_bytes:,}"), rank=3),
    Column("\nratio", _for_compressors(lambda row: f"{row.ratio:.1f}")),
    Column("bits/position\n(bound)", _for_compressors(_positions), rank=2),
    Column("\nmemory", _memory),
    Column("\nkernels", lambda row: row.kernels if isinstance(row, CompressorRow) else "torch", rank=1),
)
