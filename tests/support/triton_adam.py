"""Adam's Triton kernels against the reference and a formula, on a GPU or in Triton's interpreter."""

import torch
from torch import Tensor

import thinwire
from thinwire import kernels
from thinwire.kernels.cuda import adam
from thinwire.kernels.reference import adam as reference
from thinwire.kernels.updates import AdamUpdate, MomentumUpdate, Update

NUMEL = 4500
NUMBERS = {"beta1": 0.5, "factor": 0.7, "scale": 1.3, "floor": 1e-8, "limit": 5.0, "rate": 0.25}


def check(device: str) -> None:
    """Update and moments as the reference and a formula make them, whole steps through `Compressor.apply`."""
    g, m, v, r = (torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).to(device) for seed in range(4))
    v.square_()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_formula(g.to(dtype), m, v, r)
    with kernels.force("cuda"):
        assert kernels.adam(g.device, torch.float64) is reference
    wrong = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 1e15, -1e15, 1e30, -1e30], device=device)
    made = torch.empty_like(wrong)
    numbers = {**NUMBERS, "limit": 10.0, "rate": 1.0}
    adam.write(AdamUpdate(torch.zeros_like(wrong), torch.ones_like(wrong), **numbers), wrong, made)
    assert made[1] == torch.inf
    assert made[2] == -torch.inf
    assert made[3].isnan()
    assert made[4:].tolist() == [10.0, -10.0, torch.inf, -torch.inf]
    kernels._DEVICES["cuda"] = device  # what the interpreter needs
    for dtype in (torch.float32, torch.bfloat16):
        for out in (None, torch.empty_like(r)):
            check_applied(AdamUpdate(m.clone(), v.clone(), **NUMBERS, beta2=0.9), g.to(dtype), r, out)
            weights = ((0, 1000, v[:1000]), (1000, NUMEL, v[1000:]))
            check_applied(MomentumUpdate(m.clone(), 0.5, 0.7, True, 0.5, 0.1, weights), g.to(dtype), r, out)
            check_applied(None, g.to(dtype), r, out)


def check_formula(g: Tensor, m: Tensor, v: Tensor, r: Tensor) -> None:
    """write and advance against the reference and float64; what the residual takes is the update, bit for bit."""
    before, expected, update = [t.clone() for t in (g, m, v)], torch.empty_like(m), torch.full_like(m, torch.nan)
    reference.write(AdamUpdate(m, v, **NUMBERS), g, expected)
    adam.write(AdamUpdate(m, v, **NUMBERS), g, update)
    assert all(map(torch.equal, (g, m, v), before)), "writing the update must change nothing else"
    torch.testing.assert_close(update, expected, rtol=2e-5, atol=1e-6)
    wide, wide_m, wide_v = (t.double() for t in (g, m, v))
    momentum = 0.5 * wide_m + 0.5 * 0.7 * wide
    by_formula = 0.25 * (momentum / (1.3 * wide_v.sqrt() + 1e-8)).clamp(-5.0, 5.0)
    torch.testing.assert_close(update.double(), by_formula, rtol=2e-5, atol=1e-6)
    for beta2 in (0.9, 1.0):
        one, other = ([t.clone() for t in (m, v, r)] for _ in range(2))
        reference.advance(AdamUpdate(*one[:2], **NUMBERS, beta2=beta2), g, one[2])
        adam.advance(AdamUpdate(*other[:2], **NUMBERS, beta2=beta2), g, other[2])
        torch.testing.assert_close(other, one, rtol=2e-5, atol=1e-6)
        assert torch.equal(other[2], r + update), "what is sent is not what the residual takes"
        assert beta2 < 1 or torch.equal(other[1], v)
        square = 0.9 * wide_v + 0.1 * (0.7 * wide).square() if beta2 < 1 else wide_v
        torch.testing.assert_close([t.double() for t in other[:2]], [momentum, square], rtol=2e-5, atol=1e-6)
        without = [m.clone(), v.clone()]
        adam.advance(AdamUpdate(*without, **NUMBERS, beta2=beta2), g, None)
        assert all(map(torch.equal, without, other))
    assert torch.equal(g, before[0])


def check_applied(update: Update | None, g: Tensor, r: Tensor, out: Tensor | None) -> None:
    """A step through the compressor: nothing is lost, and the gradient is only read."""
    compressor, residual, gradient = thinwire.compressor("topk:ratio=1/64,bits=2"), r.clone(), g.clone()
    with kernels.force("cuda"):
        encoded = g.clone()
        if update is not None:
            encoded = torch.empty_like(r)
            update.write(gradient, encoded)
        ct = compressor.encode(encoded, residual)
        assert ct.kernels == "cuda"
        payloads = ct.payload.repeat(2, 1)
        compressor.apply(ct, gradient, residual, payloads, 1, 0.5, update, out)
        sent = compressor.decompress(ct, torch.empty_like(r))
    assert torch.equal(residual, r + encoded - sent)
    assert out is None or torch.equal(gradient, g), "the gradient was written"
    result = gradient if out is None else out
    assert torch.equal(result, sent.to(result.dtype))


if __name__ == "__main__":
    check("cpu")
