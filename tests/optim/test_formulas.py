"""Updates by their formulas: both optimizers simulated in float64, with the gradients of all ranks in one place.

Everything is sent, so that weights depend on the formulas alone: Adam with bias corrections (Kingma and Ba 2015),
decoupled weight decay (Loshchilov and Hutter 2019), c of `second_moment.py`, and momentum as in torch.
"""

from typing import Any

import torch
from torch import Tensor

import thinwire
from support.training import Given, gradients, take
from thinwire.collectives import LocalGroup
from thinwire.testing import run_threads

SIZES = (200, 250)
"""So few that c is measured from all elements."""
EVERYTHING = thinwire.Policy("topk:ratio=1,bits=32", min_numel=0)
WARMUP, STEPS, RANKS, LR, DECAY = 3, 6, 2, 0.01, 0.1


def given(model: Given, rank: int, step: int) -> list[Tensor]:
    """Noise of each rank's own, with a spike after the warm-up that a rank's update is cut for."""
    made = gradients(model, rank, step)
    if rank == 1 and step == WARMUP:
        made[0][:5] = 1e4
    return made


def train(group: LocalGroup, kind: str, options: dict[str, Any]) -> list[list[Tensor]]:
    """The weights after each step."""
    model = Given(SIZES)
    with torch.no_grad():
        for weight in model.weights:
            weight.fill_(1.0)
    optimizer = getattr(thinwire, kind)(
        model, lr=LR, weight_decay=DECAY, compressor=EVERYTHING, warmup_steps=WARMUP, warmup="none", group=group,
        **options,
    )  # fmt: skip
    found = []
    for step in range(STEPS):
        take(optimizer, model(given(model, group.rank, step)))
        found.append([weight.detach().double() for weight in model.weights])
    return found


def of_tensor(number: int) -> list[list[Tensor]]:
    """The gradients of one tensor, by step and rank."""
    model = Given(SIZES)
    return [[given(model, rank, step)[number].double() for rank in range(RANKS)] for step in range(STEPS)]


def adamw(number: int, betas: tuple[float, float], compressed: tuple[float, float], eps: float) -> tuple[Tensor, bool]:
    """The weights of one tensor in the end, and whether an update was cut."""
    p, m, v = torch.ones(SIZES[number]).double(), torch.zeros(()).double(), torch.zeros(()).double()
    first = second = 0.0  # sums of the weights of gradients and of their squares
    steps, was_cut = of_tensor(number), False
    for ranks in steps[:WARMUP]:
        mean = torch.stack(ranks).mean(dim=0)
        first, second = betas[0] * first + 1 - betas[0], betas[1] * second + 1 - betas[1]
        m, v = betas[0] * m + (1 - betas[0]) * mean, betas[1] * v + (1 - betas[1]) * mean.square()
        p = p * (1 - LR * DECAY) - LR * (m / first) / ((v / second).sqrt() + eps)
    last = torch.stack(steps[WARMUP - 1])
    c = min(1.0, max(1 / RANKS, float(last.mean(dim=0).square().mean() / last.square().mean())))
    v = v.clamp(min=1e-4 * float(v.mean())) / c
    moments = [(m, v)] * RANKS
    beta1, beta2 = compressed
    limit = RANKS * max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)
    for ranks in steps[WARMUP:]:
        first = beta1 * first + 1 - beta1
        updates = []
        for rank, gradient in enumerate(ranks):
            m, v = moments[rank]
            m = beta1 * m + (1 - beta1) * gradient
            update = (m / first) / ((v / second).sqrt() + eps)  # by the second moment of the step before
            was_cut |= bool((update.abs() > limit).any())
            updates.append(update.clamp(-limit, limit))
            moments[rank] = m, beta2 * v + (1 - beta2) * gradient.square()
        second = beta2 * second + 1 - beta2
        p = p * (1 - LR * DECAY) - LR / c**0.5 * torch.stack(updates).mean(dim=0)
    return p, was_cut


def test_adamw() -> None:
    betas, compressed = (0.9, 0.99), (0.5, 0.95)
    for eps in (1e-8, 0.3):
        options = {"betas": betas, "compressed_betas": compressed, "eps": eps}
        for found in run_threads(train, RANKS, "AdamW", options):
            for number, weight in enumerate(found[-1]):
                expected, was_cut = adamw(number, betas, compressed, eps)
                assert was_cut or number, "the spike must be cut"
                torch.testing.assert_close(weight, expected, rtol=2e-5, atol=2e-5)


def sgd(number: int, momentum: float, compressed: float, nesterov: bool) -> Tensor:
    """The weights of one tensor in the end."""
    p, b = torch.ones(SIZES[number]).double(), torch.zeros(()).double()
    steps, ratio = of_tensor(number), (1 - compressed) / (1 - momentum)
    for ranks in steps[:WARMUP]:
        d = torch.stack(ranks).mean(dim=0) + DECAY * p
        b = momentum * b + d
        p = p - LR * (d + momentum * b if nesterov else b)
    buffers = [b / ratio] * RANKS
    for ranks in steps[WARMUP:]:
        updates = []
        for rank, gradient in enumerate(ranks):
            d = gradient + DECAY * p
            buffers[rank] = compressed * buffers[rank] + d
            updates.append(ratio * (d + compressed * buffers[rank] if nesterov else buffers[rank]))
        p = p - LR * torch.stack(updates).mean(dim=0)
    return p


def test_sgd() -> None:
    for nesterov in (False, True):
        for found in run_threads(train, RANKS, "SGD", {"momentum": 0.9, "nesterov": nesterov}):
            for number, weight in enumerate(found[-1]):
                torch.testing.assert_close(weight, sgd(number, 0.9, 0.5, nesterov), rtol=1e-5, atol=1e-4)
