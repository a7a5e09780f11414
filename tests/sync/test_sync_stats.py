"""Where a step's time goes, as a synchronizer counts it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.by_threads import by_threads
from thinwire import Policy, Synchronizer
from thinwire.collectives import LocalGroup
from thinwire.collectives.handle import Report, Span
from thinwire.sync.statistics import SyncStats


def operation(ended: float, *spans: Span) -> Any:
    """A handle that is done, without the work."""
    return SimpleNamespace(ended=ended, report=Report("gather", "", spans=list(spans)))


ENCODE, EXCHANGE, DECODE = Span("encode", 1.0, 3.0), Span("exchange", 3.0, 6.0), Span("decode", 8.5, 9.0)
BEFORE_LAST = operation(9.0, ENCODE, EXCHANGE, DECODE)
LAST = operation(10.0, Span("update", 4.0, 5.5), Span("encode", 5.5, 7.0), Span("exchange", 7.0, 9.0))
LARGE = operation(10.0, Span("encode", 5.0, 8.0), Span("decode", 9.0, 10.0))
SMALL = operation(10.0, Span("encode", 6.0, 7.0), Span("decode", 7.5, 8.5))


@pytest.mark.parametrize(
    ("operations", "encode", "decode", "update", "exchange"),
    [
        ([BEFORE_LAST, LAST], 1.5, 0.5, 0.5, 2.5),
        ([operation(4.0, ENCODE)], 0.0, 0.0, 0.0, 0.0),
        ([LARGE, SMALL], 3.0, 1.5, 0.0, 0.5),
    ],
    ids=["what came after the last gradient", "all was done before", "a small one beside a large one counts once"],
)
def test_what_is_waited_for(operations: Any, encode: float, decode: float, update: float, exchange: float) -> None:
    stats = SyncStats()
    stats.add_averages(operations, started=5.0)
    assert stats.blocked == {"encode": encode, "decode": decode, "update": update, "exchange": exchange}
    if LAST in operations:
        assert sum(stats.blocked.values()) == 10.0 - 5.0
        assert stats.seconds == {"encode": 3.5, "exchange": 5.0, "decode": 0.5, "update": 1.5}


@by_threads(2)
def test_the_steps_after_the_warm_up_have_a_reduction_of_their_own(group: LocalGroup) -> None:
    """Two steps of a warm-up and three others."""
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
    stats, dense = sync.stats, sync.stats.bytes_dense / 5
    assert stats.reduction == pytest.approx(5 * dense / sum(each))
    assert stats.reduction_after_warmup == pytest.approx(3 * dense / sum(each[2:]))
    assert stats.reduction_after_warmup > 2 * stats.reduction > 4
    assert (stats.bytes_inside_nodes, stats.reduction_between_nodes) == (0, stats.reduction)


@by_threads(4)
def test_dense_bytes_are_those_of_a_ring_and_a_real_step_has_all_parts(group: LocalGroup) -> None:
    """Of n bytes, each of P ranks sends 2 n (P - 1) / P."""
    layer = torch.nn.Linear(100, 100)
    layer(torch.ones(100) * group.rank).sum().backward()
    sync = Synchronizer("topk:ratio=1/16,bits=2", group=group)
    sync.all_reduce_gradients(layer)
    stats = sync.stats
    assert stats.bytes_dense == 2 * 4 * 10_100 * 3 // 4
    assert stats.reduction == stats.bytes_dense / stats.bytes_sent
    assert set(stats.blocked) == {"encode", "decode", "update", "exchange"}
    assert all(seconds >= 0 for seconds in stats.blocked.values())
    assert stats.seconds.keys() >= {"encode", "decode"}
    assert stats.seconds["encode"] > 0
