"""What the check of a received payload costs beside encoding and decoding it: medians, on the CPU, in one run.

    python benchmarks/payload_checks.py [SPEC ...]          # such as topk:ratio=1/80,bits=2 quantize:bits=8

The three take turns, so that whatever else the machine does falls on all of them.
"""

import statistics
import sys
import time

import torch

import thinwire
from thinwire import kernels

NUMEL = 25_000_000
TURNS = 31


def main(specs: list[str]) -> None:
    print(f"{NUMEL:,} float32, {torch.get_num_threads()} threads, medians of {TURNS}")
    for spec in specs or ["topk:ratio=1/80,bits=2", "quantize:bits=8"]:
        seconds = measure(spec)
        print(
            f"{spec:<32}  check {1e3 * seconds['check']:7.3f} ms"
            f"  encode {1e3 * seconds['encode']:7.2f} ms  decode {1e3 * seconds['decode']:7.2f} ms"
            f"  check/encode {seconds['check'] / seconds['encode']:6.1%}"
            f"  check/decode {seconds['check'] / seconds['decode']:6.1%}",
            flush=True,
        )


def measure(spec: str) -> dict[str, float]:
    """Median seconds of each."""
    tensor, residual, out = torch.randn(NUMEL), torch.zeros(NUMEL), torch.empty(NUMEL)
    layout = thinwire.compressor(spec).layout(NUMEL, torch.float32)
    payload = torch.empty(layout.nbytes, dtype=torch.uint8)
    _, kernel = kernels.select(layout, tensor.device)
    work = {
        "encode": lambda: kernel.encode(tensor, residual, layout, payload),
        "check": lambda: kernels.check(payload, layout),
        "decode": lambda: kernel.decode(payload.unsqueeze(0), layout, out, 1.0, False),
    }
    taken: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(TURNS + 1):
        for name, do in work.items():
            start = time.perf_counter()
            do()
            if turn:  # the first one compiles
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
