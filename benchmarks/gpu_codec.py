"""The kernels with other settings: registers, warps, elements per lane, chunks per program. One GPU, one run.

    PYTHONPATH=src python3 benchmarks/gpu_codec.py [--tune encode decode quantize] [--out rows.jsonl]

Measured as `thinwire bench codec --device cuda` does, whose parts these are. What is chosen goes into the modules of
`thinwire.kernels.cuda`, what came of it into docs/log.md.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

import thinwire
from thinwire import kernels
from thinwire.kernels.cuda import quantize, topk
from thinwire.tools.bench.codec import describe_device, show
from thinwire.tools.bench.codec.measurement import Bench, Timed
from thinwire.tools.bench.harness import Progress, Row, run
from thinwire.tools.bench.measure import Clock
from thinwire.tools.bench.methods import EIGHT_BITS, TOPK

NUMEL, CALLS, PAYLOADS = 1 << 28, 50, 8
ENCODE = [
    {"_ELEMENTS_PER_LANE": elements, "_REGISTERS": registers, "_CHUNKS_PER_PROGRAM": chunks}
    for elements, registers, chunks in (
        (32, 96, 8), (32, 112, 8), (32, 128, 8), (32, 144, 8), (32, 128, 4), (32, 128, 2), (32, 128, 16), (64, 168, 8),
    )
]  # fmt: skip
DECODE = [{"_SUM_WARPS": warps} for warps in (1, 2, 4, 8)]
QUANTIZED = [
    {"_TILE": tile, "_warps": lambda elements, warps=warps: warps}
    for tile, warps in ((2048, 2), (4096, 4), (4096, 8), (8192, 8), (8192, 4))
]
FACTS = {"kernel": "cuda"}


@dataclass(frozen=True)
class Options:
    tune: tuple[str, ...] = ("encode", "decode", "quantize")
    out: Path | None = None


def tune(name: str, bench: Bench) -> Iterator[Row]:
    """The rows of one kernel with all its settings."""
    kernel = quantize if name == "quantize" else topk
    spec = EIGHT_BITS if name == "quantize" else TOPK
    layout = thinwire.compressor(spec).layout(bench.numel, torch.float32)
    payloads = bench.payloads(layout, PAYLOADS if name == "decode" else 1)

    def encode(i: int, number: int = 0) -> None:
        kernel.encode(bench.gradients[i], bench.residuals[i], layout, payloads[i][number])

    for number in range(len(payloads[0])):
        bench.reset()
        for i in range(bench.sets):
            encode(i, number)
    for values in {"encode": ENCODE, "decode": DECODE, "quantize": QUANTIZED}[name]:
        shown = {key.strip("_").lower(): value(4096) if callable(value) else value for key, value in values.items()}
        words = " ".join(f"{key}={value}" for key, value in shown.items())
        with patch.multiple(kernel, **values):  # an AttributeError tells of a name that is gone
            calls = [Timed(f"{name} {words}", 8 + layout.nbytes / bench.numel, encode, facts=FACTS)]
            if name == "decode":
                calls = [
                    Timed(
                        f"decode {count} x {words}", 4,
                        lambda i, count=count: topk.decode(
                            payloads[i][:count], layout, bench.outs[i], 1 / count, False
                        ), facts=FACTS,
                    )
                    for count in (1, PAYLOADS)
                ]  # fmt: skip
            yield from bench.rows(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", nargs="*", choices=Options.tune, default=Options.tune, help="which kernels")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    options = Options(tuple(given.tune), given.out)
    os.environ[kernels.ENVIRONMENT_VARIABLE] = "cuda"

    def measure(progress: Progress) -> Iterator[Row]:
        device = torch.device("cuda")
        bench = Bench(NUMEL, torch.float32, device, Clock(device), CALLS)
        yield from bench.baselines()
        for name in options.tune:
            progress.start(name)
            yield from tune(name, bench)
            progress.finish("done")

    under = describe_device("cuda", "cuda")
    run(options, measure, show, name="gpu_codec", progress_steps=len(options.tune), repeats=CALLS, **under)


if __name__ == "__main__":
    main()
