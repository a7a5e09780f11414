"""Between the exchange and `step` a gradient may not change: what was sent is the gradient as it was."""

from contextlib import nullcontext
from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from support.optimizers import make, make_scaler
from support.training import (
    SEVERAL,
    USED,
    VIEWS,
    Given,
    Heads,
    assert_same,
    gradients,
    identical,
    loss_of,
    make_net,
    no_sync,
    optimizer_bits,
    plain_module,
    raises,
    take,
    weight_bits,
)
from thinwire.testing import RankPool


class Order(NamedTuple):
    """In which order the calls of a step come."""

    ddp: dict[str, Any] | None = None
    """The options of DDP; None: a plain loop with exchange()."""
    parts: int = 1
    """Backward passes of a step."""
    scaled: bool = False
    set_to_none: bool = True

    @property
    def shares(self) -> bool:
        """Whether gradients are views of one tensor: then nobody knows which of them was changed."""
        return self.ddp is None or "gradient_as_bucket_view" in self.ddp


ORDERS = {
    "ddp": Order(SEVERAL),
    "ddp views": Order(VIEWS),
    "plain": Order(),
    "parts": Order(SEVERAL, parts=3),
    "parts views": Order(VIEWS, parts=2),
    "parts plain": Order(parts=2),
    "scaler": Order(SEVERAL, scaled=True),
    "scaler views": Order(VIEWS, scaled=True),
    "scaler plain": Order(scaled=True),
    "scaler parts": Order(SEVERAL, parts=2, scaled=True),
    "kept": Order(SEVERAL, set_to_none=False),
    "kept views": Order(VIEWS, set_to_none=False),
    "kept plain": Order(set_to_none=False),
    "static graph": Order({**SEVERAL, "static_graph": True}),
}


class Training:
    """A model, its optimizer and the calls of a step."""

    def __init__(self, rank: int, kind: str, order: Order, **options: Any) -> None:
        self.rank, self.order, module = rank, order, Given()
        self.model = module if order.ddp is None else DistributedDataParallel(module, **order.ddp)
        self.scaler = make_scaler() if order.scaled else None
        self.optimizer = make(kind, self.model, grad_scaler=self.scaler, **{"warmup_steps": 4, **options})

    @property
    def weights(self) -> nn.ParameterList:
        found: nn.ParameterList = plain_module(self.model).weights
        return found

    def backward(self, number: int) -> None:
        loss = self.model(gradients(plain_module(self.model), self.rank, number))
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def send(self, number: int) -> None:
        self.optimizer.zero_grad(self.order.set_to_none)
        for part in reversed(range(self.order.parts)):
            with no_sync(self.model) if part else nullcontext():
                self.backward(10 * number + part)
        if self.order.ddp is None:
            self.optimizer.exchange()

    def take(self, number: int) -> None:
        """Take a whole step. `grad` stays the gradient of this rank."""
        expected = [torch.zeros_like(weight) for weight in self.weights]
        for part in reversed(range(self.order.parts)):
            for total, given in zip(
                expected, gradients(plain_module(self.model), self.rank, 10 * number + part), strict=True
            ):
                total += given
        self.send(number)
        for act in (lambda: None, self.step):
            act()
            for weight, given in zip(self.weights, expected, strict=True):
                assert self.scaler or torch.equal(weight.grad, given), number

    def step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def clip(training: Training) -> None:
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)


def halve(training: Training) -> None:
    training.weights[3].grad.mul_(0.5)


def put_another(training: Training) -> None:
    training.weights[3].grad = training.weights[3].grad.clone()


def take_away(training: Training) -> None:
    training.weights[3].grad = None


def go_on(training: Training) -> None:
    with no_sync(training.model):
        training.backward(77)


CHANGES = {clip: "weights.0", halve: "weights.3", put_another: "weights.3", take_away: "weights.3", go_on: "weights.0"}
"""Ways to change gradients, and the first parameter whose gradient they change."""


def change(rank: int, world_size: int, kind: str, order: Order) -> dict[str, bytes]:
    """In the warm-up and after it: refused with everything as before, and the end is that of a run without it, in
    which nothing is refused."""
    ends = []
    for bad_steps in ((3, 6), ()):
        training = Training(rank, kind, order)
        for step in range(8):
            for act, name in CHANGES.items() if step in bad_steps else ():
                if act is go_on and "static_graph" in (order.ddp or ()):
                    continue
                before = optimizer_bits(training.optimizer)
                training.send(500 + step)
                act(training)
                known = not order.shares or act in (put_another, take_away)
                with raises(RuntimeError, f"'{name}'" if known else "or of one beside it in memory", "max_grad_norm="):
                    training.step()
                assert_same(before, optimizer_bits(training.optimizer), f"{act.__name__} at step {step}")
            training.take(step)
        assert (training.optimizer.sync.steps, training.optimizer.skipped) == (8, 0)
        ends.append(optimizer_bits(training.optimizer))
    assert_same(*ends, "the ends of the runs")
    return weight_bits(training.model)


@pytest.mark.parametrize(("kind", "name"), list(zip(cycle(("AdamW", "SGD")), ORDERS, strict=False)))
def test_a_gradient_that_changes_after_it_was_sent_is_refused(ranks: RankPool, kind: str, name: str) -> None:
    assert identical(ranks.run(change, 2, kind, ORDERS[name]))


def use_some(rank: int, world_size: int, used: str, kind: str, view: bool, set_to_none: bool) -> dict[str, bytes]:
    model = DistributedDataParallel(Heads(), **SEVERAL, find_unused_parameters=True, gradient_as_bucket_view=view)
    optimizer = make(kind, model, warmup_steps=3)
    for step in range(8):
        optimizer.zero_grad(set_to_none)
        given = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank))
        model(given, USED[used](rank, step) if step else "ab").backward()
        optimizer.step()
    assert (optimizer.sync.steps, optimizer.skipped) == (8, 0)
    return weight_bits(model)


@pytest.mark.parametrize(
    ("used", "kind", "view", "set_to_none"), [("one rank", "AdamW", False, True), ("all ranks", "SGD", True, False)]
)
def test_a_layer_that_is_not_used_is_no_false_alarm(
    ranks: RankPool, used: str, kind: str, view: bool, set_to_none: bool
) -> None:
    assert identical(ranks.run(use_some, 2, used, kind, view, set_to_none))


def unscale(rank: int, world_size: int, kind: str, order: Order) -> None:
    """Torch's recipe for clipping under a scaler: refused, again and again, and a step without it goes on."""
    ends = []
    for bad_steps in ((3, 5, 6), ()):
        training = Training(rank, kind, order)
        for step in range(8):
            for clips in (True, False) if step in bad_steps else ():
                before = optimizer_bits(training.optimizer)
                training.send(500 + step)
                training.scaler.unscale_(training.optimizer)
                if clips:
                    clip(training)
                with raises((ValueError, RuntimeError), "unscale_", "max_grad_norm"):
                    training.step()
                assert_same(before, optimizer_bits(training.optimizer), f"step {step}")
                training.optimizer.zero_grad()
                training.scaler.update()
            training.take(step)
            if step in bad_steps:  # what is refused for another reason must not hide the next unscale_
                training.send(600 + step)
                clip(training)
                with raises(RuntimeError, "max_grad_norm="):
                    training.step()
        assert training.optimizer.sync.steps == 8
        ends.append(optimizer_bits(training.optimizer))
    assert_same(*ends, "the ends of the runs")


@pytest.mark.parametrize(("kind", "name"), [("SGD", "scaler"), ("AdamW", "scaler plain")])
def test_unscale_is_refused(ranks: RankPool, kind: str, name: str) -> None:
    ranks.run(unscale, 2, kind, ORDERS[name])


def thaw_and_freeze(rank: int, world_size: int, kind: str, options: dict[str, Any]) -> dict[str, bytes]:
    """DDP does not know a parameter that was frozen when it was made: its gradients would differ from rank to rank. Of
    one that is frozen later it sends zeros, and momentum would move it."""
    module = make_net()
    module[2].requires_grad_(False)
    model = DistributedDataParallel(module, **options, find_unused_parameters=True)
    optimizer = make(kind, model, warmup_steps=4)
    words = {2: ("'2.weight'", "not exchanged"), 4: ("'4.", "frozen after DistributedDataParallel", "anew")}
    for step in range(8):
        for layer in (2, 2, 4, 4) if step in (2, 6) else ():
            before, is_trained = optimizer_bits(optimizer), layer == 4
            module[layer].requires_grad_(not is_trained)
            with raises(RuntimeError, *words[layer]):
                take(optimizer, loss_of(model, rank, 500 + step))
            module[layer].requires_grad_(is_trained)
            assert_same(before, optimizer_bits(optimizer), f"layer {layer} at step {step}")
        take(optimizer, loss_of(model, rank, step))
    assert optimizer.sync.steps == 8
    assert_same(weight_bits(module[2]), weight_bits(make_net()[2]), "frozen weights")
    return weight_bits(model)


@pytest.mark.parametrize(("kind", "options"), [("AdamW", SEVERAL), ("SGD", VIEWS)], ids=["copies", "views"])
def test_a_parameter_that_ddp_does_not_send_or_need_not_send_is_refused(
    ranks: RankPool, kind: str, options: dict[str, Any]
) -> None:
    assert identical(ranks.run(thaw_and_freeze, 2, kind, options))
