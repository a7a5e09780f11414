"""What the contract is for: descent with compressed gradients reaches the optimum, since nothing is lost for good."""

import pytest
import torch

import thinwire
from support.cases import ALL_SPECS, SPECS, density

NUMEL = 768
SLOWLY = {specs[at] for specs in SPECS.values() for at in (0, len(specs) // 2, -1)}
"""What the reference descends with too: the same arithmetic many times slower."""


def descend(compressor: thinwire.Compressor, *, feedback: bool, steps: int, rate: float) -> float:
    """Distance to the optimum of a quadratic bowl with curvatures from 0.5 to 1, as a share of that at the start."""
    generator = torch.Generator().manual_seed(3)
    curvature = torch.linspace(0.5, 1, NUMEL)[torch.randperm(NUMEL, generator=generator)]
    optimum = torch.randn(NUMEL, generator=generator)
    x, residual = torch.zeros(NUMEL), torch.zeros(NUMEL) if feedback else None
    for step in range(steps):
        gradient = curvature * (x - optimum)
        compressor.accumulate(compressor.compress(gradient, residual, key=step), x, -rate)
    return float((x - optimum).norm() / optimum.norm())


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_quadratic_converges(spec: str, backend: str) -> None:
    """With error feedback; stochastic rounding without, as it is meant.

    The longer an element waits for its turn, the smaller the steps must be, and the more of them.
    """
    if backend == "reference" and spec not in SLOWLY:
        pytest.skip("the reference does the same, many times slower: a few specs are enough")
    compressor = thinwire.compressor(spec)
    wait = float(1 / density(compressor))
    rate = min(0.05, 0.3 / wait if compressor.name == "randomk" else 0.3 / wait**0.75)
    steps = int((16 if wait == 1 else 8) / rate)
    distance = descend(compressor, feedback="stochastic" not in spec, steps=steps, rate=rate)
    assert distance < 0.02, f"{spec}: still {distance:.3f} of the way off after {steps} steps"


def test_without_feedback_it_does_not(backend: str) -> None:
    """Otherwise the test above would show nothing: what is never among the largest is never learnt."""
    compressor = thinwire.TopK("1/16", bits=1)
    with_it = descend(compressor, feedback=True, steps=213, rate=0.0375)
    without = descend(compressor, feedback=False, steps=213, rate=0.0375)
    assert with_it < 0.02
    assert without > 0.2
