"""Updates by their formulas: both optimizers simulated in float64, with the gradients of all ranks in one place; and
what lr, momentum and betas mean for what is sent later, or dense.

For the formulas everything is sent, so that weights depend on them alone: Adam with bias corrections (Kingma and Ba
2015), decoupled weight decay (Loshchilov and Hutter 2019), c of `second_moment.py`, and momentum as in torch.
"""

from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from support.oracle import same_bits
from support.training import Given, average, average_residuals, gradients, take
from thinwire.collectives import LocalGroup, LocalWorld
from thinwire.testing import run_threads

SIZES = (200, 250)
"""So few that c is measured from all elements."""
EVERYTHING = thinwire.Policy("topk:ratio=1,bits=32", min_numel=0)
WARMUP, RANKS, DECAY = 3, 2, 0.1
RATES = (0.01, 0.01, 0.02, 0.005, 0.04, 0.01)
"""A learning rate for each step."""


def given(model: Given, rank: int, step: int) -> list[Tensor]:
    """Noise of each rank's own, with a spike after the warm-up that a rank's update is cut for."""
    made = gradients(model, rank, step)
    if rank == 1 and step == WARMUP:
        made[0][:5] = 1e4
    return made


def train(group: LocalGroup, kind: str, options: dict[str, Any]) -> list[Tensor]:
    """The weights after all steps."""
    model = Given(SIZES)
    for weight in model.weights:
        weight.data.fill_(1.0)
    optimizer = getattr(thinwire, kind)(
        model, lr=RATES[0], weight_decay=DECAY, compressor=EVERYTHING, warmup_steps=WARMUP, warmup="none", group=group,
        **options,
    )  # fmt: skip
    for step, lr in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = lr
        take(optimizer, model(given(model, group.rank, step)))
    return [weight.detach().double() for weight in model.weights]


def of_tensor(number: int) -> list[list[Tensor]]:
    """The gradients of one tensor, by step and rank."""
    model = Given(SIZES)
    return [[given(model, rank, step)[number].double() for rank in range(RANKS)] for step in range(len(RATES))]


def adamw(number: int, betas: tuple[float, float], compressed: tuple[float, float], eps: float) -> tuple[Tensor, bool]:
    """The weights of one tensor in the end, and whether an update was cut."""
    p, m, v = torch.ones(SIZES[number]).double(), torch.zeros(()).double(), torch.zeros(()).double()
    first = second = 0.0  # sums of the weights of gradients and of their squares
    steps, was_cut = of_tensor(number), False
    for lr, ranks in zip(RATES[:WARMUP], steps, strict=False):
        mean = torch.stack(ranks).mean(dim=0)
        first, second = betas[0] * first + 1 - betas[0], betas[1] * second + 1 - betas[1]
        m, v = betas[0] * m + (1 - betas[0]) * mean, betas[1] * v + (1 - betas[1]) * mean.square()
        p = p * (1 - lr * DECAY) - lr * (m / first) / ((v / second).sqrt() + eps)
    last = torch.stack(steps[WARMUP - 1])
    c = min(1.0, max(1 / RANKS, float(last.mean(dim=0).square().mean() / last.square().mean())))
    v = v.clamp(min=1e-4 * float(v.mean())) / c
    moments = [(m, v)] * RANKS
    beta1, beta2 = compressed
    limit = RANKS * max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)
    for lr, ranks in zip(RATES[WARMUP:], steps[WARMUP:], strict=True):
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
        p = p * (1 - lr * DECAY) - lr / c**0.5 * torch.stack(updates).mean(dim=0)
    return p, was_cut


def test_adamw() -> None:
    betas, compressed = (0.9, 0.99), (0.5, 0.95)
    for eps in (1e-8, 0.3):
        options = {"betas": betas, "compressed_betas": compressed, "eps": eps}
        for found in run_threads(train, RANKS, "AdamW", options):
            for number, weight in enumerate(found):
                expected, was_cut = adamw(number, betas, compressed, eps)
                assert was_cut or number, "the spike must be cut"
                torch.testing.assert_close(weight, expected, rtol=2e-5, atol=2e-5)


def sgd(number: int, momentum: float, compressed: float, nesterov: bool) -> Tensor:
    """The weights of one tensor in the end."""
    p, b = torch.ones(SIZES[number]).double(), torch.zeros(()).double()
    steps, ratio = of_tensor(number), (1 - compressed) / (1 - momentum)
    for lr, ranks in zip(RATES[:WARMUP], steps, strict=False):
        d = torch.stack(ranks).mean(dim=0) + DECAY * p
        b = momentum * b + d
        p = p - lr * (d + momentum * b if nesterov else b)
    buffers = [b / ratio] * RANKS
    for lr, ranks in zip(RATES[WARMUP:], steps[WARMUP:], strict=True):
        updates = []
        for rank, gradient in enumerate(ranks):
            d = gradient + DECAY * p
            buffers[rank] = compressed * buffers[rank] + d
            updates.append(ratio * (d + compressed * buffers[rank] if nesterov else buffers[rank]))
        p = p - lr * torch.stack(updates).mean(dim=0)
    return p


def test_sgd() -> None:
    for nesterov, compressed in ((False, 0.5), (True, 0.5), (True, 0.9)):
        options = {"momentum": 0.9, "compressed_momentum": compressed, "nesterov": nesterov}
        for found in run_threads(train, RANKS, "SGD", options):
            for number, weight in enumerate(found):
                torch.testing.assert_close(weight, sgd(number, 0.9, compressed, nesterov), rtol=1e-5, atol=1e-4)
    momenta = [{"params": nn.Linear(8, 8).parameters(), **own} for own in ({"momentum": 0.9}, {})]
    made = thinwire.SGD(momenta, lr=0.1, momentum=0.3, group=LocalWorld(2).groups[0])
    assert [each["compressed_momentum"] for each in made.param_groups] == [0.5, 0.3], "of each group's own momentum"


LARGE = (5000, 8192)
"""None of them is small."""
SPARSE = "topk:ratio=1/16,bits=4,chunk=512"


def keep_rates(group: LocalGroup, kind: str) -> float:
    """What was not sent keeps the learning rate of its step; how much of all that is.

    A constant gradient makes updates of AdamW of its sign. No element of it is near 0, and it is not quite the same on
    all ranks, which would be warned of.
    """
    model, rates = Given(LARGE), (0.5, 0.5, 0.05, 1.0, 0.2, 0.2)
    options = {"weight_decay": 0.0, "warmup": "none"} if kind == "AdamW" else {}
    optimizer = getattr(thinwire, kind)(model, rates[0], compressor=SPARSE, group=group, **options)
    expected = [torch.zeros(weight.numel(), dtype=torch.float64) for weight in model.weights]
    for step, lr in enumerate(rates):
        optimizer.param_groups[0]["lr"] = lr
        given = gradients(model, group.rank, step)
        if kind == "AdamW":
            given = [(part.sign() + part) * (1 + 1e-5 * group.rank) for part in gradients(model, 0, 0)]
        take(optimizer, model(given))
        for total, part in zip(expected, given, strict=True):
            total -= lr * (part.sign().double() if kind == "AdamW" else average(part, group=group))
    residuals, left = average_residuals(optimizer.sync, group=group), 0.0
    close = 1e-3 if kind == "AdamW" else 1e-4
    for number, (weight, total) in enumerate(zip(model.weights, expected, strict=True)):
        kept = rates[0] * residuals[f"weights.{number}"]
        torch.testing.assert_close(weight.detach().double() - kept, total, rtol=close, atol=close)
        left = max(left, float(kept.norm() / total.norm()))
    return left


def test_residuals_keep_the_lr_of_their_step() -> None:
    for kind, least in (("SGD", 0.5), ("AdamW", 0.3)):
        for left in run_threads(keep_rates, 2, kind):
            assert left > least, f"residuals of {kind} are too small for this to show anything"


def exclude(group: LocalGroup, patterns: tuple[str, ...], compressor: str, warmup: str) -> None:
    """What is sent dense is torch's AdamW with the same betas, to the last bit."""
    ours, theirs = (Given((5000, 10, 8192, 300)) for _ in range(2))
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    policy = thinwire.Policy(compressor, exclude=patterns, small_compressor="none", warmup=[(2, warmup)])
    mine = thinwire.AdamW(ours, compressor=policy, **options, group=group)
    reference = torch.optim.AdamW(theirs.parameters(), **options)
    dense = range(0 if patterns == ("*",) or compressor == "none" else 1, 4)
    for step in range(20):
        given = gradients(ours, group.rank, step)
        take(mine, ours(given))
        for weight, part in zip(theirs.weights, given, strict=True):
            weight.grad = average(part, group=group).to(weight.dtype)
        reference.step()
        for number, (one, other) in enumerate(zip(ours.weights, theirs.weights, strict=True)):
            is_same = same_bits(one.detach(), other.detach())
            assert is_same if number in dense else step < 2 or not is_same, (step, number)


def test_what_is_sent_dense_has_torchs_betas() -> None:
    run_threads(exclude, 2, ("*",), SPARSE, "quantize:bits=8")
    run_threads(exclude, 2, ("*.2",), SPARSE, "none")
    run_threads(exclude, 2, (), "none", "none")
