"""Checks before the timing that each kernel produces the same bits as the reference, on CPU and GPU."""

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels.layout import Layout
from thinwire.kernels.updates import AdamUpdate

from ..harness import Failure

ELEMENTS = (1 << 24) + 123
"""Largest number of elements that are compared: full chunks and a tail."""
PAYLOADS = 8


def compress(kernel: kernels.Kernel, tensor: Tensor, residual: Tensor, layout: Layout, payload: Tensor) -> None:
    """Encode and commit. A kernel of a GPU does not wait for the device in between, because the input is finite."""
    kernel.encode(tensor, residual, layout, payload)
    kernel.commit(tensor, residual, layout, payload)


def check(layout: Layout, gradient: Tensor, residual: Tensor) -> None:
    """Raise `Failure` if compress, encode, commit or decode differs from the reference, without changing a tensor."""
    _, kernel = kernels.select(layout, gradient.device)
    with kernels.force("reference"):
        _, reference = kernels.select(layout, gradient.device)
    expected, payload = (torch.empty(layout.nbytes, dtype=torch.uint8, device=gradient.device) for _ in range(2))
    if not reference.encode(gradient, residual, layout, expected):
        raise Failure("the input is not finite")
    after, kept = residual.clone(), residual.clone()
    reference.commit(gradient, after, layout, expected)

    finite = kernel.encode(gradient, residual, layout, payload)
    if (isinstance(finite, Tensor) and finite.item()) or finite is False:
        raise Failure("encode calls its input not finite, though all that came in is finite")
    _same("encode: payload", payload, expected)
    kernel.commit(gradient, kept, layout, expected)
    _same("commit: residual", kept, after)
    for count in (1, PAYLOADS):
        payloads = expected.repeat(count, 1)
        kernel.decode(payloads, layout, kept, weight=1 / count, add=False)
        reference.decode(payloads, layout, after, 1 / count, False)
        _same(f"decode of {count}: result", kept, after)
    for each, result in ((kernel, kept), (reference, after)):
        each.decode(expected.unsqueeze(0), layout, result.copy_(residual), 0.5, True)
    if not torch.allclose(
        kept, after, rtol=2 * torch.finfo(kept.dtype).eps, atol=1e-30
    ):  # a product and a sum may fuse
        _same("accumulate: result", kept, after)


def check_update(update: AdamUpdate, gradient: Tensor, residual: Tensor) -> None:
    """Raise `Failure` if an update is wrong, without changing any tensor.

    `write` and `advance` may differ from the reference by rounding only. The update that `advance` adds to the residual
    must equal the one that `write` wrote, bit for bit.
    """
    results = []
    for backend in (None, "reference"):
        mine = replace(update, m=update.m.clone(), v=update.v.clone())
        made, kept = torch.empty_like(mine.m), residual.clone()
        with nullcontext() if backend is None else kernels.force(backend):
            mine.write(gradient, made)
            mine.advance(gradient, kept)
        results.append({"update": made, "residual": kept, "momentum": mine.m, "second moment": mine.v})
    given, expected = results
    _same(
        "advance: residual",
        given=given["residual"],
        expected=residual + given["update"],
        than="the update that was written",
    )
    for name, tensor in given.items():
        # torch fuses a product and a sum now and then, the kernels never do.
        if not torch.allclose(tensor, expected[name], rtol=2e-5, atol=1e-5):
            raise Failure(f"{name}: off by up to {float((tensor - expected[name]).abs().max()):.3g}")


def _same(what: str, given: Tensor, expected: Tensor, than: str = "the reference") -> None:
    if not torch.equal(given, expected):
        wrong = (given != expected).nonzero().view(-1)
        where = f"the first at {int(wrong[0])}" if wrong.numel() else "all of them NaN"
        raise Failure(f"{what}: {wrong.numel()} of {given.numel()} differ from {than}, {where}")
