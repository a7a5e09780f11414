"""fp16 and PowerSGD between threads: what torch's own hooks do between processes, from the same weights and data."""

import pytest
import torch
from torch import Tensor, nn

from thinwire.collectives.local import LocalGroup, LocalWorld
from thinwire.testing import RankPool
from thinwire.tools.bench.methods import parse
from thinwire.tools.bench.powersgd import PowerSGD
from thinwire.tools.bench.training import Setup, build

STEPS, DENSE_STEPS, WORLD_SIZE = 12, 3, 2
FP16 = "sgd fp16 hook"
METHODS = (FP16, "sgd powersgd rank 1", "sgd powersgd rank 4")
ROUNDING = dict.fromkeys(METHODS, (1e-3, 1e-5)) | {FP16: (4e-3, 1e-4)}
"""Of each gradient, and of the largest. fp16: a number of 11 bits may be rounded the other way, by up to 1e-3 of it:
torch rounds after each addition, threads once."""
Run = tuple[list[Tensor], list[Tensor], float]


def make_net() -> nn.Module:
    """A convolution, matrices of which some have the same shape, biases, and a matrix too small for rank 4."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Flatten(),
        nn.Linear(576, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            fan_in = parameter[0].numel()
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)
    return net


def train(rank: int, world_size: int, method: str, group: LocalGroup | None = None) -> Run:
    """Return the gradients that the optimizer had in each step, the weights at the end, and the bytes sent."""
    net = make_net()
    training = build(parse(method), Setup(net, lr=0.1, warmup_steps=DENSE_STEPS, group=group))
    gradients = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(8, 3, 8, 8, generator=generator)
        training.optimizer.zero_grad()
        loss = (training.module(inputs) - inputs.mean(dim=(2, 3)).sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        training.after_backward()
        gradients.append(torch.cat([one.grad.flatten() for one in net.parameters() if one.grad is not None]))
        training.optimizer.step()
    return gradients, [parameter.detach() for parameter in net.parameters()], training.bytes_sent(STEPS)


def train_thread(group: LocalGroup, method: str) -> Run:
    return train(group.rank, group.size, method, group)


@pytest.mark.parametrize("method", METHODS)
def test_threads_do_what_torchs_hook_does(ranks: RankPool, method: str) -> None:
    theirs = ranks.run(train, WORLD_SIZE, method)
    ours = LocalWorld(WORLD_SIZE).run(train_thread, method)
    for rank in range(WORLD_SIZE):
        gradients, weights, nbytes = ours[rank]
        expected_gradients, expected_weights, expected_bytes = theirs[rank]
        assert nbytes == expected_bytes
        for step, (gradient, expected) in enumerate(zip(gradients, expected_gradients, strict=True)):
            torch.testing.assert_close(
                gradient,
                expected,
                rtol=ROUNDING[method][0],
                atol=ROUNDING[method][1] * float(expected.abs().max()),
                msg=lambda m, s=step: f"{s}: {m}",
            )
        torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=ROUNDING[method][1] / 5)
        assert all(map(torch.equal, gradients, ours[0][0])), "ranks differ"
    if method != FP16:  # the approximation differs from the mean, so what agrees is not the dense part alone
        approximated, rounded = (run[0][0][DENSE_STEPS] for run in (ours, LocalWorld(2).run(train_thread, FP16)))
        assert (approximated - rounded).norm() > 0.01 * rounded.norm()


def with_gradients(*gradients: Tensor) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


def alone(parameters: list[nn.Parameter], rank: int, dense_steps: int = 0) -> PowerSGD:
    """Of a world of one rank."""
    return PowerSGD(parameters, lambda flat: None, rank=rank, dense_steps=dense_steps)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_gradient_of_zeros_stays_zero_and_later_ones_arrive(rank: int) -> None:
    generator = torch.Generator().manual_seed(2)
    # Of rank 1, so that any rank can hold it.
    gradient = torch.randn(40, 1, generator=generator) @ torch.randn(1, 30, generator=generator)
    parameters = with_gradients(torch.zeros(40, 30), gradient, torch.zeros(7))
    method = alone(parameters, rank)
    for _ in range(3):
        method.all_reduce_gradients()
        assert not parameters[0].grad.any()
        torch.testing.assert_close(parameters[1].grad, gradient)
    parameters[0].grad.copy_(gradient)
    method.all_reduce_gradients()
    parameters[0].grad.zero_()
    method.all_reduce_gradients()
    parameters[0].grad.copy_(gradient)
    method.all_reduce_gradients()
    torch.testing.assert_close(parameters[0].grad, gradient)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_what_was_sent_and_what_was_kept_is_what_came_in(rank: int) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(40, 30), (30, 40), (40, 30), (64, 3, 5, 5)]
    parameters = with_gradients(*(torch.zeros(shape) for shape in shapes))
    method = alone(parameters, rank)
    came, sent = ([torch.zeros(shape) for shape in shapes] for _ in range(2))
    for _ in range(20):
        for one, total in zip(parameters, came, strict=True):
            one.grad.copy_(torch.randn(one.shape, generator=generator))
            total += one.grad
        method.all_reduce_gradients()
        for one, total in zip(parameters, sent, strict=True):
            assert torch.linalg.matrix_rank(one.grad.flatten(1), rtol=1e-4) == rank
            total += one.grad
    kept = {id(one): error for batch in method._batches for one, error in zip(batch.parameters, batch.m, strict=True)}
    for one, given, gone in zip(parameters, came, sent, strict=True):
        torch.testing.assert_close(gone + kept[id(one)].view_as(one), given, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "rank", "sent"),
    [
        ((100,), 1, 100),
        ((4, 4), 1, 16),  # 8 are not less than half of 16
        ((4, 5), 1, 9),
        ((10, 10), 4, 100),
        ((17, 17), 4, 4 * 34),
        ((16, 3, 3, 3), 1, 16 + 27),
    ],
)
def test_elements_sent(shape: tuple[int, ...], rank: int, sent: int) -> None:
    parameters = with_gradients(torch.randn(shape, generator=torch.Generator().manual_seed(4)))
    method = alone(parameters, rank, dense_steps=2)
    for _ in range(5):
        method.all_reduce_gradients()
    assert method.numel_sent == 2 * parameters[0].numel() + 3 * sent
