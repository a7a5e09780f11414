"""lr, momentum and betas mean what they mean in torch, also for what is compressed, and when they change meanwhile."""

from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from support.group import run_group
from support.oracle import same_bits
from support.training import Given, average, average_residuals, gradients, take
from thinwire.collectives import LocalWorld

EVERYTHING = "topk:ratio=1,bits=32"
SPARSE = "topk:ratio=1/16,bits=4,chunk=512"
SIZES = (5000, 8192)
"""None of them is small."""
RATES = (0.5, 0.5, 0.05, 1.0, 0.2, 0.2)
"""A learning rate for each step."""


def take_averaged(optimizer: torch.optim.Optimizer, model: Given, given: list[Tensor], group: Any = None) -> None:
    """A step of torch's optimizer by the average over ranks."""
    for weight, part in zip(model.weights, given, strict=True):
        weight.grad = average(part, group=group).to(weight.dtype)
    optimizer.step()


def follow(
    rank: int, world_size: int, kind: str, rates: Any, options: dict[str, Any], ours: dict[str, Any], group: Any = None
) -> None:
    """With everything sent it is torch's optimizer; AdamW's with a constant gradient, decay by the current lr too."""
    mine_model, model = Given(SIZES), Given(SIZES)
    for weight in (*mine_model.weights, *model.weights):
        weight.data.fill_(1.0)
    mine = getattr(thinwire, kind)(mine_model, compressor=EVERYTHING, **options, **ours, group=group)
    reference = getattr(torch.optim, kind)(model.parameters(), **options)
    for step, lr in enumerate(rates):
        for options_of in (*mine.param_groups, *reference.param_groups):
            options_of["lr"] = lr
        given = nearly_alike(model, rank) if kind == "AdamW" else gradients(model, rank, step)
        take(mine, mine_model(given))
        take_averaged(reference, model, given, group=group)
        for one, other in zip(mine_model.weights, model.weights, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-4, atol=1e-4, msg=lambda text, step=step: f"step {step}: {text}"
            )


def test_sgd_with_everything_sent_is_torchs_step_for_step() -> None:
    for nesterov in (False, True):
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
        run_group(follow, 2, "SGD", [0.1] * 12, options, {"compressed_momentum": 0.9})


def test_adamw_follows_an_lr_that_changes() -> None:
    options = {"lr": RATES[0], "betas": (0.9, 0.99), "weight_decay": 0.5}
    run_group(follow, 2, "AdamW", RATES, options, {"compressed_betas": (0.9, 0.99), "warmup": "none"})


def keep_rates(rank: int, world_size: int, kind: str, group: Any = None) -> float:
    """What was not sent keeps the learning rate of its step; how much of all that is.

    A constant gradient makes updates of AdamW of its sign.
    """
    model = Given(SIZES)
    options = {"weight_decay": 0.0, "warmup": "none"} if kind == "AdamW" else {}
    optimizer = getattr(thinwire, kind)(model, RATES[0], compressor=SPARSE, group=group, **options)
    expected = [torch.zeros(weight.numel(), dtype=torch.float64) for weight in model.weights]
    for step, lr in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = lr
        given = nearly_alike(model, rank) if kind == "AdamW" else gradients(model, rank, step)
        take(optimizer, model(given))
        for total, part in zip(expected, given, strict=True):
            total -= lr * (part.sign().double() if kind == "AdamW" else average(part, group=group))
    residuals, left = average_residuals(optimizer.sync, group=group), 0.0
    close = 1e-3 if kind == "AdamW" else 1e-4
    for number, (weight, total) in enumerate(zip(model.weights, expected, strict=True)):
        kept = RATES[0] * residuals[f"weights.{number}"]
        torch.testing.assert_close(weight.detach().double() - kept, total, rtol=close, atol=close)
        left = max(left, float(kept.norm() / total.norm()))
    return left


def test_residuals_keep_the_lr_of_their_step() -> None:
    for kind, least in (("SGD", 0.5), ("AdamW", 0.3)):
        for left in run_group(keep_rates, 2, kind):
            assert left > least, f"residuals of {kind} are too small for this to show anything"


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
        take(mine, ours(given))
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


def test_every_group_has_the_compressed_momentum_of_its_own_momentum() -> None:
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    groups = [{"params": one.parameters(), "momentum": 0.9}, {"params": other.parameters()}]
    made = thinwire.SGD(groups, lr=0.1, momentum=0.3, group=LocalWorld(2).groups[0])
    assert [each["compressed_momentum"] for each in made.param_groups] == [0.5, 0.3]
