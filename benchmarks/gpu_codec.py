"""How close the fused kernels come to the memory: one GPU, one run, medians beside their floors.

    PYTHONPATH=src python3 benchmarks/gpu_codec.py [--numel 25000000 268435456] [--out results.jsonl]

The floor of a kernel is the time its bytes need at the speed of the plain operation that moves as many: for a fused
compress `residual.add_(grad)` of the same dtypes, for decode writing the result once, for Adam that speed times its own
24 bytes an entry. Random normal data; three sets of buffers in turn, so that nothing is found in the cache; CUDA graphs
and events; p20, p50 and p80 of the single calls. What is measured is first checked against the reference.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import thinwire
from thinwire import kernels
from thinwire.kernels.cuda import adam, topk
from thinwire.kernels.layout import Layout

SETS = 3
PAYLOADS = 8
TOPK, QUANTIZE = "topk:ratio=1/64,bits=2", "quantize:bits=8"
ADAM = {"beta1": 0.5, "factor": 1.0, "scale": 1.0, "floor": 1e-8, "limit": 8.0, "rate": 1.0}


def captured(function: Callable[[int], Any]) -> list[Callable[[], Any]]:
    """The calls for each set of buffers, as CUDA graphs: what is timed is the device, not Python."""
    graphs = []
    for i in range(SETS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function(i)
        graphs.append(graph.replay)
    return graphs


def milliseconds(function: Callable[[int], Any], calls: int, capture: bool = True) -> list[float]:
    """p20, p50, p80 of single calls, each with the next set of buffers."""
    for i in range(2 * SETS):
        function(i % SETS)
    torch.cuda.synchronize()
    replays = captured(function) if capture else [partial(function, i) for i in range(SETS)]
    for replay in replays:
        replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for i, (start, stop) in enumerate(events):
        start.record()
        replays[i % SETS]()
        stop.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(stop) for start, stop in events]
    fifths = statistics.quantiles(times, n=5)
    return [fifths[0], statistics.median(times), fifths[3]]


class Run:
    """Prints a table, keeps the rows."""

    def __init__(self, out: Path | None, calls: int) -> None:
        self.out, self.calls, self.rows = out, calls, []
        print(f"{'what':<44}{'dtype':>9}{'entries':>12}{'p20':>9}{'p50 ms':>9}{'p80':>9}{'GB/s':>8}{'of floor':>10}")

    def __call__(
        self, what: str, dtype: torch.dtype, numel: int, bytes_each: float, function: Callable[[int], Any],
        floor: float | None = None, capture: bool = True,
    ) -> float:  # fmt: skip
        p20, p50, p80 = milliseconds(function, self.calls, capture)
        share = None if floor is None else floor / p50
        row = {
            "what": what, "dtype": str(dtype)[6:], "numel": numel, "p20_ms": p20, "p50_ms": p50, "p80_ms": p80,
            "gb_per_s": bytes_each * numel / p50 / 1e6, "floor_ms": floor, "of_floor": share,
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        }  # fmt: skip
        print(
            f"{what:<44}{row['dtype']:>9}{numel:>12}{p20:>9.3f}{p50:>9.3f}{p80:>9.3f}{row['gb_per_s']:>8.0f}"
            + ("" if share is None else f"{share:>10.1%}"),
            flush=True,
        )
        self.rows.append(row)
        if self.out:
            self.out.write_text("".join(json.dumps(each) + "\n" for each in self.rows))
        return p50


def buffers(layout: Layout, count: int = 1) -> list[Tensor]:
    return [torch.empty(count, layout.nbytes, dtype=torch.uint8, device="cuda") for _ in range(SETS)]


def check(spec: str, grad: Tensor) -> None:
    """What is timed is right: compress here is compress there."""
    compressor, some = thinwire.compressor(spec), grad[: 1 << 20]
    layout = compressor.layout(some.numel(), some.dtype)
    _, kernel = kernels.select(layout, some.device)
    one, other = (torch.zeros(some.numel(), device="cuda") for _ in range(2))
    payload, flag = (
        torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
    )
    kernel.compress(some, one, layout, 0, payload, flag)
    with kernels.force("reference"):
        expected = compressor.compress(some, other)
    assert torch.equal(expected.payload, payload), f"{spec}: other bytes"
    assert torch.equal(one, other), f"{spec}: another residual"


def measure(run: Run, numel: int, dtype: torch.dtype) -> None:
    grads = [torch.randn(numel, device="cuda").to(dtype) for _ in range(SETS)]
    kept = [0.3 * torch.randn(numel, device="cuda") for _ in range(SETS)]
    flag, wide = torch.zeros(1, dtype=torch.int32, device="cuda"), dtype.itemsize
    for spec in (TOPK, QUANTIZE):
        check(spec, grads[0])
    run("copy", dtype, numel, 2 * wide, lambda i: grads[i].copy_(grads[(i + 1) % SETS]))
    grads = [torch.randn(numel, device="cuda").to(dtype) for _ in range(SETS)]
    floor = run("residual.add_(grad)", dtype, numel, wide + 8, lambda i: kept[i].add_(grads[i], alpha=1e-3))
    write = run("out.zero_()", torch.float32, numel, 4, lambda i: kept[i].zero_())
    for residual in kept:
        residual.normal_(std=0.3)

    chosen = thinwire.compressor(TOPK).layout(numel, dtype)
    _, kernel = kernels.select(chosen, grads[0].device)
    payloads = buffers(chosen)

    def fused(layout: Layout, module: Any, out: list[Tensor]) -> Callable[[int], None]:
        return lambda i: module.compress(grads[i], kept[i], layout, 0, out[i][0], flag)

    run(f"compress {TOPK}", dtype, numel, wide + 8, fused(chosen, kernel, payloads), floor)
    run(f"encode {TOPK}, flagged", dtype, numel, wide + 4,
        lambda i: kernel.encode_flagged(grads[i], kept[i], chosen, 0, payloads[i][0], flag.zero_()))  # fmt: skip
    run(
        f"commit {TOPK}",
        dtype,
        numel,
        wide + 8,
        lambda i: kernel.commit(grads[i], kept[i], chosen, 0, payloads[i][0]),
        floor,
    )
    many = buffers(chosen, PAYLOADS)
    for stack in many:
        for payload in stack:
            kernel.compress(grads[0].normal_(), kept[0], chosen, 0, payload, flag)
    run(f"decode {PAYLOADS} payloads {TOPK}", torch.float32, numel, 4,
        lambda i: kernel.decode(many[i], chosen, 0, kept[i], 0.125, False), write)  # fmt: skip
    run(f"decode 1 payload {TOPK}", torch.float32, numel, 4,
        lambda i: kernel.decode(many[i][:1], chosen, 0, kept[i], 1.0, False), write)  # fmt: skip
    many.clear()
    for residual in kept:
        residual.normal_(std=0.3)
    for spec in ("topk:ratio=1/8,bits=4", QUANTIZE, "quantize:bits=4", "quantize:bits=1"):
        layout = thinwire.compressor(spec).layout(numel, dtype)
        _, module = kernels.select(layout, grads[0].device)
        # The codes are written too: the floor is that speed times all bytes.
        own = floor * (wide + 8 + layout.nbytes / numel) / (wide + 8)
        run(
            f"compress {spec}",
            dtype,
            numel,
            wide + 8 + layout.nbytes / numel,
            fused(layout, module, buffers(layout)),
            own,
        )
    if dtype == torch.float32:
        moments = [(torch.randn(numel, device="cuda"), torch.rand(numel, device="cuda")) for _ in range(SETS)]
        payloads = buffers(chosen)

        def fused_adam(i: int) -> None:
            adam.compress(grads[i], *moments[i], kept[i], chosen, payloads[i][0], flag, **ADAM)

        run("compress Adam's update, one pass", dtype, numel, 24, fused_adam, 2 * floor)
        moments.clear()
        few = max(6, run.calls // 8)
        all_calls, run.calls = run.calls, few
        k = -(-numel // 64)
        run(
            "torch.topk of the whole tensor",
            dtype,
            numel,
            4,
            lambda i: torch.topk(grads[i].abs(), k, sorted=False),
            capture=False,
        )

        def torch_ops(i: int) -> None:
            total = kept[i].add_(grads[i])
            places = torch.topk(total.abs(), k, sorted=False).indices
            total[places].to(torch.float16)
            total[places] = 0

        run("torch ops: add, topk, gather, clear", dtype, numel, 12, torch_ops, floor, capture=False)
        layout = thinwire.compressor("topk:ratio=1/64,bits=2,chunk=none").layout(numel, dtype)
        _, module = kernels.select(layout, grads[0].device)
        run(
            "compress topk:ratio=1/64,bits=2,chunk=none",
            dtype,
            numel,
            12,
            fused(layout, module, buffers(layout)),
            floor,
            capture=False,
        )
        run.calls = all_calls


def tune(run: Run, numel: int) -> None:
    """The same kernels with other numbers of registers, entries per lane, chunks per program and warps."""
    grads = [torch.randn(numel, device="cuda") for _ in range(SETS)]
    kept = [0.3 * torch.randn(numel, device="cuda") for _ in range(SETS)]
    flag, dtype = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.float32
    floor = run("residual.add_(grad)", dtype, numel, 12, lambda i: kept[i].add_(grads[i], alpha=1e-3))
    write = run("out.zero_()", dtype, numel, 4, lambda i: kept[i].zero_())
    layout = thinwire.compressor(TOPK).layout(numel, dtype)
    payloads = buffers(layout, PAYLOADS)

    def compress(i: int) -> None:
        topk.compress(grads[i], kept[i], layout, 0, payloads[i][0], flag)

    usual = topk._ENTRIES_PER_LANE, topk._REGISTERS, topk._CHUNKS_PER_PROGRAM
    for entries, registers, chunks in (
        (32, 64, 8), (32, 72, 8), (32, 80, 8), (32, 96, 8), (32, 128, 8), (32, 80, 4), (32, 80, 16), (32, 80, 1),
        (16, 48, 8), (16, 64, 8), (16, 80, 8),
    ):  # fmt: skip
        topk._ENTRIES_PER_LANE, topk._REGISTERS, topk._CHUNKS_PER_PROGRAM = entries, registers, chunks
        name = f"compress {entries} a lane, {registers} registers, {chunks} chunks"
        run(name, dtype, numel, 12, compress, floor)
    topk._ENTRIES_PER_LANE, topk._REGISTERS, topk._CHUNKS_PER_PROGRAM = usual
    for stack in payloads:
        for payload in stack:
            topk.compress(grads[0].normal_(), kept[0], layout, 0, payload, flag)
    warps_usual = topk._DECODE_WARPS
    for warps in (1, 2, 4, 8):
        topk._DECODE_WARPS = warps
        run(f"decode {PAYLOADS} payloads, {warps} warps", dtype, numel, 4,
            lambda i: topk.decode(payloads[i], layout, 0, kept[i], 0.125, False), write)  # fmt: skip
    topk._DECODE_WARPS = warps_usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, nargs="+", default=[25_000_000, 1 << 28])
    parser.add_argument("--calls", type=int, default=50, help="timed calls of each kernel")
    parser.add_argument("--tune", action="store_true", help="other settings of the TopK kernels, on the last size only")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines")
    arguments = parser.parse_args()
    kernels.force_now("cuda")
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    run = Run(arguments.out, arguments.calls)
    if arguments.tune:
        return tune(run, arguments.numel[-1])
    for numel in arguments.numel:
        for dtype in (torch.float32, torch.bfloat16):
            measure(run, numel, dtype)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
