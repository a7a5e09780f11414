"""GradScaler: residuals follow the scale, and a skipped step has changed nothing."""

from typing import Any

import pytest
import torch

import thinwire
from support.optimizers import make, make_scaler, wrapped
from support.training import (
    SEVERAL,
    TOPK,
    Given,
    assert_same,
    attached,
    gradients,
    optimizer_bits,
    plain_module,
    policy,
    raises,
    residuals,
    sync_bits,
    weight_bits,
)
from thinwire import Collective
from thinwire.testing import RankPool


def under_a_scaler(rank: int, world_size: int, kind: str, ddp: bool, algorithm: str) -> None:
    """With a changed scale and a NaN on one rank, twice, for an optimizer in the warm-up and after it: as without one.

    Scales are powers of two, so gradients ("attach") are those without them to the last bit.
    """
    ends = []
    for scaled in (True, False):
        scaler, model = make_scaler(enabled=scaled), Given()
        options: dict[str, Any] = {"collective": Collective(algorithm=algorithm), "grad_scaler": scaler}
        if kind == "attach":
            called, sync, finish = attached(model, policy(TOPK), ddp, SEVERAL, **options)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        else:
            called = wrapped(model, ddp)
            optimizer = make(kind, called, warmup_steps=4, max_grad_norm=50.0, **options)
            sync, finish = optimizer.sync, (lambda: None) if ddp else optimizer.exchange
        for step in range(9):
            if scaled and step in (1, 6):
                scaler.update(2.0**step * 256)
            is_bad = scaled and step in (3, 7)
            for seed in (77, step) if is_bad else (step,):
                given = gradients(model, rank, seed)
                if seed == 77:
                    given[step % 4][3] = 1.0 if rank == 0 else torch.nan if step == 3 else torch.inf
                before, scale = bits(model, sync, optimizer), scaler.get_scale()
                optimizer.zero_grad()
                scaler.scale(called(given)).backward()
                finish()
                scaler.step(optimizer)
                scaler.update()
                if seed == 77:
                    assert_same(before, bits(model, sync, optimizer), f"step {step}")
                    assert scaler.get_scale() == scale / 2
        assert sync.steps == 9
        assert kind == "attach" or optimizer.skipped == (2 if scaled else 0)
        scale = scaler.get_scale() if scaled else 1.0
        ends.append((model, {name: kept / scale for name, kept in residuals(sync).items()}))
    (one, kept), (other, kept_by_other) = ends
    if kind == "attach":
        assert_same(weight_bits(one), weight_bits(other), "weights")
        for name, residual in kept.items():
            assert torch.equal(residual, kept_by_other[name]), name
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def bits(model: Given, sync: thinwire.Synchronizer, optimizer: Any) -> dict[str, bytes]:
    is_ours = hasattr(optimizer, "sync")
    return optimizer_bits(optimizer) if is_ours else weight_bits(model) | sync_bits(sync)


@pytest.mark.parametrize(
    ("kind", "ddp", "algorithm"),
    [("attach", True, "sharded"), ("attach", False, "gather"), ("AdamW", True, "auto"), ("SGD", False, "auto")],
)
def test_residuals_follow_the_scale(ranks: RankPool, kind: str, ddp: bool, algorithm: str) -> None:
    ranks.run(under_a_scaler, 2, kind, ddp, algorithm)


def misuse(rank: int, world_size: int) -> None:
    scaler, model = make_scaler(), wrapped(Given(), True)
    optimizer = make("SGD", model, grad_scaler=None)
    scaler.scale(model(gradients(plain_module(model), rank, 0))).backward()
    before = weight_bits(model)
    with raises(ValueError, "grad_scaler=scaler"):
        scaler.step(optimizer)
    assert_same(before, weight_bits(model), "weights")

    scaler = make_scaler()
    plain_model = Given()
    optimizer = make("SGD", plain_model, grad_scaler=scaler)
    scaler.scale(plain_model(gradients(plain_model, rank, 0))).backward()
    scaler.step(optimizer)  # which exchanges, if exchange() was not called before
    assert optimizer.sync.steps == 1


def test_misuse_is_an_error(ranks: RankPool) -> None:
    ranks.run(misuse, 2)


def small_gradients(rank: int, world_size: int) -> float:
    """float16 parameters: what a scaler lifts over the smallest float16 must not sink again on its way."""
    model, scaler = Given((4096,), torch.float16), make_scaler(2.0**16)
    optimizer = make(
        "SGD", model, policy("topk:ratio=1,bits=32"), grad_scaler=scaler, lr=1e4, momentum=0.9, compressed_momentum=0.9,
        weight_decay=0.0, warmup_steps=0,
    )  # fmt: skip
    factor = 2.0**16 * 1e-8  # scaled by hand: the model's own product would sink
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(torch.ones(()))  # so that the scaler knows its device
        model.weights[0].grad = torch.full((4096,), (0.5 + rank) * factor, dtype=torch.float16)
        optimizer.exchange()
        scaler.step(optimizer)
        scaler.update()
    return float(model.weights[0].detach().float().abs().mean())


def test_float16_updates_do_not_sink(ranks: RankPool) -> None:
    for moved in ranks.run(small_gradients, 2):
        assert moved == pytest.approx(1e-4 * (1 + 1.9 + 2.71), rel=0.02)


def scale_of_a_checkpoint(rank: int, world_size: int) -> None:
    """Saved with a scale and resumed with another, or none: the residuals are the same."""

    def make_sync(scale: float) -> thinwire.Synchronizer:
        return thinwire.Synchronizer(policy(TOPK), grad_scaler=make_scaler(scale) if scale > 1 else None)

    def step(sync: thinwire.Synchronizer, number: int, scale: float) -> dict[str, bytes]:
        model = Given()
        for weight, given in zip(model.weights, gradients(model, rank, number), strict=True):
            weight.grad = given * scale
        sync.all_reduce_gradients(model)
        return {name: (p.grad / scale).numpy().tobytes() for name, p in model.named_parameters()}

    scales = (1024.0, 16.0, 1.0)
    for saved in scales:
        sync = make_sync(saved)
        step(sync, 0, saved)
        state = sync.state_dict()
        state["residuals"] = {name: tensor.clone() for name, tensor in state["residuals"].items()}
        expected = step(sync, 1, saved)
        for here in scales:
            resumed = make_sync(here)
            resumed.load_state_dict(state)
            assert_same(expected, step(resumed, 1, here), f"saved with {saved}, resumed with {here}: gradients")


def test_a_checkpoint_of_another_scale(ranks: RankPool) -> None:
    ranks.run(scale_of_a_checkpoint, 2)
