"""The timeline of spans that are known, and its trace."""

import json
from pathlib import Path

import pytest

from thinwire.collectives.handle import Span
from thinwire.tools.bench.link.timeline import Timeline, timeline, write_trace
from thinwire.tools.bench.training import Marks


@pytest.fixture
def known() -> Timeline:
    """A step of 100 ms: 20 forward, 40 backward, 30 waiting, 10 for the optimizer; two buckets."""
    first = [Span("update", 1.030, 1.031), Span("encode", 1.031, 1.035), Span("exchange", 1.035, 1.055)]
    second = [Span("encode", 1.058, 1.062), Span("exchange", 1.062, 1.080), Span("decode", 1.080, 1.088)]
    operations = [("bucket 1, 10 elements", first), ("bucket 2, 20 elements", second)]
    return timeline(Marks(1.0, 1.020, 1.090, 1.100), operations, 1.060)


def test_work_beside_the_backward_pass_is_not_waiting(known: Timeline) -> None:
    assert known.ms == pytest.approx(100)
    assert known.whole == pytest.approx(60)
    assert known.beside == pytest.approx(25 + 2)
    assert known.waited == pytest.approx(30)
    assert [name for name, _ in known.lanes] == ["compute", "bucket 1, 10 elements", "bucket 2, 20 elements"]
    assert [bar.label for bar in known.lanes[0][1]] == ["forward", "backward", "optimizer"]
    assert [bar.phase for bar in known.lanes[1][1]] == ["compute", "compress", "exchange"]


def test_the_trace_names_every_lane_and_what_was_waited_for(known: Timeline, tmp_path: Path) -> None:
    write_trace({"dense": known, "attach <topk>, 1gbit, 2 ranks": known}, tmp_path / "timeline.json")
    events = [one for one in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if one["pid"] == 1]
    facts = {one["name"]: one["args"] for one in events if one["ph"] == "M" and one["name"] != "thread_name"}
    assert facts["process_name"] == {"name": "attach <topk>, 1gbit, 2 ranks: 100.0 ms"}
    waited = "27.0 ms of work on buckets beside backward, 30.0 ms of waiting after it"
    assert facts["process_labels"] == {"labels": waited}
    threads = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert threads == {0: "compute", 1: "bucket 1, 10 elements", 2: "bucket 2, 20 elements"}
    spans = [(one["tid"], one["name"], round(one["ts"]), round(one["dur"])) for one in events if one["ph"] == "X"]
    assert (0, "backward", 20_000, 40_000) in spans  # microseconds
    assert (2, "exchange", 62_000, 18_000) in spans
    assert [round(one["ts"]) for one in events if one["name"] == "last gradient"] == [60_000]
