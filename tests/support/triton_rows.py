"""Rows of the contract table through the Triton kernels, against the reference: on a GPU, or in Triton's interpreter.

    python -m support.triton_rows cpu SPEC...     with TRITON_INTERPRET=1
    python -m support.triton_rows cuda SPEC...    no SPEC: all of the table; in tests/

The interpreter runs the same kernels on CPU tensors, with NumPy, slowly. Its bfloat16 rounds towards zero and has no
denormals, so those rows are left to the GPU. Failures name the row; any failure makes the exit code 1.
"""

import sys
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

import thinwire
from support.cases import ALL_SPECS, INPUTS, has_kernel, make_input
from thinwire import kernels
from thinwire.kernels.layout import DenseLayout, Layout

SIZES = (1, 2, 4095, 4096, 4097, 100_003)
INTERPRETED = {"chunk=16": (1, 41), "chunk=64": (100,), "chunk=256": (300,), "block=32": (1, 530)}
"""Sizes in the interpreter, by what is in the spec: a record or two and a tail."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.cpu().view(torch.uint8), second.cpu().view(torch.uint8))


def sizes(spec: str, device: str) -> tuple[int, ...]:
    if device != "cpu":
        return SIZES
    return next((found for part, found in INTERPRETED.items() if part in spec), (4197,))


def interpreted(spec: str, numel: int, dtype: torch.dtype, kind: str) -> bool:
    """The rows that are worth the interpreter's time: all inputs once, then those that have gone wrong elsewhere."""
    if kind == "normal":
        return dtype == torch.float32 or spec in ("topk:ratio=1/64,bits=2", "quantize:bits=8")
    worth = INPUTS if spec == "topk:ratio=1/64,bits=2" else ("ties",) if numel > 5000 else ("ties", "huge")
    return dtype == torch.float32 and kind in worth


def check(spec: str, device: str) -> Iterator[str]:
    """What is wrong, in words."""
    compressor = thinwire.compressor(spec)
    for numel, dtype, kind in product(sizes(spec, device), DTYPES, INPUTS):
        layout = compressor.layout(numel, dtype)
        if not has_kernel(layout) or (isinstance(layout, DenseLayout) and spec != "none"):
            continue
        if device != "cpu" or interpreted(spec, numel, dtype, kind):
            tensor, residual = (t.to(device) for t in make_input(kind, numel, dtype))
            for fault in check_row(layout, tensor, residual, kind):
                yield f"{spec}, {numel} x {dtype}, {kind}: {fault}"


def check_row(layout: Layout, tensor: Tensor, residual: Tensor, kind: str) -> Iterator[str]:
    device, slow = tensor.device, tensor.device.type == "cpu"
    with kernels.force("reference"):
        _, reference = kernels.select(layout, device)
    with kernels.force("cuda"):
        _, kernel = kernels.select(layout, device)
    if kernel is reference:  # for blocks that are too long
        return
    expected = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
    assert reference.encode(tensor, residual, layout, expected)
    # A payload may lie at any address.
    got = torch.full((layout.nbytes + 1,), 0xA5, dtype=torch.uint8, device=device)[layout.numel % 2 :][: layout.nbytes]
    if kernel.encode(tensor, residual, layout, got).item():
        yield "said not to be finite"
    if not same(got, expected):
        yield f"other bytes: {(got != expected).nonzero().view(-1)[:9].tolist()}"
    after, mine = residual.clone(), residual.clone()
    reference.commit(tensor, after, layout, expected)
    kernel.commit(tensor, mine, layout, expected)
    if not same(mine, after):
        yield "commit: another residual"
    if kind != "normal":
        return
    for dtype in (torch.float32, torch.float16) if slow else (*DTYPES, torch.float64):
        for count, add in ((3, False), (8, True)) if slow else ((1, True), (3, False), (8, True)):
            payloads = expected.repeat(count, 1)
            one, other = (torch.ones(layout.numel, dtype=dtype, device=device) for _ in range(2))
            reference.decode(payloads, layout, one, 1 / 3, add)
            kernel.decode(payloads, layout, other, 1 / 3, add)
            if not same(one, other):
                yield f"decode {count} payloads into {dtype}, add {add}: other bits"
    for wrong in (torch.nan,) if slow else (torch.nan, torch.inf, -torch.inf):
        spoilt = tensor.clone()
        spoilt[layout.numel // 2] = wrong
        reference.encode(spoilt, residual, layout, expected)
        if not kernel.encode(spoilt, residual, layout, got).item() or not same(got, expected):
            yield f"{wrong} was not marked"


def main(device: str, specs: list[str]) -> int:
    if device == "cpu":
        kernels._DEVICES["cuda"] = "cpu"  # what the interpreter needs
    faults = [fault for spec in specs or ALL_SPECS for fault in check(spec, device)]
    print("\n".join(faults) if faults else "ok")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
