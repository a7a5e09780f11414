"""The kernels with other settings: registers, warps, elements per lane, chunks per program. One GPU, one run.

    PYTHONPATH=src python3 -m benchmarks.gpu_codec [rows.jsonl]

Measured as `python -m benchmarks codec --device cuda` does, whose parts these are. What is chosen goes into the modules
of `thinwire.kernels.cuda`, what came of it into docs/log.md.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import thinwire
from thinwire import kernels
from thinwire.kernels.cuda import quantize, topk

from .clock import Clock
from .codec import describe_device, show
from .codec_rows import PAYLOADS, Bench, Timed, kernel_of
from .harness import Progress, Row, run
from .methods import EIGHT_BITS, TOPK

NUMEL, CALLS = 1 << 28, 50
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "encode": [
        {"_ELEMENTS_PER_LANE": elements, "_REGISTERS": registers, "_CHUNKS_PER_PROGRAM": chunks}
        for elements, registers, chunks in (
            (32, 96, 8), (32, 112, 8), (32, 128, 8), (32, 144, 8), (32, 128, 4), (32, 128, 2), (32, 128, 16),
            (64, 168, 8),
        )
    ],
    "decode": [{"_SUM_WARPS": warps} for warps in (1, 2, 4, 8)],
    "quantize": [
        {"_TILE": tile, "_warps": lambda elements, warps=warps: warps}
        for tile, warps in ((2048, 2), (4096, 4), (4096, 8), (8192, 8), (8192, 4))
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    out: Path | None = None


def tune(name: str, bench: Bench) -> Iterator[Row]:
    """Yield the rows of one kernel with all its settings."""
    spec = EIGHT_BITS if name == "quantize" else TOPK
    kernel, layout = kernel_of(thinwire.compressor(spec), bench.numel, torch.float32, bench.device)
    payloads = bench.payloads(layout, PAYLOADS)
    facts = {"kernel": "cuda"}

    def encode(i: int, number: int = 0) -> None:
        kernel.encode(bench.gradients[i], bench.residuals[i], layout, payloads[i][number])

    def decode(i: int) -> None:
        kernel.decode(payloads[i], layout, bench.outs[i], 1 / PAYLOADS, False)

    for i in range(bench.sets):
        for number in range(PAYLOADS):
            encode(i, number)
    for values in SETTINGS[name]:
        shown = {key.strip("_").lower(): value(4096) if callable(value) else value for key, value in values.items()}
        words = " ".join(f"{key}={value}" for key, value in shown.items())
        call = Timed(f"{name} {words}", 8 + layout.nbytes / bench.numel, encode, facts=facts)
        if name == "decode":
            call = Timed(f"decode {PAYLOADS} x {words}", 4, decode, facts=facts)
        with patch.multiple(quantize if name == "quantize" else topk, **values):  # AttributeError: a name is gone
            yield from bench.rows([call])


def main() -> None:
    device = torch.device("cuda")
    os.environ[kernels.ENVIRONMENT_VARIABLE] = "cuda"

    def measure(progress: Progress) -> Iterator[Row]:
        bench = Bench(NUMEL, torch.float32, device, Clock(device), CALLS)
        yield from bench.baselines()
        for name in SETTINGS:
            yield from tune(name, bench)
            progress.finish(name, "done")

    options, under = Options(Path(sys.argv[1]) if sys.argv[1:] else None), describe_device("cuda", "cuda")
    run(options, measure, show, name="gpu_codec", progress_steps=len(SETTINGS), repeats=CALLS, **under)


if __name__ == "__main__":
    main()
