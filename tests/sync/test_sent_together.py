"""Buckets that are sent together have the bits of one bucket, and fewer operations than buckets sent alone."""

from typing import Any

import pytest
import torch

import thinwire
from support.oracle import bytes_of
from support.training import Given
from thinwire import Collective
from thinwire.collectives import LocalGroup
from thinwire.optim import base
from thinwire.sync import buckets
from thinwire.testing import run_threads

SIZES = (5000, 100, 4096, 7000, 30, 9000, 300)
STEPS = 8


def train(group: LocalGroup, poisoned: int | None, options: dict[str, Any]) -> tuple[list[bytes], int, int]:
    """The bits of weights, residuals and moments; the operations of the last step; the steps that were skipped."""
    model = Given(SIZES)
    policy = thinwire.Policy("topk:ratio=1/16,bits=2,chunk=512", min_numel=1000, warmup=[(2, "none")])
    optimizer = thinwire.AdamW(model, lr=0.1, compressor=policy, group=group, refresh_every=4, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + group.rank)
        gradients = [torch.randn(size, generator=generator) for size in SIZES]
        if step == poisoned and group.rank == 1:
            gradients[3][17] = torch.nan
        model(gradients).backward()
        optimizer.step()
    every = optimizer._parameters.vectors.values()
    moments = [kept for vectors in every for _, kept in sorted(vectors.named().items())]
    residuals = [kept for _, kept in sorted(optimizer.sync.residuals.items())]
    bits = [bytes_of(tensor.detach()) for tensor in (*model.weights, *moments, *residuals)]
    return bits, len(optimizer.sync.last_step.reports), optimizer.skipped


@pytest.mark.parametrize(
    ("options", "poisoned"),
    [({"max_grad_norm": 0.5}, 5), ({"collective": Collective(algorithm="sharded")}, None)],
    ids=str,
)
def test_bits_are_those_of_one_bucket(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], poisoned: int | None
) -> None:
    whole = run_threads(train, 2, poisoned, options)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 20_000)
    monkeypatch.setitem(base.TOGETHER_BYTES, "cpu", 0)
    alone = run_threads(train, 2, poisoned, options)
    monkeypatch.setitem(base.TOGETHER_BYTES, "cpu", 1 << 20)
    together = run_threads(train, 2, poisoned, options)
    monkeypatch.setitem(base.TOGETHER_BYTES, "cpu", 40_000)
    assert alone[0][1] > run_threads(train, 2, poisoned, options)[0][1] > together[0][1]
    for mine, one_bucket, several in zip(together, whole, alone, strict=True):
        assert mine == one_bucket
        assert several[1] > mine[1]  # operations
        assert mine[2] == (poisoned is not None)
