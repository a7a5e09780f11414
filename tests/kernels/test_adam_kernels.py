"""The arithmetic of `thinwire.AdamW`: the compiled kernels are the reference, and the reference is Adam."""

import itertools
from itertools import product

import pytest
import torch
from torch import nn

from support.pairwise import pairwise
from thinwire import kernels
from thinwire.kernels.updates import AdamUpdate, MomentumUpdate

SIZES = [0, 1, 1000, 300_001]
MOMENTS = (torch.float32, torch.float64)
GRADIENTS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NUMBERS = {"beta1": 0.5, "scale": 1.3, "floor": 1e-8, "rate": 0.25}


def made(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    g, m, v = (torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(3))
    return [g.to(dtype), m.to(dtype), v.square().to(dtype)]


def both(numel: int, dtype: torch.dtype, beta2: float, gradient_dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """(update, residual, momentum, second moment) of each backend."""
    results = []
    for backend in ("cpu", "reference"):
        g, m, v = made(numel, dtype)
        g, update, residual = g.to(gradient_dtype), torch.full_like(m, torch.nan), v - m
        with kernels.force(backend):
            kernel = kernels.adam(g.device, m.dtype)
            assert backend in str(getattr(kernel, "__name__", kernel)), "another backend ran"
            adam = AdamUpdate(m, v, factor=0.7, limit=5.0, beta2=beta2, **NUMBERS)
            kernel.write(adam, g, update)
            kernel.advance(adam, g, residual)
        results.append([update, residual, m, v])
    return results


def test_backends_agree() -> None:
    for numel, dtype, gradient_dtype, beta2 in pairwise(SIZES, MOMENTS, GRADIENTS, (0.9, 1.0)):
        for mine, theirs in zip(*both(numel, dtype, beta2, gradient_dtype), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)


@pytest.mark.parametrize("beta2", [0.9, 1.0], ids=["followed", "frozen"])
def test_adam_by_its_formula(backend: str, beta2: float) -> None:
    """write and advance against float64; what the residual takes is bit for bit the update that was written."""
    for dtype, gradient_dtype in product(MOMENTS, GRADIENTS):
        check_formula(backend, dtype, gradient_dtype, beta2)


def check_formula(backend: str, dtype: torch.dtype, gradient_dtype: torch.dtype, beta2: float) -> None:
    given, m, v = made(10_000, dtype)
    g, residual = given.to(gradient_dtype), torch.randn(10_000, dtype=dtype)
    update, old, kept = torch.empty_like(m), [t.clone() for t in (g, m, v)], residual.clone()
    recipe = AdamUpdate(m, v, 0.5, 0.7, 1.3, 1e-8, 5.0, 0.25, beta2)
    with kernels.force(backend):
        recipe.write(g, update)
        assert all(map(torch.equal, (g, m, v), old)), "writing the update must change nothing else"
        recipe.advance(g, kept)
        assert torch.equal(g, old[0])
        assert torch.equal(kept, residual + update), "what is sent is not what the residual takes"
        without = [old[1].clone(), old[2].clone()]
        AdamUpdate(*without, 0.5, 0.7, 1.3, 1e-8, 5.0, 0.25, beta2).advance(g, None)
    assert torch.equal(without[0], m)
    assert torch.equal(without[1], v)
    wide, old_m, old_v = (t.to(torch.float64) for t in old)
    momentum = 0.5 * old_m + 0.5 * 0.7 * wide
    near = {"rtol": 2e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    expected = 0.25 * (momentum / (1.3 * old_v.sqrt() + 1e-8)).clamp(-5.0, 5.0)
    assert expected.abs().max() == 1.25, "nothing was cut"
    torch.testing.assert_close(update.double(), expected, **near)
    torch.testing.assert_close(m.double(), momentum, **near)
    followed = 0.9 * old_v + 0.1 * (0.7 * wide).square() if beta2 < 1 else old_v
    torch.testing.assert_close(v.double(), followed, **near)


MOMENTUM = pairwise(MOMENTS, GRADIENTS, (False, True), (0.0, 0.5), (0.0, 0.1), (1.0, 0.7), (1.0, 2.0))


@pytest.mark.parametrize(("dtype", "gradient_dtype", "nesterov", "momentum", "decay", "factor", "rate"), MOMENTUM)
def test_momentum_by_its_formula(
    dtype: torch.dtype, gradient_dtype: torch.dtype, nesterov: bool, momentum: float, decay: float, factor: float,
    rate: float,
) -> None:  # fmt: skip
    numel = 600_000  # several blocks, with parameters across their borders
    given, m, _ = made(numel, dtype)
    g, residual, weights = given.to(gradient_dtype), torch.randn(numel, dtype=dtype), torch.randn(numel)
    cuts = [0, 1, 1000, 300_000, numel - 5]  # the last five are no parameter's
    parameters = tuple((a, b, nn.Parameter(weights[a:b])) for a, b in itertools.pairwise(cuts))
    recipe = MomentumUpdate(m if momentum else None, momentum, factor, nesterov, rate, decay, parameters)
    old_g, old_m, kept, update = g.clone(), m.clone(), residual.clone(), torch.empty_like(m)
    recipe.write(g, update)
    assert torch.equal(m, old_m)
    recipe.advance(g, kept)
    recipe_of_none = MomentumUpdate(None, 0.0)
    recipe_of_none.advance(g, None)
    assert torch.equal(g, old_g)
    assert torch.equal(kept, residual + update), "what is sent is not what the residual takes"
    weights[-5:] = 0
    d = factor * g.double() + decay * weights.double()
    b = momentum * old_m.double() + d
    near = {"rtol": 2e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(update.double(), rate * (d + momentum * b if nesterov else b), **near)
    torch.testing.assert_close(m.double(), b if momentum else old_m.double(), **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rates", [[0.25] * 5, [0.5, 0.125, 0.2, 0.25, 0.1]], ids=["one rate", "rates"])
def test_a_step_of_many_parameters(dtype: torch.dtype, rates: list[float]) -> None:
    """Of any size and stride, and with updates of another dtype's width or order in memory."""
    shapes = [(0,), (1,), (3, 5), (300, 1001)]
    parameters = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    parameters.append(torch.randn(7, 5).to(dtype).t())
    updates = [torch.randn(p.shape, dtype=torch.float64).to(dtype) for p in parameters]
    stepped = []
    for backend in ("cpu", "reference"):
        mine = [p.clone() for p in parameters]
        with kernels.force(backend):
            kernels.adam(torch.device("cpu")).step(mine, updates, 0.9, rates)
        stepped.append(mine)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for mine, theirs, parameter, update, rate in zip(*stepped, parameters, updates, rates, strict=True):
        assert torch.equal(mine, theirs), "replicas with other kernels would drift apart"
        expected = (0.9 * parameter.double() - rate * update.double()).to(dtype)
        torch.testing.assert_close(mine, expected, **tolerance)


def test_a_backward_pass_through_weights_that_have_changed_is_refused(backend: str) -> None:
    weight = torch.ones(100, requires_grad=True)
    loss = weight.square().sum()
    loss.backward(retain_graph=True)
    with kernels.force(backend), torch.no_grad():
        kernels.adam(weight.device).step([weight], [torch.ones(100)], 1.0, [0.1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_not_finite_stays_so(backend: str) -> None:
    """Cut to the limit, an Inf would be a step like any other."""
    g = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 1e15, -1e15, 1e30, -1e30])
    m, v = torch.zeros(8), torch.ones(8)
    with kernels.force(backend):
        update = torch.empty(8)
        AdamUpdate(m, v, factor=1.0, limit=10.0, **{**NUMBERS, "rate": 1.0}).write(g, update)
    assert update[1] == torch.inf
    assert update[2] == -torch.inf
    assert update[3].isnan()
    assert update[4:].tolist() == [10.0, -10.0, torch.inf, -torch.inf]
