"""When a rank did what in one step: its own computing, and each operation of each bucket beside it.

From the spans that operations record (`Report.spans`), by the clock that the step itself is timed with.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire import ShardState, Synchronizer
    from thinwire.buckets import Bucket, BucketPlan, Run
    from thinwire.collectives.handle import Span
    from thinwire.exchange import Exchange

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


class Recorder:
    """Looks over a synchronizer's shoulder for one step, to know which operation belongs to which bucket.

    An operation is started right after its run's residual was asked for; all others carry what goes dense.
    """

    def __init__(self, sync: "Synchronizer") -> None:
        self._sync, self._bucket = sync, 0
        self._names: dict[int, str] = {}

    def __enter__(self) -> Self:
        plan, keep = self._sync.plan, self._sync.keep

        def counted(bucket: "Bucket", exchange: "Exchange") -> "BucketPlan":
            self._bucket += 1
            return plan(bucket, exchange)

        def named(run: "Run", tensor: "Tensor") -> "tuple[Tensor | None, ShardState | None]":
            assert self._sync._exchange is not None
            where = "small tensors" if self._sync._exchange.is_packing else f"bucket {self._bucket}"
            self._names[len(self._sync._exchange.handles)] = f"{where}, {run.stop - run.start:,} entries"
            return keep(run, tensor)

        self._sync.plan, self._sync.keep = counted, named  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        del self._sync.plan, self._sync.keep  # of this object; those of its class are there again

    def operations(self) -> Recorded | None:
        """After the backward pass, before the optimizer's step; None if torch's own all-reduce did it, unrecorded."""
        exchange = self._sync._exchange
        assert exchange is not None
        if exchange.passes_on:
            return None
        names = (self._names.get(number, "dense tensors") for number in range(len(exchange.handles)))
        spans = (handle.report.spans for handle in exchange.handles)
        return Recorded(list(zip(names, spans, strict=True)), exchange.whole_at)


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
