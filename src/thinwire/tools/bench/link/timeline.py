"""When a rank did what in one step: its own computing, and each operation of each bucket beside it.

From the spans that operations record (`Report.spans`), by the clock that the step itself is timed with.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from thinwire import Synchronizer
    from thinwire.collectives.handle import Span

PHASES = ("compute", "compress", "exchange", "decode")
_PHASE_OF = {"update": "compute", "encode": "compress", "exchange": "exchange", "decode": "decode"}
"""Of what operations record. An update is the optimizer's arithmetic on a bucket."""


class Bar(NamedTuple):
    """Milliseconds since the step began."""

    phase: str
    label: str
    start: float
    stop: float


@dataclass(frozen=True)
class Lane:
    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Timeline:
    """`lanes`: first what the rank's own thread computed, then the operations in the order they were issued."""

    lanes: tuple[Lane, ...]
    ms: float
    """Of the step."""
    whole: float
    """When the last gradient was there; what goes on from then on is waited for."""

    @property
    def beside(self) -> float:
        """Milliseconds in which operations worked while gradients were still computed."""
        return _covered((bar.start, min(bar.stop, self.whole)) for lane in self.lanes[1:] for bar in lane.bars)

    @property
    def waited(self) -> float:
        """Milliseconds from the last gradient to the optimizer's step."""
        return self.lanes[0].bars[-1].start - self.whole


class Marks(NamedTuple):
    """Seconds of `time.perf_counter`: the begin of the step, of the backward pass, of the optimizer's, and the end."""

    begin: float
    backward: float
    optimizer: float
    end: float


class Recorded(NamedTuple):
    """Operations of a step by name, with their spans; and when the last gradient was there."""

    operations: "list[tuple[str, list[Span]]]"
    whole_at: float


def recorded(sync: "Synchronizer") -> Recorded | None:
    """After a step: what its operations did; None if torch's own all-reduce did it, unrecorded."""
    step = sync.last_step
    assert step is not None
    if step.passes_on:
        return None
    spans = (handle.report.spans for handle in step.handles)
    return Recorded(list(zip(step.labels, spans, strict=True)), step.whole_at)


def timeline(marks: Marks, recorded: Recorded) -> Timeline:
    """Put together; what the backward pass waits for after the last gradient is not computing."""

    def bar(phase: str, label: str, start: float, stop: float) -> Bar:
        return Bar(phase, label, 1e3 * (start - marks.begin), 1e3 * (stop - marks.begin))

    own = (
        bar("compute", "forward", marks.begin, marks.backward),
        bar("compute", "backward", marks.backward, recorded.whole_at),
        bar("compute", "optimizer", marks.optimizer, marks.end),
    )
    others = (
        Lane(name, tuple(bar(_PHASE_OF[phase], _label(phase), start, stop) for phase, start, stop in spans))
        for name, spans in recorded.operations
    )
    return Timeline((Lane("compute", own), *others), 1e3 * (marks.end - marks.begin), own[1].stop)


def _label(phase: str) -> str:
    return "update" if phase == "update" else _PHASE_OF[phase]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of their union.

    >>> _covered([(0, 2), (1, 3), (5, 6), (9, 8)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
