"""`python -m benchmarks codec`: time, bytes and memory of every compressor, compared with plain torch.

For each (compressor, size, dtype) it times compress with a residual, and its parts: encode, commit, decode, accumulate;
and `residual.add_(grad)` on the same tensors, and the same selection in torch operations. On a CPU all of these take
turns, so that ratios are of medians that were measured in the same seconds. On a GPU a call is captured into a CUDA
graph where possible and timed by events.

It needs torch, on a GPU Triton, and no package of the command line. Without those, run

    PYTHONPATH=src python3 -c "from benchmarks.codec import *; run(on_gpu())"
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from typing import Annotated, Any, Literal

from .harness import File, Line, Progress, Row, Specs, arg, at_least, print_table, short
from .harness import run as run_benchmark

__all__ = ["Options", "on_gpu", "run"]

DType = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class Options:
    """Time, bytes and memory of every compressor, compared with plain torch in the same run.

    With --device cuda: how close every kernel comes to the speed of the memory.
    """

    specs: Specs = ()
    """Compressors, such as topk:ratio=1/64,bits=2. Default: several of every registered one."""
    sizes: Annotated[tuple[str, ...], arg(metavar="SIZE ...", help_behavior_hint="")] = ()
    """Numbers of elements: 1e6, 25_000_000 or 25M. Default: 1M 25M; on a GPU, which has a cache, 25M 268435456."""
    dtypes: Annotated[tuple[DType, ...], arg(metavar="DTYPE ...", help_behavior_hint="")] = ()
    """float32, bfloat16, float16 or float64. Default: float32 at every size, the others at the smallest; with
    --device cuda float32 and bfloat16 at every size."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the tensors are."""
    repeats: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Samples of each time, 15 by default and 50 on a GPU; calls of seconds get three, on a GPU those that a CUDA graph
    cannot hold an eighth."""
    out: File = None
    """Write JSON lines to this file: the conditions, then the rows."""


def on_gpu(**changed: Any) -> Options:
    return Options(device="cuda", **changed)


def run(options: Options) -> int:
    """Measure, check and print the tables. Return 0, or 1 if a result differs from the reference.

    On a GPU, compressors given in `specs` are measured part by part, by default only the first one.
    """
    # These load torch; --help and errors in options should not wait for that.
    import torch

    from thinwire import kernels

    from .clock import Clock
    from .codec_rows import measure, plan

    cuda = options.device == "cuda"
    sizes, repeats = options.sizes or (("25M", "268435456") if cuda else ("1M", "25M")), options.repeats
    if repeats is None:
        repeats = 50 if cuda else 15
    at_least(repeats=(repeats, 1))
    chosen = os.environ.get(kernels.ENVIRONMENT_VARIABLE) or ("cuda" if cuda else None)
    with kernels.force(chosen):
        cases = plan(options.specs, sizes=sizes, dtypes=options.dtypes, device=options.device)
        labels = list(cases[0].compressors)
        parts = set(labels if options.specs or not cuda else labels[:1])

        def measured(progress: Progress) -> Iterator[Row]:
            for case in cases:
                yield from measure(case, parts, Clock(case.device), repeats, progress)
                if cuda:
                    torch.cuda.empty_cache()

        under, steps = describe_device(options.device, chosen), len(cases) * (len(labels) + 1)
        return run_benchmark(options, measured, show, name="codec", progress_steps=steps, repeats=repeats, **under)


def describe_device(device: str, chosen: str | None) -> dict[str, object]:
    """Return the device, and for a GPU the properties and versions that a time depends on."""
    import torch

    if device != "cuda":
        return {"device": device}
    found = torch.cuda.get_device_properties(device)
    return {
        "device": device,
        "kernels": chosen,
        "device_name": found.name,
        "device_cache": found.L2_cache_size,
        "cuda": torch.version.cuda,
        "triton": import_module("triton").__version__ if find_spec("triton") else None,
    }


NOTES = """
GB/s: bytes that must be moved, each read and write counted once. x add_: time over that of residual.add_(grad),
measured in turns with it. of floor: the time that its bytes take at the speed of the float32 residual.add_(grad), over
its own; for decode that of writing the result once. of add_: the same with residual.add_(grad) of these dtypes.
x torch: speed-up over add, topk, gather, a cast to float16 and clear in torch operations, as many kept. memory: peak
beyond tensors and payload, as a share of the tensor."""


def show(rows: list[Row], under: Line) -> None:
    """Print a table for each size and dtype."""
    if under["device"] == "cuda":
        print("{device_name}, CUDA {cuda}, Triton {triton}".format(**under))
    for (numel, dtype, dense), group in groupby(rows, lambda row: (row["numel"], row["dtype"], row["dense_bytes"])):
        lines = list(map(_cells, group))
        print_table(f"{numel:,} x {dtype} ({dense / 1e6:,.4g} MB)", lines, text=("call", "kernel"))
        if under["device"] == "cuda" and 3 * dense * 2 <= 2 * under["device_cache"]:
            print("So few elements stay in the device's cache: these times are not those of its memory.")
    print(NOTES)
    if not all(row["graph"] for row in rows) and under["device"] == "cuda":
        print("* not captured in a CUDA graph: Python's part shows in what is short.")


def _cells(row: Row) -> dict[str, str]:
    ms = row["ms"]
    return {
        "call": row["name"] + ("" if row["graph"] or row["device"] == "cpu" else " *"),
        "p20": short(ms["p20"]),
        "p50 ms": short(ms["p50"]),
        "p80": short(ms["p80"]),
        "GB/s": short(row["gb_per_s"]),
        "x add_": short(row["times_add"]),
        "of floor": _percent(row["of_floor"]),
        "of add_": _percent(row["of_add"]),
        "x torch": short(row["speedup"]),
        "ratio": short(row["ratio"]),
        "memory": _percent(row["working_share"]),
        "kernel": row["kernel"].removeprefix("thinwire.kernels."),
    }


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
