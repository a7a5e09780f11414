"""Small tensors are sent together, in 8 bits with a residual: bytes as counted, nothing lost, exact on request."""

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.training import Given, average, gradients, make_net, residuals, take
from thinwire.collectives import cost
from thinwire.testing import RankPool

SIZES = (5000, 10, 4000, 8192, 5, 1300)
SMALL = 10 + 4000 + 5 + 1300
"""Two records, which are sharded between three ranks."""
TOPK = "topk:ratio=1/64,bits=2"


def bytes_of_a_step(rank: int, world_size: int, ddp: bool, small_compressor: str) -> tuple[int, int, int]:
    """(bytes of a step, those of the large tensors by formula, those of the small ones by formula)"""
    model: Any = Given(SIZES)
    called = DistributedDataParallel(model) if ddp else model
    optimizer = thinwire.SGD(
        called, lr=1e-3, compressor=thinwire.Policy(TOPK, small_compressor=small_compressor), algorithm="gather"
    )
    for step in range(4):
        take(optimizer, called(gradients(model, rank, step)))
    large, small = thinwire.compressor(TOPK), thinwire.compressor(small_compressor)
    # The last tensors come first, and small ones between two large ones are zeros in their slice.
    elements = sum(SIZES) - SIZES[-1] - SIZES[-2]
    large_bytes = cost.gather(large, elements, torch.float32, world_size).sent
    by = [cost.gather(small, SMALL, torch.float32, world_size).sent]
    if world_size > 2:
        by.append(cost.sharded(small, small, SMALL, torch.float32, world_size).sent)
    return optimizer.sync.stats.last_bytes_sent, round(large_bytes), round(min(by))


@pytest.mark.parametrize(("world_size", "ddp"), [(2, True), (3, False)])
def test_their_bytes_are_those_of_eight_bits(ranks: RankPool, world_size: int, ddp: bool) -> None:
    found = ranks.run(bytes_of_a_step, world_size, ddp, "quantize:bits=8")
    sent = sum(one for one, _, _ in found) / world_size
    assert sent == pytest.approx(found[0][1] + found[0][2], abs=1.0)
    assert found[0][2] < SMALL * 2 * (1 + world_size % 2), "about a byte for each element, there and, with three, back"


def test_their_bytes_are_those_of_float32_on_request(ranks: RankPool) -> None:
    for sent, large, small in ranks.run(bytes_of_a_step, 2, True, "none"):
        assert small == 4 * SMALL
        assert sent == large + small


def nothing_is_lost(rank: int, world_size: int) -> None:
    """Sent plus kept is what came in, of small tensors too; and what is sent is near enough to the gradient."""
    model = Given(SIZES)
    sync = thinwire.Synchronizer(thinwire.Policy(TOPK), algorithm="sharded")
    came_in = {f"weights.{number}": torch.zeros(size, dtype=torch.float64) for number, size in enumerate(SIZES)}
    sent = {name: torch.zeros_like(total) for name, total in came_in.items()}
    for step in range(6):
        model.zero_grad()
        given = gradients(model, rank, step)
        model(given).backward()
        sync.all_reduce_gradients(model.named_parameters())
        for (name, parameter), gradient in zip(model.named_parameters(), given, strict=True):
            came_in[name] += gradient.double()
            assert parameter.grad is not None
            sent[name] += parameter.grad.double()
            if parameter.numel() < 4096:
                mean = average(gradient)
                assert float((parameter.grad - mean).norm() / mean.norm()) < 0.03
    for name, residual in sorted(residuals(sync).items()):
        torch.testing.assert_close(sent[name] + average(residual), average(came_in[name]), rtol=1e-4, atol=1e-4)


def test_what_was_sent_and_kept_is_what_came_in(ranks: RankPool) -> None:
    ranks.run(nothing_is_lost, 3)


def follow_a_scale(rank: int, world_size: int) -> float:
    """The residual of a small tensor is in the unit of the scaled gradient, so it follows the scale."""
    model = make_net()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    optimizer = thinwire.AdamW(model, lr=1e-3, compressor=thinwire.Policy(TOPK, min_numel=2048), grad_scaler=scaler)
    norms = []
    for step in range(8):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        scaler.scale(model(torch.randn(8, 32, generator=generator)).square().mean()).backward()
        optimizer.exchange()
        scaler.step(optimizer)
        norms.append(float(optimizer.sync.residuals["0.bias"].norm()) / scaler.get_scale())
        scaler.update()
    assert scaler.get_scale() > 8.0
    return max(norms) / min(norms)


def test_their_residuals_follow_the_scale_of_the_loss(ranks: RankPool) -> None:
    assert all(spread < 30 for spread in ranks.run(follow_a_scale, 2))
