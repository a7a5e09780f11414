"""`thinwire bench codec --device cuda`: how close the kernels come to the speed of the memory, on one GPU, in one run.

For each (compressor, size, dtype), beside each other: what plain torch takes to copy, to add a gradient to a residual
and to write zeros; the kernels; `torch.topk`, and the same selection in torch operations. The *floor* of a kernel is
the time its bytes need at the speed of the float32 `residual.add_(grad)` of this run. Decoding is held against writing
the result once.

clock.py     how a time is taken          buffers.py   the tensors that are measured on
floors.py    plain torch, and the floors  check.py     is it right? before it is timed
parts.py     the rows of a compressor     updates.py   the rows of Adam's update
rows.py      what is reported             table.py     as text

Needs torch and Triton, and nothing else: where the command line's packages are missing,

    python3 -c "from thinwire.tools.bench.codec import gpu; gpu.run(out='rows.jsonl')"
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

SIZES = ("25M", "268435456")
"""The usual bucket, and a model: 2**28."""
REPEATS = 50


def run(
    specs: Sequence[str] = (), sizes: Sequence[str] = SIZES, dtypes: Sequence[str] = (), *,
    repeats: int = REPEATS, out: str | Path | None = None,
) -> int:  # fmt: skip
    """Measure, check, and print the tables; 1 if a result differs from the reference. ValueError: cannot be run.

    Compressors that are named here are measured part by part, by default the first one only.
    """
    # These load torch, for which help should not wait.
    from itertools import groupby

    import torch

    from thinwire import kernels
    from thinwire.tools.record import Writer, conditions

    from ..cases import plan
    from ..check import Mismatch
    from .clock import DeviceClock
    from .machine import machine
    from .parts import measure
    from .table import Table

    chosen = os.environ.get(kernels.ENVIRONMENT_VARIABLE) or "cuda"
    with kernels.force(chosen):
        cases = plan(specs, sizes, dtypes, device="cuda", repeats=repeats)
        for case in cases:
            if not case.compressor.contracts:
                raise ValueError(f"{case.label} takes no residual, expected compressors that do")
        parts = {case.label for case in cases} if specs else {cases[0].label}
        under = conditions(**machine(cases[0].device), kernels=chosen, repeats=repeats)
        clock = DeviceClock(cases[0].device)
        try:
            with Writer(out) as writer:
                writer.write(under)
                table = Table(under)
                for _, group in groupby(cases, lambda case: (case.numel, case.dtype)):
                    for row in measure(list(group), parts, clock, repeats):
                        writer.write(row.record())
                        table.print(row)
                    torch.cuda.empty_cache()
        except Mismatch as mismatch:
            print(f"thinwire bench codec: FAILED, {mismatch}", file=sys.stderr)
            return 1
        except torch.OutOfMemoryError as error:
            raise ValueError(f"--sizes {' '.join(sizes)} do not fit the device's memory: {error}") from error
    table.print_notes()
    return 0
