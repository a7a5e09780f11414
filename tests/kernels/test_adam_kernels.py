"""The arithmetic of `thinwire.AdamW` and `thinwire.SGD`, by their formulas in float64, on every backend."""

import itertools

import pytest
import torch
from torch import nn

from support.pairwise import pairwise
from thinwire import kernels
from thinwire.kernels.updates import AdamUpdate, MomentumUpdate

MOMENTS = (torch.float32, torch.float64)
GRADIENTS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def made(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    g, m, v = (torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(3))
    return [g.to(dtype), m.to(dtype), v.square().to(dtype)]


def test_adam_by_its_formula(backend: str) -> None:
    """What the residual takes is bit for bit the update that was written."""
    for numel, dtype, gradient_dtype, beta2 in pairwise((0, 1, 10_000, 300_001), MOMENTS, GRADIENTS, (0.9, 1.0)):
        given, m, v = made(numel, dtype)
        g, residual = given.to(gradient_dtype), torch.randn(numel, dtype=dtype)
        update, old, kept = torch.empty_like(m), [t.clone() for t in (g, m, v)], residual.clone()
        recipe = AdamUpdate(m, v, 0.5, 0.7, 1.3, 1e-8, 5.0, 0.25, beta2)
        with kernels.force(backend):
            assert backend in kernels.adam(g.device, dtype).__name__, "another backend ran"
            recipe.write(g, update)
            assert all(map(torch.equal, (g, m, v), old)), "writing the update must change nothing else"
            recipe.advance(g, kept)
            without = [old[1].clone(), old[2].clone()]
            AdamUpdate(*without, 0.5, 0.7, 1.3, 1e-8, 5.0, 0.25, beta2).advance(g, None)
        assert all(map(torch.equal, (old[0], residual + update, *without), (g, kept, m, v)))
        wide, old_m, old_v = (t.to(torch.float64) for t in old)
        momentum = 0.5 * old_m + 0.5 * 0.7 * wide
        near = {"rtol": 2e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
        expected = 0.25 * (momentum / (1.3 * old_v.sqrt() + 1e-8)).clamp(-5.0, 5.0)
        assert numel < 10_000 or expected.abs().max() == 1.25, "nothing was cut"
        torch.testing.assert_close(update.double(), expected, **near)
        torch.testing.assert_close(m.double(), momentum, **near)
        followed = 0.9 * old_v + 0.1 * (0.7 * wide).square() if beta2 < 1 else old_v
        torch.testing.assert_close(v.double(), followed, **near)


def test_momentum_by_its_formula() -> None:
    numel = 600_000  # several blocks, with parameters across their borders
    cuts = [0, 1, 1000, 300_000, numel - 5]  # the last five are no parameter's
    for dtype, gradient_dtype, nesterov, momentum, decay, factor, rate in pairwise(
        MOMENTS, GRADIENTS, (False, True), (0.0, 0.5), (0.0, 0.1), (1.0, 0.7), (1.0, 2.0)
    ):
        given, m, _ = made(numel, dtype)
        g, residual, weights = given.to(gradient_dtype), torch.randn(numel, dtype=dtype), torch.randn(numel)
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
    """Cut to the limit, an Inf would be a step like any other."""
    g = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 1e15, -1e15, 1e30, -1e30])
    update = torch.empty(8)
    with kernels.force(backend):
        AdamUpdate(torch.zeros(8), torch.ones(8), 0.5, 1.0, 1.3, 1e-8, 10.0, 1.0).write(g, update)
    assert update[3].isnan()
    assert [*update[1:3].tolist(), *update[4:].tolist()] == [torch.inf, -torch.inf, 10.0, -10.0, torch.inf, -torch.inf]
