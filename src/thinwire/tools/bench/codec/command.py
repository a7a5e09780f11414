"""The command `thinwire bench codec`: its options, and the choice between the CPU and the GPU benchmark."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from thinwire.tools.bench.progress import Progress
from thinwire.tools.record import Writer, conditions
from thinwire.tools.train.config import option

from . import gpu

DType = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class Options:
    """Time, bytes and memory of every compressor, beside plain torch in the same run.

    With --device cuda: how close every kernel comes to the speed of the memory.
    """

    specs: Annotated[tuple[str, ...], arg(metavar="SPEC ...", help_behavior_hint="")] = ()
    """Compressors, such as topk:ratio=1/64,bits=2. Default: several of every registered one."""
    sizes: Annotated[tuple[str, ...], arg(metavar="SIZE ...")] = ("1M", "25M")
    """Numbers of entries: 1e6, 25_000_000 or 25M."""
    dtypes: Annotated[tuple[DType, ...], arg(metavar="DTYPE ...", help_behavior_hint="")] = ()
    """float32, bfloat16, float16 or float64. Default: float32 at every size, the others at the smallest; with
    --device cuda float32 and bfloat16 at every size."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the tensors are."""
    repeats: int = 15
    """Samples of each time; what takes seconds is content with three, what a CUDA graph cannot hold with an eighth."""
    threads: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """CPU threads. Default: as torch chooses."""
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write JSON lines to this file: the conditions, then the rows, then the figures."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> "Options":
        """Return the defaults: larger sizes and more repeats with --device cuda.

        A GPU is fast, and small tensors would stay in its cache.
        """
        on_gpu = option(arguments, "device") == "cuda"
        return cls(sizes=gpu.SIZES, repeats=gpu.REPEATS) if on_gpu else cls()


def run(options: Options) -> int:
    """Measure, check and print the tables. Return 0, or 1 if a result differs from the reference."""
    if options.device == "cuda":
        if options.threads is not None:
            raise ValueError(f"--threads {options.threads} with --device cuda, expected none: the CPU only waits")
        return gpu.run(options.specs, options.sizes, options.dtypes, repeats=options.repeats, out=options.out)
    # These load torch; --help and errors in options should not wait for that.
    from .cases import plan
    from .check import Mismatch
    from .figures import figures, print_figures
    from .measurement import count_steps, measure
    from .rows import Row
    from .table import print_tables

    cases = plan(options.specs, options.sizes, options.dtypes, repeats=options.repeats, threads=options.threads)
    under = conditions(device=options.device, repeats=options.repeats)
    rows: list[Row] = []
    try:
        with Writer(options.out) as writer, Progress(count_steps(cases)) as progress:
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
