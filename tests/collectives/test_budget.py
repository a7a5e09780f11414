"""A memory budget: work is cut into segments that fit it, with the same results, or it says how much it needs."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from benchmarks.clock import peak_memory
from support.group import run_group
from support.oracle import bytes_of, same_bits
from support.slow import slow
from support.training import SEVERAL, TOPK, Given, assert_same, attached, gradients, policy, raises, weight_bits
from thinwire.testing import RankPool

NUMEL = 300_001
BUDGET = 16 << 20
SLACK = 1 << 19
"""Stacks of threads, gloo's own buffers, small things that malloc holds."""
CASES = [
    (spec, algorithm, dtype)
    for spec, algorithm in (
        ("topk:ratio=1/64,bits=2", "gather"), ("topk:ratio=1/64,bits=2", "sharded"), ("quantize:bits=4", "gather"),
        ("quantize:bits=4", "sharded"), ("topk:ratio=1/64,bits=2", "dense"), ("none", "auto"),
    )
    for dtype in (torch.float32, torch.bfloat16)
]  # fmt: skip


class Outcome(NamedTuple):
    results: bytes
    residual: bytes
    owned: Tensor
    """What this rank keeps as an owner, at its place in the whole tensor: in segments it owns other elements."""
    report: Any


def perform(
    rank: int, spec: str, algorithm: str, dtype: torch.dtype, max_bytes: int | None, group: Any = None
) -> Outcome:
    residual, state, results = torch.zeros(NUMEL), thinwire.ShardState(), b""
    for step in range(2):
        tensor = torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * rank + step)).to(dtype)
        work = thinwire.all_reduce_compressed(
            tensor, spec, residual, algorithm=algorithm, state=state, max_bytes=max_bytes, group=group
        )
        results += bytes_of(tensor)
    owned, at = torch.zeros(NUMEL), 0
    for start, stop in state.spans:
        owned[start:stop] = state.residual[at : (at := at + stop - start)]  # type: ignore[index]
    return Outcome(results, bytes_of(residual), owned, work.report)


def in_segments(rank: int, world_size: int, cases: list[Any], group: Any = None) -> list[tuple[Outcome, Outcome]]:
    """Without a budget, and with a fifth of what one segment takes."""
    found = []
    for spec, algorithm, dtype in cases:
        whole = perform(rank, spec, algorithm, dtype, None, group=group)
        budget = 4 * whole.report.memory // 5
        parts = perform(rank, spec, algorithm, dtype, budget, group=group)
        assert parts.report.memory <= budget // 4
        found.append((whole, parts))
    return found


@pytest.mark.parametrize("world_size", [2, 3, slow(8)])
def test_segments_change_no_bit(world_size: int) -> None:
    cases = CASES if world_size == 3 else CASES[:5:2]
    found = run_group(in_segments, world_size, cases)
    for case, outcomes in zip(cases, zip(*found, strict=True), strict=True):
        for whole, parts in outcomes:
            assert whole.results == parts.results == outcomes[0][0].results, case
            assert whole.residual == parts.residual, case
            assert whole.report.segments == 1 < parts.report.segments == outcomes[0][1].report.segments, case
        bounds = 8 * world_size * (world_size - 1)  # each rank first sends the others its largest number, or NaN
        sent = [sum(outcome[index].report.bytes_sent for outcome in outcomes) for index in (0, 1)]
        assert sent[1] == sent[0] + bounds, case
        assert same_bits(sum(whole.owned for whole, _ in outcomes), sum(parts.owned for _, parts in outcomes)), case


def nodes_in_segments(rank: int, world_size: int) -> list[tuple[bytes, int]]:
    mesh, found = init_device_mesh("cpu", (2, world_size // 2)), []
    for algorithm in ("gather", "sharded", "dense"):
        for max_bytes in (None, 1_200_000):
            tensor = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
            work = thinwire.all_reduce_compressed(
                tensor, "topk:ratio=1/64,bits=2", group=mesh, algorithm=algorithm, max_bytes=max_bytes
            )
            found.append((bytes_of(tensor), work.report.segments))
    return found


def test_segments_change_no_bit_between_nodes(ranks: RankPool) -> None:
    found = ranks.run(nodes_in_segments, 4)
    for outcomes in found:
        for (whole, one), (parts, many) in zip(outcomes[::2], outcomes[1::2], strict=True):
            assert whole == parts
            assert one == 1 < many
        assert outcomes == found[0]


def too_small(rank: int, world_size: int) -> list[str]:
    """The error says how much is needed; that much is enough, one byte less is not."""
    messages = []
    for algorithm in ("gather", "sharded", "dense"):

        def call(max_bytes: int, algorithm: str = algorithm) -> Any:
            return thinwire.all_reduce_compressed(
                torch.ones(NUMEL), "quantize:bits=8,block=32", algorithm=algorithm, max_bytes=max_bytes
            )

        with pytest.raises(ValueError, match="max_bytes") as caught:
            call(8)
        message = str(caught.value)
        messages.append(message)
        needed = int(re.search(r" to ([\d,]+)", message)[1].replace(",", ""))  # type: ignore[index]
        assert call(needed).report.segments > 1
        with pytest.raises(ValueError, match="max_bytes"):
            call(needed - 4)
    with pytest.raises(ValueError, match="max_bytes -1"):
        thinwire.all_reduce_compressed(torch.ones(10), "quantize:bits=8", max_bytes=-1)
    return messages


def test_a_budget_that_is_too_small_says_what_is_needed(ranks: RankPool) -> None:
    found = ranks.run(too_small, 2)
    assert found[0] == found[1]


@contextmanager
def environment(text: str) -> Iterator[None]:
    os.environ["THINWIRE_MAX_BYTES"] = text
    try:
        yield
    finally:
        del os.environ["THINWIRE_MAX_BYTES"]


def measure(rank: int, world_size: int, cases: list[tuple[str, str]]) -> list[tuple[str, int | None]]:
    return [(f"{spec}, {algorithm}", measure_one(spec, algorithm)) for spec, algorithm in cases]


def measure_one(spec: str, algorithm: str) -> int | None:
    thinwire.all_reduce_compressed(torch.ones(100_000), spec, algorithm=algorithm)  # which may compile the kernels
    tensor, residual, state = torch.ones(4_000_000), torch.zeros(4_000_000), thinwire.ShardState()

    def job() -> None:
        work = thinwire.all_reduce_compressed(
            tensor, spec, residual, algorithm=algorithm, state=state, max_bytes=BUDGET
        )
        assert work.report.memory <= BUDGET // 4

    return peak_memory(job, torch.device("cpu"))


def test_the_measured_memory_is_within_the_budget(ranks: RankPool) -> None:
    """One operation may take a quarter, since four may be under way; dense would take 48 MB, or twelve times that."""
    cases = [
        ("quantize:bits=8", "gather"), ("quantize:bits=8", "sharded"), ("topk:ratio=1/4,bits=32", "gather"),
        ("topk:ratio=1/64,bits=2", "sharded"), ("none", "dense"),
    ]  # fmt: skip
    for rank, peaks in enumerate(ranks.run(measure, 4, cases, timeout=100)):
        for name, peak in peaks:
            assert peak is None or peak <= BUDGET // 4 + SLACK, f"rank {rank}, {name}: {peak:,} bytes"


# Training: all payloads of a step are held until it ends.


TRAINED = [
    ("AdamW", True, True), ("AdamW", False, False), ("SGD", True, False), ("SGD", False, True), ("attach", True, True),
    ("", False, True),
]  # fmt: skip
"""(optimizer, or attach, or a plain Synchronizer; whether DDP is there; whether anything is compressed)."""


class Trained:
    """A model and whatever exchanges its gradients."""

    def __init__(self, kind: str, ddp: bool, compressed: bool, **options: Any) -> None:
        self.module, spec = Given(), policy(TOPK) if compressed else "none"
        if kind in ("AdamW", "SGD"):
            self.model = DistributedDataParallel(self.module, **SEVERAL) if ddp else self.module
            make: Any = getattr(thinwire, kind)
            given = self.model if ddp else self.module.named_parameters()
            self.optimizer = make(given, lr=0.01, compressor=spec, warmup_steps=1, **options)
            self.finish = lambda: None
        else:
            self.model, _, self.finish = attached(self.module, spec, ddp, SEVERAL, **options)  # type: ignore[assignment]
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, rank: int, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(gradients(self.module, rank, step)).backward()
        self.finish()
        self.optimizer.step()


def train_within(rank: int, world_size: int, kind: str, ddp: bool, compressed: bool) -> None:
    """One byte is too little: an error on every rank, in the first step, by either setting. A megabyte is enough."""
    start = weight_bits(Given())
    for text, argument in (("1", None), ("", 1)):
        if kind == "attach" and not compressed:
            continue  # DDP's own all-reduce, which holds nothing
        with environment(text):
            trained = Trained(kind, ddp, compressed, max_bytes=argument)
            with raises(ValueError, "max_bytes 1", "raise max_bytes or THINWIRE_MAX_BYTES"):
                trained.step(rank, 0)
        assert_same(start, weight_bits(trained.module), "weights")
    ends = []
    for text, argument in (("", None), ("1MiB", None), ("", 1 << 20)):
        with environment(text):
            trained = Trained(kind, ddp, compressed, max_bytes=argument)
            for step in range(3):
                trained.step(rank, step)
        ends.append(weight_bits(trained.module))
    assert start != ends[0]
    for end in ends[1:]:
        assert_same(end, ends[0], "weights with more memory and less")


@pytest.mark.parametrize(("kind", "ddp", "compressed"), TRAINED)
def test_training_within_a_budget(ranks: RankPool, kind: str, ddp: bool, compressed: bool) -> None:
    ranks.run(train_within, 2, kind, ddp, compressed, timeout=30)
