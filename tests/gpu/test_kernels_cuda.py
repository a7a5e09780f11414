"""The Triton kernels on a GPU: the whole contract table, bit for bit the reference, and what only a device can show."""

import os
import subprocess
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch

import thinwire
from support.cases import ALL_SPECS, DTYPES, KEY, has_kernel, make_input
from support.oracle import same_bits
from thinwire import kernels

SPECS = ["topk:ratio=1/64,bits=2", "quantize:bits=8"]


def test_every_row_of_the_table() -> None:
    """In as many processes as there are cores: nearly all of the time goes into compiling."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])

    def check(spec: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "support.triton_rows", "cuda", spec],
            env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=1500, check=False,
        )  # fmt: skip
        return "" if done.returncode == 0 else f"{spec}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = [fault for fault in pool.map(check, ALL_SPECS) if fault]
    assert not faults, "\n".join(faults)


def test_which_kernels_ran() -> None:
    for spec in ALL_SPECS:
        compressor = thinwire.compressor(spec)
        ct = compressor.compress(torch.randn(9001, device="cuda"), key=1)
        assert ct.kernels == ("cuda" if has_kernel(ct.layout) and "block=65536" not in spec else "reference"), spec
        assert compressor.stats.kernels == {ct.kernels: 1}
        with kernels.force("reference"):
            other = compressor.compress(torch.randn(9001, device="cuda"), key=1)
        assert other.kernels == "reference"
    assert "cuda" in kernels.adam(torch.device("cuda")).__name__


def test_the_reference_has_the_same_bits_on_the_cpu() -> None:
    """Everywhere, but above all where nothing else has a kernel: RandomK, whole tensors, and long chunks."""
    for spec in (*ALL_SPECS, "topk:ratio=1/3,bits=2,chunk=none", "topk:ratio=1/16,bits=8,chunk=none"):
        compressor = thinwire.compressor(spec)
        for numel, dtype, kind in product((1, 4097, 100_003), DTYPES, ("ties", "denormals", "huge", "normal")):
            made = []
            for device in ("cpu", "cuda"):
                tensor, residual = (each.to(device) for each in make_input(kind, numel, dtype))
                with kernels.force("reference"):
                    ct = compressor.compress(tensor, residual, key=KEY)
                    total = compressor.accumulate(ct, tensor.clone(), 0.5)
                made.append([each.cpu() for each in (ct.payload, residual, total)])
            assert all(map(same_bits, *made)), f"{spec}, {numel} x {dtype}, {kind}"


def test_steps_for_a_while() -> None:
    """Chunks of very different scales, ties, zeros, and a residual that grows: the reference's bits at every step."""
    steps = list(product(SPECS, (0, 1, 3, 15, 4095, 4097, 3 * 4096, 65_537), [1]))
    steps += product([*SPECS, "topk:ratio=1/8,bits=4", "topk:ratio=1/64,bits=32,chunk=1024"], [200_000], [10])
    for spec, numel, count in steps:
        compressor, generator = thinwire.compressor(spec), torch.Generator("cuda").manual_seed(1)
        scale = torch.logspace(-20, 20, numel, device="cuda")
        one, other = (torch.zeros(numel, device="cuda") for _ in range(2))
        for step in range(count):
            tensor = torch.randn(numel, generator=generator, device="cuda")
            if step % 3 == 1:
                tensor = tensor * scale
            if step % 3 == 2:
                tensor = tensor.round() * (torch.rand_like(tensor) < 0.05)
            ct = compressor.compress(tensor, one)
            with kernels.force("reference"):
                expected = compressor.compress(tensor, other)
            assert torch.equal(ct.payload, expected.payload), (spec, numel, step)
            assert torch.equal(one, other), (spec, numel, step)


def test_on_another_stream_and_at_any_address() -> None:
    for spec in SPECS:
        compressor = thinwire.compressor(spec)
        tensor = torch.randn(100_003, device="cuda")
        with kernels.force("reference"):
            expected = compressor.compress(tensor).payload
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            late = torch.zeros_like(tensor)
            torch.cuda._sleep(5_000_000)
            late.copy_(tensor)
            moved = torch.empty(100_007, device="cuda")[3:-1]
            moved.copy_(late)
            payloads = [compressor.compress(each).payload for each in (late, moved)]
        stream.synchronize()
        assert all(torch.equal(payload, expected) for payload in payloads), spec


def test_more_than_two_to_the_31_elements() -> None:
    """Positions beyond 32 bits. The last chunk is compared with the same elements by themselves."""
    numel = (1 << 31) + 4096
    free = torch.cuda.mem_get_info()[0]
    if free < 40 << 30:
        raise unittest.SkipTest(f"needs 40 GiB of a GPU's memory, {free / (1 << 30):.0f} GiB are free")
    tensor = torch.empty(numel, dtype=torch.bfloat16, device="cuda").normal_()
    for spec in SPECS:
        compressor = thinwire.compressor(spec)
        residual = torch.zeros(numel, device="cuda")
        layout, small = compressor.layout(numel, tensor.dtype), compressor.layout(8192, tensor.dtype)
        _, kernel = kernels.select(layout, tensor.device)
        payload = torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
        kernel.encode(tensor, residual, layout, payload)
        kernel.commit(tensor, residual, layout, payload)
        kept, mine = torch.zeros(8192, device="cuda"), torch.empty(small.nbytes, dtype=torch.uint8, device="cuda")
        kernel.encode(tensor[-8192:], kept, small, mine)
        kernel.commit(tensor[-8192:], kept, small, mine)
        assert torch.equal(payload[-small.nbytes :], mine), spec
        assert torch.equal(residual[-8192:], kept), spec
        kernel.decode(payload.unsqueeze(0), layout, residual, 1.0, False)
        out = torch.empty(8192, device="cuda")
        kernel.decode(mine.unsqueeze(0), small, out, 1.0, False)
        assert torch.equal(residual[-8192:], out), spec
        del residual, payload


def test_adam() -> None:
    """As the reference on the same device, and through `Compressor.apply`."""
    from support import adam_formula

    adam_formula.check("cuda")
