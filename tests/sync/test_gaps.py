"""Small parameters lie as gaps between large ones in a bucket; they must leave those alone."""

import torch
from torch import Tensor

import thinwire
from support.training import Given
from thinwire.collectives import LocalGroup
from thinwire.testing import run_threads

SIZES = (4096, 100, 4096)
POLICY = thinwire.Policy("topk:ratio=1/16,bits=32,chunk=512", min_numel=1000)


def gradients(rank: int, step: int, factor: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    large, small, other = (torch.randn(size, generator=generator) for size in SIZES)
    return [large, factor * small, other]


def train(group: LocalGroup, kind: str, factor: float) -> tuple[Tensor, Tensor]:
    """What the two large parameters become, if the gradients of the small one are so many times as large."""
    model = Given(SIZES)
    if kind == "synchronizer":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = thinwire.Synchronizer(POLICY, group=group)
    else:
        options = {"warmup_steps": 1} if kind == "AdamW" else {}
        optimizer = getattr(thinwire, kind)(model, lr=0.1, compressor=POLICY, group=group, **options)
    for step in range(6):
        optimizer.zero_grad()
        model(gradients(group.rank, step, factor)).backward()
        if kind == "synchronizer":
            sync.all_reduce_gradients(model)
        optimizer.step()
    return model.weights[0].detach(), model.weights[2].detach()


def test_gaps_take_nothing_from_their_neighbours() -> None:
    """Large gradients in a gap would be among the largest of their chunk, and be sent instead of others."""
    for kind in ("synchronizer", "SGD", "AdamW"):
        ordinary, large = (run_threads(train, 2, kind, factor)[0] for factor in (1.0, 1000.0))
        for one, other in zip(ordinary, large, strict=True):
            assert torch.equal(one, other), kind
