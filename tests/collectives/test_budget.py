"""A memory budget: work is cut into segments that fit it, with the same results, or it says how much it needs."""

import re
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
from support.reductions import placed
from support.slow import slow
from support.training import SEVERAL, TOPK, Given, assert_same, attached, gradients, policy, raises, weight_bits
from thinwire import Collective
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
    residual: Tensor
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
    return Outcome(results, residual, placed(state, NUMEL), work.report)


def in_segments(
    rank: int, world_size: int, cases: list[Any], nodes: int = 0, group: Any = None
) -> list[tuple[Outcome, Outcome]]:
    """Without a budget, and with a fifth of what one segment takes."""
    group = init_device_mesh("cpu", (nodes, world_size // nodes)) if nodes else group
    found = []
    for spec, algorithm, dtype in cases:
        whole = perform(rank, spec, algorithm, dtype, None, group=group)
        budget = 4 * whole.report.memory // 5
        parts = perform(rank, spec, algorithm, dtype, budget, group=group)
        assert parts.report.memory <= budget // 4
        found.append((whole, parts))
    return found


@pytest.mark.parametrize(("world_size", "nodes"), [(2, 0), (3, 0), slow(8, 0), (4, 2)])
def test_segments_change_no_bit(ranks: RankPool, world_size: int, nodes: int) -> None:
    cases = CASES if world_size == 3 else CASES[:9:2] if nodes else CASES[:5:2]
    found = ranks.run(in_segments, world_size, cases, nodes) if nodes else run_group(in_segments, world_size, cases)
    for case, outcomes in zip(cases, zip(*found, strict=True), strict=True):
        for whole, parts in outcomes:
            assert whole.results == parts.results == outcomes[0][0].results, case
            assert nodes or same_bits(whole.residual, parts.residual), case
            assert whole.report.segments == 1 < parts.report.segments == outcomes[0][1].report.segments, case
        for kept in ("residual", "owned"):  # of all ranks: in nodes they keep other parts of it
            whole, parts = (sum(getattr(outcome[index], kept) for outcome in outcomes) for index in (0, 1))
            assert same_bits(whole, parts), f"{kept}, {case}"
        if nodes:
            continue
        bounds = 8 * world_size * (world_size - 1)  # each rank first sends the others its largest number, or NaN
        sent = [sum(outcome[index].report.bytes_sent for outcome in outcomes) for index in (0, 1)]
        assert sent[1] == sent[0] + bounds, case


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


def measure(rank: int, world_size: int, cases: list[tuple[str, str]]) -> list[int | None]:
    peaks = []
    for spec, algorithm in cases:
        thinwire.all_reduce_compressed(torch.ones(100_000), spec, algorithm=algorithm)  # which may compile the kernels
        tensor, residual, state = torch.ones(4_000_000), torch.zeros(4_000_000), thinwire.ShardState()

        def job(spec: str = spec, algorithm: str = algorithm, given: Any = (tensor, residual, state)) -> None:
            tensor, residual, state = given
            work = thinwire.all_reduce_compressed(
                tensor, spec, residual, algorithm=algorithm, state=state, max_bytes=BUDGET
            )
            assert work.report.memory <= BUDGET // 4

        peaks.append(peak_memory(job, torch.device("cpu")))
    return peaks


def test_the_measured_memory_is_within_the_budget(ranks: RankPool) -> None:
    """One operation may take a quarter, since four may be under way; dense would take 48 MB, or twelve times that."""
    cases = [
        ("quantize:bits=8", "gather"), ("quantize:bits=8", "sharded"), ("topk:ratio=1/4,bits=32", "gather"),
        ("topk:ratio=1/64,bits=2", "sharded"), ("none", "dense"),
    ]  # fmt: skip
    for rank, peaks in enumerate(ranks.run(measure, 4, cases, timeout=100)):
        for case, peak in zip(cases, peaks, strict=True):
            assert peak is None or peak <= BUDGET // 4 + SLACK, f"rank {rank}, {case}: {peak:,} bytes"


# Training: all payloads of a step are held until it ends.


TRAINED = [
    ("AdamW", True, True), ("AdamW", False, False), ("SGD", True, False), ("SGD", False, True), ("attach", True, True),
    ("", False, True),
]  # fmt: skip
"""(optimizer, or attach, or a plain Synchronizer; whether DDP is there; whether anything is compressed)."""


def train(rank: int, module: Given, kind: str, ddp: bool, compressed: bool, steps: int, max_bytes: Any) -> None:
    """By whatever exchanges its gradients."""
    spec: Any = policy(TOPK) if compressed else "none"
    collective = Collective(max_bytes=max_bytes)
    model: Any = module
    finish = None
    if kind in ("AdamW", "SGD"):
        model = DistributedDataParallel(module, **SEVERAL) if ddp else module
        given = model if ddp else module.named_parameters()
        optimizer = getattr(thinwire, kind)(given, lr=0.01, compressor=spec, warmup_steps=1, collective=collective)
    else:
        model, _, finish = attached(module, spec, ddp, SEVERAL, collective=collective)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(gradients(module, rank, step)).backward()
        if finish is not None:
            finish()
        optimizer.step()


def train_within(rank: int, world_size: int, kind: str, ddp: bool, compressed: bool) -> None:
    """One byte is too little: an error on every rank, in the first step, by either setting. A megabyte is enough."""
    start, ends = weight_bits(Given()), []
    for text, argument in (("1", None), ("", 1), ("", None), ("1MiB", None), ("", 1 << 20)):
        module, is_enough = Given(), text != "1" and argument != 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("THINWIRE_MAX_BYTES", text)
            if is_enough:
                train(rank, module, kind, ddp, compressed, 3, argument)
                ends.append(weight_bits(module))
                continue
            with raises(ValueError, "max_bytes 1", "raise max_bytes or THINWIRE_MAX_BYTES"):
                train(rank, module, kind, ddp, compressed, 1, argument)
            assert_same(start, weight_bits(module), "weights")
    assert start != ends[0]
    for end in ends[1:]:
        assert_same(end, ends[0], "weights with more memory and less")


@pytest.mark.parametrize(("kind", "ddp", "compressed"), TRAINED)
def test_training_within_a_budget(ranks: RankPool, kind: str, ddp: bool, compressed: bool) -> None:
    ranks.run(train_within, 2, kind, ddp, compressed, timeout=30)
