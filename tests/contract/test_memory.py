"""A thousand steps need no more memory than ten."""

import gc
import resource
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import thinwire
from benchmarks.clock import peak_memory
from support.cases import SPECS
from support.framing import build, take_apart
from support.slow import slow
from thinwire import CompressedTensor, kernels

SLACK = 6 << 20


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("backend", "numel", "name"),
    [("cpu", 1_000_000, "topk"), ("cpu", 1_000_000, "quantize"), *(slow("reference", 5000, name) for name in SPECS)],
)
def test_a_thousand_calls_do_not_grow(backend: str, numel: int, name: str) -> None:
    """The reference is slow, so its tensor is small; there, frames are made and read as well.

    A leak grows every time. What another test left behind for the allocator to sort out grows once.
    """
    compressor = thinwire.compressor(SPECS[name][0])
    tensor, residual, total = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)

    def call(key: int) -> None:
        ct = compressor.compress(tensor, residual, key=key)
        compressor.accumulate(ct, total, 0.5)
        if backend == "reference" and key % 10 == 0:
            CompressedTensor.from_bytes(ct.to_bytes())

    def growth(calls: int) -> int:
        before = resident()
        for key in range(calls):
            call(key)
        return resident() - before

    with kernels.force(backend):
        growth(20)
        grown = growth(1000)
        if grown > SLACK:
            grown = growth(1000)
    assert grown < SLACK, f"{compressor}, {backend}: grew by {grown / 2**20:.1f} MiB in 1,000 calls"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
@pytest.mark.parametrize("spec", ["topk:ratio=1/64,bits=2", "quantize:bits=8", "quantize:bits=1", "none"])
def test_working_memory_is_a_fraction_of_the_tensor(spec: str) -> None:
    """What compress and accumulate need beyond tensor, residual and payload."""
    compressor, numel = thinwire.compressor(spec), 16_000_000
    tensor, residual, total = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    out = torch.empty(compressor.nbytes(numel), dtype=torch.uint8)
    ct = compressor.compress(tensor, residual, out=out)
    for job in (lambda: compressor.compress(tensor, residual, out=out), lambda: compressor.accumulate(ct, total)):
        peak = peak_memory(job, tensor.device)
        assert peak is None or peak < 0.05 * tensor.nbytes, f"{spec}: {peak} bytes beside {tensor.nbytes}"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
@pytest.mark.parametrize("spec", ["topk:ratio=1/16,bits=8,chunk=none", "topk:ratio=1/16,bits=8", "quantize:bits=8"])
def test_reading_a_frame_takes_memory_in_proportion_to_it(spec: str) -> None:
    """About its own size if it is accepted. If it is refused, the reference finds the words: its bits are numbers then,
    some thousands at a time."""
    numel = 16_000_000
    fields, name, payload = take_apart(thinwire.compressor(spec).compress(torch.randn(numel)).to_bytes())
    infinite = b"\x80\x7f" + payload[2:]  # the first scale
    for data, factor in ((build(name, payload, **fields), 2), (build(name, infinite, **fields), 32)):

        def read(data: bytes = data, is_good: bool = factor == 2) -> None:
            with nullcontext() if is_good else pytest.raises(thinwire.FrameError, match="scale"):
                CompressedTensor.from_bytes(data)

        # What the allocator returns late may be counted once, but not each time.
        peaks = [peak_memory(read, torch.device("cpu")) or 0 for _ in range(4)]
        assert min(peaks) < factor * len(data), f"{spec}: {peaks} bytes for a frame of {len(data)}"
