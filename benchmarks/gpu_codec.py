"""The kernels with other settings: registers, warps, elements per lane, chunks per program. One GPU, one run.

    PYTHONPATH=src python3 benchmarks/gpu_codec.py [--tune compress decode quantize] [--out rows.jsonl]

Measured as `thinwire bench codec --device cuda` does, whose parts these are. What is chosen goes into the modules of
`thinwire.kernels.cuda`, what came of it into docs/log.md.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import thinwire
from thinwire import kernels
from thinwire.kernels.cuda import quantize, topk
from thinwire.tools.bench.codec.gpu.buffers import Buffers
from thinwire.tools.bench.codec.gpu.clock import DeviceClock
from thinwire.tools.bench.codec.gpu.floors import Floors, measure_floors
from thinwire.tools.bench.codec.gpu.machine import machine
from thinwire.tools.bench.codec.gpu.rows import Row
from thinwire.tools.bench.codec.gpu.table import Table
from thinwire.tools.bench.codec.gpu.timer import Timer
from thinwire.tools.record import Writer, conditions

PAYLOADS = 8
TOPK, QUANTIZE = "topk:ratio=1/64,bits=2", "quantize:bits=8"
COMPRESS = [
    {"_ENTRIES_PER_LANE": entries, "_REGISTERS": registers, "_CHUNKS_PER_PROGRAM": chunks}
    for entries, registers, chunks in (
        (32, 96, 8), (32, 112, 8), (32, 128, 8), (32, 144, 8), (32, 128, 4), (32, 128, 2), (32, 128, 16), (64, 168, 8),
    )
]  # fmt: skip
DECODE = [{"_SUM_WARPS": warps} for warps in (1, 2, 4, 8)]
QUANTIZED = [
    {"_TILE": tile, "_warps": lambda entries, warps=warps: warps}
    for tile, warps in ((2048, 2), (4096, 4), (4096, 8), (8192, 8), (8192, 4))
]


@contextmanager
def settings(module: ModuleType, values: dict[str, Any]) -> Iterator[str]:
    """The module with these values of its own names; yields them as words."""
    before = {name: getattr(module, name) for name in values}  # an AttributeError tells of a name that is gone
    vars(module).update(values)
    shown = {name: value(4096) if callable(value) else value for name, value in values.items()}
    try:
        yield " ".join(f"{name.strip('_').lower()}={value}" for name, value in shown.items())
    finally:
        vars(module).update(before)


def tune_compress(timer: Timer, floors: Floors) -> Iterator[Row]:
    buffers, layout = timer.buffers, thinwire.compressor(TOPK).layout(timer.buffers.numel, torch.float32)
    payloads = buffers.payloads(layout)
    for values in COMPRESS:
        with settings(topk, values) as words:
            yield timer.row(
                f"compress {words}", 12,
                lambda i: topk.compress(
                    buffers.gradients[i], buffers.residuals[i], layout, 0, payloads[i][0], buffers.flag
                ), **floors.of(12),
            )  # fmt: skip


def tune_decode(timer: Timer, floors: Floors) -> Iterator[Row]:
    buffers, layout = timer.buffers, thinwire.compressor(TOPK).layout(timer.buffers.numel, torch.float32)
    payloads = buffers.payloads(layout, PAYLOADS)
    for number in range(PAYLOADS):
        buffers.reset()
        for stack, gradient, residual in zip(payloads, buffers.gradients, buffers.residuals, strict=True):
            topk.compress(gradient, residual, layout, 0, stack[number], buffers.flag)
    for values in DECODE:
        with settings(topk, values) as words:
            for count in (1, PAYLOADS):
                yield timer.row(
                    f"decode {count} x {words}", 4,
                    lambda i, count=count: topk.decode(
                        payloads[i][:count], layout, 0, buffers.residuals[i], 1 / count, False
                    ), floor=floors.write.p50,
                )  # fmt: skip


def tune_quantize(timer: Timer, floors: Floors) -> Iterator[Row]:
    buffers, layout = timer.buffers, thinwire.compressor(QUANTIZE).layout(timer.buffers.numel, torch.float32)
    payloads = buffers.payloads(layout)
    for values in QUANTIZED:
        with settings(quantize, values) as words:
            yield timer.row(
                f"{QUANTIZE} {words}", 13,
                lambda i: quantize.compress(
                    buffers.gradients[i], buffers.residuals[i], layout, 0, payloads[i][0], buffers.flag
                ), **floors.of(13),
            )  # fmt: skip


TUNED = {"compress": tune_compress, "decode": tune_decode, "quantize": tune_quantize}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", nargs="*", choices=TUNED, default=[], help="which kernels; default: all")
    parser.add_argument("--numel", type=int, default=1 << 28)
    parser.add_argument("--calls", type=int, default=50, help="timed calls of each")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cuda")
    kernels.force_now("cuda")
    under = conditions(**machine(device), kernels="cuda", repeats=arguments.calls)
    timer = Timer(Buffers(arguments.numel, torch.float32, device), DeviceClock(device), arguments.calls)
    with Writer(arguments.out) as writer:
        writer.write(under)
        table = Table(under, name_width=66)

        def report(row: Row) -> None:
            writer.write(row.record())
            table.print(row)

        floors, rows = measure_floors(timer)
        for row in rows:
            report(row)
        for name in arguments.tune or TUNED:
            for row in TUNED[name](timer, floors):
                report(row)


if __name__ == "__main__":
    main()
