"""A new update rule needs nothing of thinwire but the interface: sign momentum, in 40 lines, and what it gets for them.

The sign of a momentum is sent (signSGD with momentum, Bernstein et al. 2018); error feedback keeps what is not among
the largest, so that every element has its turn.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.group import run_group
from support.training import (
    SEVERAL,
    Given,
    assert_same,
    gradients,
    identical,
    make_net,
    optimizer_bits,
    policy,
    raises,
    train,
    weight_bits,
)
from thinwire.collectives import LocalGroup
from thinwire.optim.adamw import AdamRule
from thinwire.optim.base import CompressedOptimizer
from thinwire.optim.rule import Piece, Rule, sent_rate
from thinwire.testing import RankPool

TOPK = policy("topk:ratio=1/8,bits=4,chunk=512", warmup=[(2, "quantize:bits=8")])


class SignUpdate(NamedTuple):
    m: Tensor
    momentum: float
    factor: float
    rate: float

    def made(self, gradient: Any) -> tuple[Tensor, Tensor]:
        m = self.momentum * self.m + self.factor * gradient.to(self.m.dtype)
        return m, self.rate * (m.sign() + (m - m))  # NaN where m is not finite

    def write(self, gradient: Any, out: Tensor) -> None:
        out.copy_(self.made(gradient)[1])

    def advance(self, gradient: Any, residual: Tensor | None) -> None:
        m, update = self.made(gradient)
        self.m.copy_(m)
        if residual is not None:
            residual.add_(update)


class SignRule(Rule):
    moments = local_moments = ("momentum_buffer",)

    def check(self, group: Any) -> None:
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"momentum {group['momentum']}, expected 0 to below 1")

    def numbers(self, family: Any, group: Any) -> dict[str, Any]:
        return {"momentum": group["momentum"], "rate": sent_rate(group)}

    def update(self, slice_: Any, moments: Any, factor: float, **numbers: Any) -> SignUpdate:
        return SignUpdate(moments[0], factor=factor, **numbers)

    def step_by_gradients(self, piece: Piece) -> None:
        for name, parameter, gradient in zip(piece.names, piece.parameters, piece.tensors, strict=True):
            (m,) = self.parameters.moments("momentum_buffer", [name])
            parameter.sub_(m.mul_(piece.group["momentum"]).add_(gradient).sign(), alpha=piece.lr)

    def step_by_updates(self, piece: Piece) -> None:
        torch._foreach_add_(piece.parameters, piece.tensors, alpha=-piece.group["reference_lr"])


class SignMomentum(CompressedOptimizer):
    def __init__(self, params: Any, lr: float = 2e-3, momentum: float = 0.9, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum}, SignRule(), TOPK, **options)


def train_ddp(rank: int, world_size: int) -> dict[str, bytes]:
    """Train, skip a step, save, and go on in the same way from what was saved."""
    model = DistributedDataParallel(make_net(), **SEVERAL)
    optimizer = SignMomentum(model)
    losses = train(model, optimizer, rank, 0, 60)
    assert losses[-1] < 0.5 * losses[0], losses
    assert optimizer.sync.stats.reduction > 8
    before = optimizer_bits(optimizer)
    loss = model(torch.full((4, 32), torch.nan if rank == 1 else 1.0)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert optimizer.skipped == 1
    assert_same(before, optimizer_bits(optimizer), "a skipped step")
    other = DistributedDataParallel(make_net(1), **SEVERAL)
    other.load_state_dict(model.state_dict())
    resumed = SignMomentum(other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its_optimizer in ((model, optimizer), (other, resumed)):
        train(each, its_optimizer, rank, 60, 66)
    assert_same(optimizer_bits(optimizer), optimizer_bits(resumed), "after a resume")
    with raises(ValueError, "torch has no optimizer", "SignMomentum"):
        optimizer.torch_state_dict()
    with raises(ValueError, "momentum 1.5, expected 0 to below 1"):
        SignMomentum(make_net(), momentum=1.5)
    return weight_bits(model)


def test_new_rule_trains_skips_and_resumes_on_two_ranks(ranks: RankPool) -> None:
    assert identical(ranks.run(train_ddp, 2))


# Two rules in one optimizer -------------------------------------------------------------------------------------------

SIZES = (3000, 700, 20, 4096, 900)
NUMBERS = {"lr": 2.0**-6, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "compressed_betas": (0.5, 0.99)}


class Both(CompressedOptimizer):
    """Sign momentum where a parameter group says so, and AdamW's rule for all others."""

    def __init__(self, params: Any, **options: Any) -> None:
        rules = {"adam": AdamRule(4, TOPK), "sign": SignRule()}
        super().__init__(params, {**NUMBERS, "momentum": 0.5}, rules, TOPK, **options)


def groups_of(model: Given, rule: str | None = None) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    first = {"params": named[:2], **({} if rule is None else {"rule": rule})}
    return [first, {"params": named[2:]}]


def run_both(rank: int, world_size: int, group: LocalGroup) -> None:
    models = [Given(SIZES) for _ in range(3)]
    options: dict[str, Any] = {"group": group, "max_grad_norm": 50.0}
    both = Both(groups_of(models[0], "sign"), **options)
    sign = SignMomentum(groups_of(models[1]), lr=NUMBERS["lr"], momentum=0.5, **options)
    adam = thinwire.AdamW(groups_of(models[2]), compressor=TOPK, refresh_every=4, **NUMBERS, **options)
    for step in range(10):
        for model, optimizer in zip(models, (both, sign, adam), strict=True):
            optimizer.zero_grad()
            model(gradients(model, rank, step)).backward()
            optimizer.step()
    found, of_sign, of_adam = (optimizer_bits(optimizer) for optimizer in (both, sign, adam))
    numbers = {key: int(key.split()[-1].removeprefix("weights.")) for key in found}
    expected = {key: (of_sign if number < 2 else of_adam)[key] for key, number in numbers.items()}
    assert len(expected) == 5 * 3 + 2 + 2 * 3, "weights, steps and residuals of all; m of two, m and v of three"
    assert_same(expected, found, "the parameters of each rule, as if all had it")
    resumed = Both(groups_of(models[0], "sign"), **options)
    resumed.load_state_dict(copy.deepcopy(both.state_dict()))
    assert_same(optimizer_bits(both), optimizer_bits(resumed), "after a resume")


def test_an_optimizer_has_a_rule_for_each_of_its_groups() -> None:
    run_group(run_both, 2)


def test_two_rules_with_the_same_moments_are_refused() -> None:
    rules = {"adam": AdamRule(4, TOPK), "sign": AdamRule(0, TOPK)}
    with raises(ValueError, "two rules keep exp_avg"):
        CompressedOptimizer(groups_of(Given(SIZES), "sign"), NUMBERS, rules, TOPK, ddp=None, max_grad_norm=None)
