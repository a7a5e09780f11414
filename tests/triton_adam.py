"""Adam's Triton kernels against the reference, on a GPU or in Triton's interpreter."""

import torch
from torch import Tensor

import thinwire
from thinwire import kernels
from thinwire.kernels.cuda import adam, topk
from thinwire.kernels.reference import adam as reference
from thinwire.kernels.updates import AdamUpdate, MomentumUpdate, Update

NUMEL = 4500
NUMBERS = {"beta1": 0.5, "factor": 0.7, "scale": 1.3, "floor": 1e-8, "limit": 5.0, "rate": 0.25}


def check(device: str) -> None:
    """Update and moments as the reference makes them, and the fused pass the same as the two it is made of."""
    g, m, v, r = (torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).to(device) for seed in range(4))
    v.square_()
    sent, update = g.clone(), g.clone()
    reference.send(sent, m, v, **NUMBERS)
    adam.send(update, m, v, **NUMBERS)
    torch.testing.assert_close(update, sent, rtol=2e-5, atol=1e-6)
    for beta2 in (0.9, 1.0):
        one, other = (m.clone(), v.clone()), (m.clone(), v.clone())
        reference.commit(sent, *one, 0.5, beta2, 1.3, 1e-8, 0.25)
        adam.commit(sent, *other, 0.5, beta2, 1.3, 1e-8, 0.25)
        torch.testing.assert_close(other, one, rtol=2e-5, atol=1e-6)
    wrong = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 1e15, -1e15, 1e30, -1e30], device=device)
    adam.send(wrong, torch.zeros_like(wrong), torch.ones_like(wrong), **{**NUMBERS, "limit": 10.0, "rate": 1.0})
    assert wrong[1] == torch.inf
    assert wrong[2] == -torch.inf
    assert wrong[3].isnan()
    assert wrong[4:].tolist() == [10.0, -10.0, torch.inf, -torch.inf]
    check_fused(AdamUpdate(m, v, **NUMBERS), g, r)
    check_fused(MomentumUpdate(m, gain=0.7, share=0.25, rate=0.5), g, r)


def check_fused(recipe: Update, g: Tensor, r: Tensor) -> None:
    """One pass that makes the update and compresses it, against two."""
    layout = thinwire.compressor("topk:ratio=1/64,bits=2").layout(NUMEL, torch.float32)
    assert topk.fuses(layout)
    update, fused, kept, apart = g.clone(), g.clone(), r.clone(), r.clone()
    first, second = (torch.empty(layout.nbytes, dtype=torch.uint8, device=g.device) for _ in range(2))
    flag = torch.zeros(1, dtype=torch.int32, device=g.device)
    topk.compress(fused, kept, layout, 0, first, flag, recipe)
    with kernels.force("cuda"):
        recipe.apply(update)
    torch.testing.assert_close(fused, update, rtol=1e-6, atol=1e-7)  # torch may fuse a product into a sum
    topk.compress(fused, apart, layout, 0, second, flag)
    assert not flag.item()
    assert torch.equal(first, second)
    assert torch.equal(kept, apart)


if __name__ == "__main__":
    check("cpu")
