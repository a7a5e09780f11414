"""Adam's kernels by their formula in float64: on the CPU, on a GPU, or Triton's in its interpreter."""

import torch
from torch import Tensor

import thinwire
from thinwire import kernels
from thinwire.kernels.updates import AdamUpdate, MomentumUpdate, Update

NUMEL = 4500
NUMBERS = {"beta1": 0.5, "factor": 0.7, "scale": 1.3, "floor": 1e-8, "limit": 5.0, "rate": 0.25}


def made(numel: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Gradient, both moments, and a residual. No second moment is so small that it magnifies what cancels."""
    generator = torch.Generator().manual_seed(numel)
    g, m, v, r = (torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(4))
    return [g.to(dtype), m.to(dtype), (v.square() + 0.01).to(dtype), r.to(dtype)]


def check_formula(
    device: str, numel: int, dtype: torch.dtype, gradient_dtype: torch.dtype, beta2: float, backend: str
) -> None:
    """What the residual takes is bit for bit the update that was written."""
    g, m, v, residual = (t.to(device) for t in made(numel, dtype))
    g = g.to(gradient_dtype)
    update, old, kept = torch.full_like(m, torch.nan), [t.clone() for t in (g, m, v)], residual.clone()
    recipe = AdamUpdate(m, v, **NUMBERS, beta2=beta2)
    with kernels.force(backend):
        assert backend in kernels.adam(g.device, dtype).__name__, "another backend ran"
        recipe.write(g, update)
        assert all(map(torch.equal, (g, m, v), old)), "writing the update must change nothing else"
        recipe.advance(g, kept)
        without = [old[1].clone(), old[2].clone()]
        AdamUpdate(*without, **NUMBERS, beta2=beta2).advance(g, None)
    assert all(map(torch.equal, (old[0], residual + update, *without), (g, kept, m, v)))
    assert beta2 < 1 or torch.equal(v, old[2])
    wide, old_m, old_v = (t.to(torch.float64) for t in old)
    momentum = 0.5 * old_m + 0.5 * 0.7 * wide
    near = {"rtol": 2e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    expected = 0.25 * (momentum / (1.3 * old_v.sqrt() + 1e-8)).clamp(-5.0, 5.0)
    assert numel < NUMEL or expected.abs().max() == 1.25, "nothing was cut"
    torch.testing.assert_close(update.double(), expected, **near)
    torch.testing.assert_close(m.double(), momentum, **near)
    followed = 0.9 * old_v + 0.1 * (0.7 * wide).square() if beta2 < 1 else old_v
    torch.testing.assert_close(v.double(), followed, **near)


def check_not_finite(device: str) -> None:
    """What is not finite stays so: cut to the limit, an Inf would be a step like any other."""
    g = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 1e15, -1e15, 1e30, -1e30], device=device)
    update = torch.empty_like(g)
    numbers = {**NUMBERS, "limit": 10.0, "rate": 1.0}
    AdamUpdate(torch.zeros_like(g), torch.ones_like(g), **numbers).write(g, update)
    assert update[3].isnan()
    assert [*update[1:3].tolist(), *update[4:].tolist()] == [torch.inf, -torch.inf, 10.0, -10.0, torch.inf, -torch.inf]


def check(device: str) -> None:
    """Check Triton's kernels, also in whole steps through `Compressor.apply`."""
    kernels._DEVICES["cuda"] = device  # what the interpreter needs
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for beta2 in (0.9, 1.0):
            check_formula(device, NUMEL, torch.float32, dtype, beta2, "cuda")
    g, m, v, r = (t.to(device) for t in made(NUMEL))
    with kernels.force("cuda"):
        assert "reference" in kernels.adam(g.device, torch.float64).__name__
        check_not_finite(device)
        for dtype in (torch.float32, torch.bfloat16):
            for out in (None, torch.empty_like(r)):
                check_applied(AdamUpdate(m.clone(), v.clone(), **NUMBERS, beta2=0.9), g.to(dtype), r, out)
                weights = ((0, 1000, v[:1000]), (1000, NUMEL, v[1000:]))
                check_applied(MomentumUpdate(m.clone(), 0.5, 0.7, True, 0.5, 0.1, weights), g.to(dtype), r, out)
                check_applied(None, g.to(dtype), r, out)


def check_applied(update: Update | None, g: Tensor, r: Tensor, out: Tensor | None) -> None:
    """A step through the compressor: nothing is lost, and the gradient is only read."""
    compressor, residual, gradient = thinwire.compressor("topk:ratio=1/64,bits=2"), r.clone(), g.clone()
    encoded = g.clone()
    if update is not None:
        encoded = torch.empty_like(r)
        update.write(gradient, encoded)
    ct = compressor.encode(encoded, residual)
    assert ct.kernels == "cuda"
    compressor.apply(ct, gradient, residual, ct.payload.repeat(2, 1), 1, 0.5, update, out)
    sent = compressor.decompress(ct, torch.empty_like(r))
    assert torch.equal(residual, r + encoded - sent)
    assert out is None or torch.equal(gradient, g), "the gradient was written"
    result = gradient if out is None else out
    assert torch.equal(result, sent.to(result.dtype))
