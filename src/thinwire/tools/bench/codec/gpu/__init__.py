"""`thinwire bench codec --device cuda`: measures how close the kernels come to the memory bandwidth of one GPU.

One run measures, for each (compressor, size, dtype): the time plain torch takes to copy, to add a gradient to a
residual and to write zeros; the kernels; `torch.topk`; and the same selection in torch operations. The *floor* of a
kernel is the time its bytes need at the speed of the float32 `residual.add_(grad)` of the same run. The floor of
decoding is the time to write the result once.

clock.py     takes the times             buffers.py   holds the tensors
floors.py    plain torch and the floors  check.py     checks results before they are timed
parts.py     rows of a compressor        updates.py   rows of Adam's update
rows.py      the reported row            table.py     prints rows as text

It needs torch and Triton and no other package. Where the packages of the command line are missing, run

    python3 -c "from thinwire.tools.bench.codec import gpu; gpu.run(out='rows.jsonl')"
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

SIZES = ("25M", "268435456")
"""Numels of a usual bucket and of a model, 2**28."""
REPEATS = 50


def run(
    specs: Sequence[str] = (), sizes: Sequence[str] = SIZES, dtypes: Sequence[str] = (), *,
    repeats: int = REPEATS, out: str | Path | None = None,
) -> int:  # fmt: skip
    """Measure, check and print the tables. Return 0, or 1 if a result differs from the reference.

    Compressors given in `specs` are measured as a whole and part by part. By default only the first one is measured in
    parts. Raises ValueError for options that cannot be run.
    """
    # These load torch; --help should not wait for that.
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
