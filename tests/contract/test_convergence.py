"""What the contract is for: descent with compressed gradients reaches the optimum, since nothing is lost for good."""

import pytest
import torch

import thinwire
from support.cases import SPECS
from thinwire import kernels

NUMEL = 768


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


@pytest.mark.parametrize("name", SPECS)
def test_quadratic_converges(name: str) -> None:
    """With error feedback. Of each compressor the first spec with the reference too, many times slower.

    The longer an element waits for its turn, the smaller the steps must be, and the more of them.
    """
    for backend, spec in [("reference", SPECS[name][0]), *(("cpu", spec) for spec in SPECS[name])]:
        compressor = thinwire.compressor(spec)
        wait = float(1 / getattr(compressor, "ratio", 1))
        rate = min(0.05, 0.3 / wait if compressor.name == "randomk" else 0.3 / wait**0.75)
        steps = int((16 if wait == 1 else 8) / rate)
        with kernels.force(backend):
            distance = descend(compressor, feedback=True, steps=steps, rate=rate)
        assert distance < 0.02, f"{spec}, {backend}: still {distance:.3f} of the way off after {steps} steps"


def test_without_feedback_it_does_not() -> None:
    """Otherwise the test above would show nothing: what is never among the largest is never learnt."""
    compressor = thinwire.TopK("1/16", bits=1)
    with_it = descend(compressor, feedback=True, steps=213, rate=0.0375)
    without = descend(compressor, feedback=False, steps=213, rate=0.0375)
    assert with_it < 0.02
    assert without > 0.2
