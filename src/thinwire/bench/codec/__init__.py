"""`thinwire bench codec`: every compressor's time, bytes and memory, beside what plain torch takes for the same job.

For each (compressor, size, dtype): compress with its residual, decompress, accumulate. `residual.add_(grad)` on tensors
of the same size is timed in turns with them, and, for a compressor that selects, so is the same selection written in
torch operations; "x add_" and "vs torch" are quotients of medians taken in the same seconds.

Gradients are independent normal numbers, other ones in each call; the residual is what error feedback leaves of them.
Each result is checked against the reference kernels before its row is reported.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from thinwire.bench.progress import Progress
from thinwire.record import Writer, conditions

DType = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class Options:
    """Time, bytes and memory of every compressor, beside plain torch in the same run."""

    specs: Annotated[tuple[str, ...], arg(metavar="SPEC ...", help_behavior_hint="")] = ()
    """Compressors, such as topk:ratio=1/64,bits=2. Default: several of every registered one."""
    sizes: Annotated[tuple[str, ...], arg(metavar="SIZE ...")] = ("1M", "25M")
    """Numbers of entries: 1e6, 25_000_000 or 25M."""
    dtypes: Annotated[tuple[DType, ...], arg(metavar="DTYPE ...", help_behavior_hint="")] = ()
    """float32, bfloat16, float16 or float64. Default: float32 at every size, the others at the smallest."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the tensors are."""
    repeats: int = 15
    """Samples of each time; what takes seconds is content with three."""
    threads: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """CPU threads. Default: as torch chooses."""
    json: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write JSON lines to this file: the conditions, then the rows, then the figures."""


def run(options: Options) -> int:
    """Measure, check, and print the table; 1 if a result differs from the reference."""
    # These load torch, for which help and wrong options should not wait.
    from .cases import plan
    from .check import Mismatch
    from .figures import figures, print_figures
    from .measurement import count_steps, measure
    from .rows import Row
    from .table import print_tables

    cases = plan(options)
    under = conditions(device=options.device, repeats=options.repeats)
    rows: list[Row] = []
    try:
        with Writer(options.json) as writer, Progress(count_steps(cases)) as progress:
            writer.write(under)
            for row in measure(cases, options.repeats, progress):
                writer.write(row.record())
                rows.append(row)
            found = figures(rows)
            for figure in found:
                writer.write(figure.record())
    except Mismatch as mismatch:
        print(f"thinwire bench codec: FAILED, {mismatch}", file=sys.stderr)
        return 1
    print_tables(rows, under)
    print_figures(found)
    return 0
