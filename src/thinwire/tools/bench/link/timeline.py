"""Records when a rank did what in one step: its own computation, and each operation on each bucket.

It uses the spans that operations record (`Report.spans`), from the same clock that times the step.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from thinwire.collectives.handle import Span

_PHASE_OF = {"update": "compute", "encode": "compress", "exchange": "exchange", "decode": "decode"}
"""Phase of each kind of recorded span. An update is the optimizer's computation on a bucket."""


class Bar(NamedTuple):
    """A span of a timeline, in milliseconds since the step began."""

    phase: str
    """compute, compress, exchange or decode."""
    label: str
    start: float
    stop: float


class Lane(NamedTuple):
    """A row of a timeline."""

    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Timeline:
    """The timeline of one step on one rank.

    The first lane is the computation of the rank's own thread. The other lanes are the operations in the order in which
    they were issued.
    """

    lanes: tuple[Lane, ...]
    ms: float
    """Duration of the step."""
    whole: float
    """Time at which the last gradient was ready. The step has to wait for what is not done then."""

    @property
    def beside(self) -> float:
        """Return the milliseconds in which operations ran while gradients were still computed."""
        return _covered((bar.start, min(bar.stop, self.whole)) for lane in self.lanes[1:] for bar in lane.bars)

    @property
    def waited(self) -> float:
        """Return the milliseconds from the last gradient to the step of the optimizer."""
        return self.lanes[0].bars[-1].start - self.whole


class Marks(NamedTuple):
    """Times of `time.perf_counter`: start of the step, of the backward pass and of the optimizer, and the end."""

    begin: float
    backward: float
    optimizer: float
    end: float


def timeline(marks: Marks, operations: "Iterable[tuple[str, Iterable[Span]]]", whole: float) -> Timeline:
    """Build the timeline of a step from its operations, by name, and the time at which the last gradient was ready.

    The bar of the backward pass ends with the last gradient, because the pass only waits after that.
    """

    def bar(phase: str, label: str, start: float, stop: float) -> Bar:
        return Bar(phase=phase, label=label, start=1e3 * (start - marks.begin), stop=1e3 * (stop - marks.begin))

    own = (
        bar("compute", label="forward", start=marks.begin, stop=marks.backward),
        bar("compute", label="backward", start=marks.backward, stop=whole),
        bar("compute", label="optimizer", start=marks.optimizer, stop=marks.end),
    )
    lanes = [Lane("compute", own)]
    for name, spans in operations:
        bars = [
            bar(_PHASE_OF[phase], label=phase if phase == "update" else _PHASE_OF[phase], start=start, stop=stop)
            for phase, start, stop in spans
        ]
        lanes.append(Lane(name, tuple(bars)))
    return Timeline(tuple(lanes), 1e3 * (marks.end - marks.begin), own[1].stop)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans.

    >>> _covered([(0, 2), (1, 3), (5, 6), (9, 8)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def write_trace(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Write timelines as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

    Each timeline is a process of the trace, and each lane a thread of it.
    """
    events: list[dict[str, object]] = []
    for process, (title, one) in enumerate(timelines.items()):
        waited = f"{one.beside:,.1f} ms of work on buckets beside backward, {one.waited:,.1f} ms of waiting after it"
        events += [
            {"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"{title}: {one.ms:,.1f} ms"}},
            {"ph": "M", "pid": process, "name": "process_labels", "args": {"labels": waited}},
            {"ph": "i", "pid": process, "tid": 0, "ts": 1e3 * one.whole, "s": "p", "name": "last gradient"},
        ]
        for thread, lane in enumerate(one.lanes):
            place = {"pid": process, "tid": thread}
            events.append({"ph": "M", **place, "name": "thread_name", "args": {"name": lane.name}})
            for phase, label, start, stop in lane.bars:
                times = {"ts": 1e3 * start, "dur": 1e3 * (stop - start)}
                events.append({"ph": "X", **place, "cat": phase, "name": label, **times})
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")
