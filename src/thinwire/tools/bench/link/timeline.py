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

    from ..training import Marks

_PHASE_OF = {"update": "compute", "encode": "compress", "exchange": "exchange", "decode": "decode"}
"""Phase of each kind of recorded span. An update is the optimizer's computation on a bucket."""


class Bar(NamedTuple):
    """A span of a timeline, in milliseconds since the step began."""

    phase: str
    """compute, compress, exchange or decode."""
    label: str
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """The timeline of one step on one rank."""

    lanes: list[tuple[str, list[Bar]]]
    """Bars by name: first those of the rank's own thread, then of each operation, in the order they were issued in."""
    ms: float
    """Duration of the step."""
    whole: float
    """Time at which the last gradient was ready. The step has to wait for what is not done then."""

    @property
    def beside(self) -> float:
        """Return the milliseconds in which operations ran while gradients were still computed."""
        total = end = 0.0
        for start, stop in sorted((bar.start, min(bar.stop, self.whole)) for _, bars in self.lanes[1:] for bar in bars):
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total

    @property
    def waited(self) -> float:
        """Return the milliseconds from the last gradient to the step of the optimizer."""
        return self.lanes[0][1][-1].start - self.whole


def timeline(marks: "Marks", operations: "Iterable[tuple[str, Iterable[Span]]]", whole: float) -> Timeline:
    """Build the timeline of a step from its operations, by name, and the time at which the last gradient was ready.

    The bar of the backward pass ends with the last gradient, because the pass only waits after that.
    """

    def bar(phase: str, label: str, start: float, stop: float) -> Bar:
        return Bar(phase=phase, label=label, start=1e3 * (start - marks.begin), stop=1e3 * (stop - marks.begin))

    own = [
        bar("compute", label="forward", start=marks.begin, stop=marks.backward),
        bar("compute", label="backward", start=marks.backward, stop=whole),
        bar("compute", label="optimizer", start=marks.optimizer, stop=marks.end),
    ]
    lanes = [("compute", own)]
    for name, spans in operations:
        kinds = ((kind, _PHASE_OF[kind], start, stop) for kind, start, stop in spans)
        bars = [bar(phase, kind if kind == "update" else phase, start, stop) for kind, phase, start, stop in kinds]
        lanes.append((name, bars))
    return Timeline(lanes, 1e3 * (marks.end - marks.begin), own[1].stop)


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
        for thread, (name, bars) in enumerate(one.lanes):
            place = {"pid": process, "tid": thread}
            events.append({"ph": "M", **place, "name": "thread_name", "args": {"name": name}})
            for phase, label, start, stop in bars:
                times = {"ts": 1e3 * start, "dur": 1e3 * (stop - start)}
                events.append({"ph": "X", **place, "cat": phase, "name": label, **times})
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")
