"""The arithmetic of `thinwire.AdamW` and `thinwire.SGD`, by their formulas in float64, on every backend."""

import itertools

import pytest
import torch
from torch import nn

from support.adam_formula import check_formula, check_not_finite, made
from support.pairwise import pairwise
from thinwire import kernels
from thinwire.kernels.updates import MomentumUpdate

MOMENTS = (torch.float32, torch.float64)
GRADIENTS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def test_adam_by_its_formula(backend: str) -> None:
    for row in pairwise((0, 1, 10_000, 300_001), MOMENTS, GRADIENTS, (0.9, 1.0)):
        check_formula("cpu", *row, backend)


def test_momentum_by_its_formula() -> None:
    numel = 600_000  # several blocks, with parameters across their borders
    cuts = [0, 1, 1000, 300_000, numel - 5]  # the last five are no parameter's
    for dtype, gradient_dtype, nesterov, momentum, decay, factor, rate in pairwise(
        MOMENTS, GRADIENTS, (False, True), (0.0, 0.5), (0.0, 0.1), (1.0, 0.7), (1.0, 2.0)
    ):
        given, m, _, residual = made(numel, dtype)
        g, weights = given.to(gradient_dtype), torch.randn(numel)
        parameters = tuple((a, b, nn.Parameter(weights[a:b])) for a, b in itertools.pairwise(cuts))
        recipe = MomentumUpdate(m if momentum else None, momentum, factor, nesterov, rate, decay, parameters)
        old_g, old_m, kept, update = g.clone(), m.clone(), residual.clone(), torch.empty_like(m)
        recipe.write(g, update)
        assert torch.equal(m, old_m)
        recipe.advance(g, kept)
        MomentumUpdate(None, 0.0).advance(g, None)
        assert torch.equal(g, old_g)
        assert torch.equal(kept, residual + update), "what is sent is not what the residual takes"
        weights[-5:] = 0
        d = factor * g.double() + decay * weights.double()
        b = momentum * old_m.double() + d
        near = {"rtol": 2e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
        torch.testing.assert_close(update.double(), rate * (d + momentum * b if nesterov else b), **near)
        torch.testing.assert_close(m.double(), b if momentum else old_m.double(), **near)


def test_a_step_of_many_parameters() -> None:
    """Of any size and stride, and with updates of another dtype's width or order in memory."""
    some_rates = ([0.25] * 5, [0.5, 0.125, 0.2, 0.25, 0.1])
    for dtype, rates in itertools.product((torch.float32, torch.float64, torch.bfloat16), some_rates):
        shapes = [(0,), (1,), (3, 5), (300, 1001)]
        parameters = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
        parameters.append(torch.randn(7, 5).to(dtype).t())
        updates = [torch.randn(p.shape, dtype=torch.float64).to(dtype) for p in parameters]
        stepped = []
        for backend in ("cpu", "reference"):
            stepped.append([p.clone() for p in parameters])
            with kernels.force(backend):
                kernels.adam(torch.device("cpu")).step(stepped[-1], updates, 0.9, rates)
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
    check_not_finite("cpu")
