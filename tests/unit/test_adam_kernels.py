"""The arithmetic of `thinwire.AdamW`: the compiled kernels are the reference, and the reference is Adam."""

import pytest
import torch

from thinwire import kernels

SIZES = [0, 1, 1000, 300_001]
NUMBERS = {"beta1": 0.5, "scale": 1.3, "floor": 1e-8, "rate": 0.25}


def made(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    g, m, v = (torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(3))
    return [g.to(dtype), m.to(dtype), v.square().to(dtype)]


def both(numel: int, dtype: torch.dtype, beta2: float) -> list[list[torch.Tensor]]:
    """(update, momentum, second moment) of each backend."""
    results = []
    for backend in ("cpu", "reference"):
        g, m, v = made(numel, dtype)
        with kernels.force(backend):
            kernel = kernels.adam(g.device)
            assert backend in str(getattr(kernel, "__name__", kernel)), "another backend ran"
            kernel.send(g, m, v, factor=0.7, limit=5.0, **NUMBERS)
            sent = g.clone()
            kernel.commit(g, m, v, beta2=beta2, **NUMBERS)
        results.append([sent, m, v])
    return results


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta2", [0.9, 1.0], ids=["followed", "frozen"])
def test_backends_agree(numel: int, dtype: torch.dtype, beta2: float) -> None:
    for mine, theirs in zip(*both(numel, dtype, beta2), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)


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


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_backward_pass_through_weights_that_have_changed_is_refused(backend: str) -> None:
    weight = torch.ones(100, requires_grad=True)
    loss = weight.square().sum()
    loss.backward(retain_graph=True)
    with kernels.force(backend), torch.no_grad():
        kernels.adam(weight.device).step([weight], [torch.ones(100)], 1.0, [0.1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_commit_finds_momentum_and_gradient_again(backend: str) -> None:
    """What was worked out from the update is what went into it."""
    g, m, v = made(10_000, torch.float64)
    gradient, old_m, old_v = g.clone(), m.clone(), v.clone()
    with kernels.force(backend):
        kernel = kernels.adam(g.device)
        kernel.send(g, m, v, factor=1.0, limit=1e9, **NUMBERS)
        assert torch.equal(m, old_m), "sending must change nothing but the gradient"
        assert torch.equal(v, old_v), "sending must change nothing but the gradient"
        kernel.commit(g, m, v, beta2=0.9, **NUMBERS)
    torch.testing.assert_close(m, 0.5 * old_m + 0.5 * gradient, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(v, 0.9 * old_v + 0.1 * gradient.square(), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_is_not_finite_stays_so(backend: str) -> None:
    """Cut to the limit, an Inf would be a step like any other."""
    g = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 1e15, -1e15, 1e30, -1e30])
    m, v = torch.zeros(8), torch.ones(8)
    with kernels.force(backend):
        kernels.adam(g.device).send(g, m, v, factor=1.0, limit=10.0, **{**NUMBERS, "rate": 1.0})
    assert g[1] == torch.inf
    assert g[2] == -torch.inf
    assert g[3].isnan()
    assert g[4:].tolist() == [10.0, -10.0, torch.inf, -torch.inf]
