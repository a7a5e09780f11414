"""Records when a rank did what in one step: its own computation, and each operation on each bucket.

It uses the spans that operations record (`Report.spans`), from the same clock that times the step.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from thinwire import Synchronizer
    from thinwire.collectives.handle import Span

PHASES = ("compute", "compress", "exchange", "decode")
_PHASE_OF = {"update": "compute", "encode": "compress", "exchange": "exchange", "decode": "decode"}
"""Phase of each kind of recorded span. An update is the optimizer's computation on a bucket."""


class Bar(NamedTuple):
    """A span of a timeline, in milliseconds since the step began."""

    phase: str
    label: str
    start: float
    stop: float


@dataclass(frozen=True)
class Lane:
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
        """Milliseconds in which operations ran while gradients were still computed."""
        return _covered((bar.start, min(bar.stop, self.whole)) for lane in self.lanes[1:] for bar in lane.bars)

    @property
    def waited(self) -> float:
        """Milliseconds from the last gradient to the step of the optimizer."""
        return self.lanes[0].bars[-1].start - self.whole


class Marks(NamedTuple):
    """Times of `time.perf_counter`: start of the step, of the backward pass and of the optimizer, and the end."""

    begin: float
    backward: float
    optimizer: float
    end: float


class Recorded(NamedTuple):
    """The operations of a step by name, with their spans, and the time at which the last gradient was ready."""

    operations: "list[tuple[str, list[Span]]]"
    whole_at: float


def recorded(sync: "Synchronizer") -> Recorded | None:
    """Return the operations of the last step, or None if it used torch's own all-reduce, which is not recorded."""
    step = sync.last_step
    assert step is not None
    if step.passes_on:
        return None
    spans = (handle.report.spans for handle in step.handles)
    return Recorded(list(zip(step.labels, spans, strict=True)), step.whole_at)


def timeline(marks: Marks, recorded: Recorded) -> Timeline:
    """Build the timeline of a step.

    The bar of the backward pass ends with the last gradient, because the pass only waits after that.
    """

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
    """Return the length of the union of spans.

    >>> _covered([(0, 2), (1, 3), (5, 6), (9, 8)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
