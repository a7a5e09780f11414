"""lr, momentum and betas mean what they mean in torch, also for what is compressed, and when they change meanwhile."""

from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from support.group import run_group
from support.oracle import same_bits
from support.training import Given, average, average_residuals, gradients

EVERYTHING = "topk:ratio=1,bits=32"
SPARSE = "topk:ratio=1/16,bits=4,chunk=512"
SIZES = (5000, 8192)
"""None of them is small."""
RATES = (0.5, 0.5, 0.05, 1.0, 0.2, 0.2)
"""A learning rate for each step."""


def take(optimizer: Any, model: Given, given: list[Tensor]) -> None:
    optimizer.zero_grad()
    model(given).backward()
    optimizer.step()


def take_averaged(optimizer: torch.optim.Optimizer, model: Given, given: list[Tensor], group: Any = None) -> None:
    """A step of torch's optimizer by the average over ranks."""
    for weight, part in zip(model.weights, given, strict=True):
        weight.grad = average(part, group=group).to(weight.dtype)
    optimizer.step()


def assert_near(ours: Given, theirs: Given, step: int) -> None:
    for one, other in zip(ours.weights, theirs.weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=lambda text: f"step {step}: {text}")


# SGD.


def follow_sgd(rank: int, world_size: int, nesterov: bool, group: Any = None) -> None:
    ours, theirs = Given(SIZES), Given(SIZES)
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    mine = thinwire.SGD(ours, compressed_momentum=0.9, compressor=EVERYTHING, **options, group=group)
    reference = torch.optim.SGD(theirs.parameters(), **options)
    for step in range(12):
        given = gradients(ours, rank, step)
        take(mine, ours, given)
        take_averaged(reference, theirs, given, group=group)
        assert_near(ours, theirs, step)


def test_sgd_with_everything_sent_is_torchs_step_for_step() -> None:
    for nesterov in (False, True):
        run_group(follow_sgd, 2, nesterov)


def keep_rates(rank: int, world_size: int, group: Any = None) -> float:
    """What was not sent keeps the learning rate of its step; how much of all that is."""
    model = Given(SIZES)
    optimizer = thinwire.SGD(model, RATES[0], compressor=SPARSE, group=group)
    expected = [torch.zeros(weight.numel(), dtype=torch.float64) for weight in model.weights]
    for step, lr in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = lr
        given = gradients(model, rank, step)
        take(optimizer, model, given)
        for total, part in zip(expected, given, strict=True):
            total -= lr * average(part, group=group)
    residuals, left = average_residuals(optimizer.sync, group=group), 0.0
    for number, (weight, total) in enumerate(zip(model.weights, expected, strict=True)):
        kept = RATES[0] * residuals[f"weights.{number}"]
        torch.testing.assert_close(weight.detach().double() - kept, total, rtol=1e-4, atol=1e-4)
        left = max(left, float(kept.norm() / total.norm()))
    return left


def test_residuals_keep_the_lr_of_their_step() -> None:
    assert all(left > 0.5 for left in run_group(keep_rates, 2)), "residuals are too small for this to show anything"


# AdamW.

BETAS = (0.9, 0.95)


def exclude(
    rank: int, world_size: int, patterns: tuple[str, ...], compressor: str, warmup: str, group: Any = None
) -> None:
    """What is sent dense is torch's AdamW with the same betas, to the last bit."""
    sizes = (5000, 10, 8192, 300)
    ours, theirs = Given(sizes), Given(sizes)
    options: dict[str, Any] = {"lr": 0.01, "betas": BETAS, "weight_decay": 0.1}
    policy = thinwire.Policy(compressor, exclude=patterns, small_compressor="none", warmup=[(2, warmup)])
    mine = thinwire.AdamW(ours, compressor=policy, **options, group=group)
    reference = torch.optim.AdamW(theirs.parameters(), **options)
    dense = [number for number in range(4) if patterns == ("*",) or compressor == "none" or number != 0]
    for step in range(20):
        given = gradients(ours, rank, step)
        take(mine, ours, given)
        take_averaged(reference, theirs, given, group=group)
        for number in dense:
            assert same_bits(ours.weights[number].detach(), theirs.weights[number].detach()), (step, number)
    if len(dense) < 4:
        assert not torch.equal(ours.weights[0], theirs.weights[0]), "it is compressed"


def test_what_is_sent_dense_has_torchs_betas() -> None:
    for patterns, compressor, warmup in (
        (("*",), SPARSE, "quantize:bits=8"),
        (("*.2",), SPARSE, "none"),
        ((), "none", "none"),
    ):
        run_group(exclude, 2, patterns, compressor, warmup)


def nearly_alike(model: Given, rank: int) -> list[Tensor]:
    """No element is near 0. Gradients that are the same on all ranks would be warned of."""
    return [(part.sign() + part) * (1 + 1e-5 * rank) for part in gradients(model, 0, 0)]


def follow_adamw(rank: int, world_size: int, group: Any = None) -> None:
    """With a constant gradient, the same on all ranks, everything sent is torch's, decay by the current lr included."""
    ours, theirs = Given(SIZES), Given(SIZES)
    with torch.no_grad():
        for one, other in zip(ours.weights, theirs.weights, strict=True):
            one.fill_(1.0)
            other.fill_(1.0)
    options: dict[str, Any] = {"lr": RATES[0], "betas": (0.9, 0.99), "weight_decay": 0.5}
    mine = thinwire.AdamW(
        ours, compressed_betas=(0.9, 0.99), compressor=EVERYTHING, warmup="none", **options, group=group
    )
    reference = torch.optim.AdamW(theirs.parameters(), **options)
    given = nearly_alike(ours, rank)
    for step, lr in enumerate(RATES):
        for options_of in (*mine.param_groups, *reference.param_groups):
            options_of["lr"] = lr
        take(mine, ours, given)
        take_averaged(reference, theirs, given, group=group)
        assert_near(ours, theirs, step)


def test_adamw_follows_an_lr_that_changes() -> None:
    run_group(follow_adamw, 2)


def keep_rates_of_adamw(rank: int, world_size: int, group: Any = None) -> float:
    """A constant gradient makes updates of its sign, each of which counts with the learning rate of its step."""
    model = Given(SIZES)
    given = nearly_alike(model, rank)
    optimizer = thinwire.AdamW(model, RATES[0], weight_decay=0.0, compressor=SPARSE, warmup="none", group=group)
    for lr in RATES:
        optimizer.param_groups[0]["lr"] = lr
        take(optimizer, model, given)
    residuals, left = average_residuals(optimizer.sync, group=group), 0.0
    for number, (weight, part) in enumerate(zip(model.weights, given, strict=True)):
        kept = RATES[0] * residuals[f"weights.{number}"]
        total = -sum(RATES) * part.sign().double()
        torch.testing.assert_close(weight.detach().double() - kept, total, rtol=1e-3, atol=1e-3)
        left = max(left, float(kept.norm() / total.norm()))
    return left


def test_residuals_of_adamw_keep_the_lr_of_their_step() -> None:
    assert all(left > 0.3 for left in run_group(keep_rates_of_adamw, 2)), (
        "residuals are too small for this to show anything"
    )


def momenta(rank: int, world_size: int, group: Any = None) -> list[float]:
    """The momentum of what is compressed, for each group."""
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    groups = [{"params": one.parameters(), "momentum": 0.9}, {"params": other.parameters()}]
    return [
        group["compressed_momentum"] for group in thinwire.SGD(groups, lr=0.1, momentum=0.3, group=group).param_groups
    ]


def test_every_group_has_the_compressed_momentum_of_its_own_momentum() -> None:
    assert run_group(momenta, 2) == [[0.5, 0.3]] * 2
