"""Where a step's time goes, as a synchronizer counts it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from thinwire import Policy, Synchronizer
from thinwire.collectives import LocalGroup
from thinwire.collectives.handle import Report, Span
from thinwire.sync.statistics import SyncStats
from thinwire.testing import run_threads


def operation(ended: float, *spans: Span) -> Any:
    """A handle that is done, without the work."""
    return SimpleNamespace(ended=ended, report=Report("gather", "", spans=list(spans)))


def test_only_what_came_after_the_last_gradient_is_waited_for() -> None:
    stats = SyncStats()
    overlapped = operation(9.0, Span("encode", 1.0, 3.0), Span("exchange", 3.0, 6.0), Span("decode", 8.5, 9.0))
    last = operation(10.0, Span("update", 4.0, 5.5), Span("encode", 5.5, 7.0), Span("exchange", 7.0, 9.0))
    stats.add_averages([overlapped, last], started=5.0)
    assert stats.blocked == {"encode": 1.5, "decode": 0.5, "update": 0.5, "exchange": 2.5}
    assert sum(stats.blocked.values()) == 10.0 - 5.0
    assert stats.seconds == {"encode": 3.5, "exchange": 5.0, "decode": 0.5, "update": 1.5}


def test_nothing_was_waited_for_if_all_was_done_before() -> None:
    stats = SyncStats()
    stats.add_averages([operation(4.0, Span("encode", 1.0, 3.0))], started=5.0)
    assert stats.blocked == {"encode": 0.0, "decode": 0.0, "update": 0.0, "exchange": 0.0}


def test_a_real_step_has_parts_that_fit_into_it() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = torch.nn.Linear(100, 100)
        layer(torch.ones(100)).sum().backward()
        sync = Synchronizer("topk:ratio=1/16,bits=2")
        sync.all_reduce_gradients(layer)
        assert set(sync.stats.blocked) == {"encode", "decode", "update", "exchange"}
        assert all(seconds >= 0 for seconds in sync.stats.blocked.values())
        assert sync.stats.blocked["encode"] > 0
        assert sync.stats.seconds.keys() >= {"encode", "decode"}
    finally:
        dist.destroy_process_group()


def warm_up(group: LocalGroup) -> tuple[list[int], SyncStats]:
    """(the bytes of each step, the statistics) of two steps of a warm-up and three others."""
    layer = torch.nn.Linear(100, 100)
    sync = Synchronizer(Policy("topk:ratio=1/64,bits=2", warmup=[(2, "quantize:bits=8")]), group=group)
    each = []
    for step in range(5):
        layer.zero_grad()
        layer(torch.full((100,), float(step + group.rank))).sum().backward()
        sync.all_reduce_gradients(layer)
        each.append(sync.stats.last_bytes_sent)
        if step == 1:
            assert sync.stats.reduction_after_warmup == 1.0
    return each, sync.stats


def test_the_steps_after_the_warm_up_have_a_reduction_of_their_own() -> None:
    for each, stats in run_threads(warm_up, 2):
        dense = stats.bytes_dense / 5
        assert stats.reduction == pytest.approx(5 * dense / sum(each))
        assert stats.reduction_after_warmup == pytest.approx(3 * dense / sum(each[2:]))
        assert stats.reduction_after_warmup > 2 * stats.reduction > 4
        assert (stats.bytes_inside_nodes, stats.reduction_between_nodes) == (0, stats.reduction)


def test_a_small_operation_beside_a_large_one_counts_once() -> None:
    stats = SyncStats()
    large = operation(10.0, Span("encode", 5.0, 8.0), Span("decode", 9.0, 10.0))
    small = operation(10.0, Span("encode", 6.0, 7.0), Span("decode", 7.5, 8.5))
    stats.add_averages([large, small], started=5.0)
    assert stats.blocked == {"encode": 3.0, "decode": 1.5, "update": 0.0, "exchange": 0.5}


def count_dense(group: LocalGroup) -> tuple[int, float, int]:
    layer = torch.nn.Linear(100, 100)
    layer(torch.ones(100) * group.rank).sum().backward()
    sync = Synchronizer("topk:ratio=1/16,bits=2", group=group)
    sync.all_reduce_gradients(layer)
    return sync.stats.bytes_dense, sync.stats.reduction, sync.stats.bytes_sent


def test_dense_bytes_are_those_of_a_ring() -> None:
    """Of n bytes, each of P ranks sends 2 n (P - 1) / P."""
    for dense, ratio, sent in run_threads(count_dense, 4):
        assert dense == 2 * 4 * 10_100 * 3 // 4
        assert ratio == dense / sent
