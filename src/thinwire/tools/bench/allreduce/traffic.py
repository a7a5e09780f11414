"""Bytes, counted twice beside the formula: by the operation's own report, and by the loopback interface.

The interface also counts what gloo and TCP put around the bytes. A message of gloo's has a notice of each side and the
data, each behind 48 bytes, in at least four packets of 52 bytes of headers, with acknowledgements: 350 to 650 bytes.
What else goes over the interface meanwhile can only add, and TCP may send a packet twice: a count is of one operation,
between two moments without traffic, and the least of several is taken. An interface that is never quiet is not counted.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby

from thinwire.collectives import Report
from thinwire.tools import loopback
from thinwire.tools.bench.progress import Progress
from thinwire.tools.workers import Workers

from .cases import Case
from .reducer import Reducer
from .settings import Settings

LIMIT = 0.02
"""How far a count may be off the formula."""
FRAMING_LIMIT = 700
"""Bytes that gloo and TCP may put around a message; more, for those of many packets, is within `LIMIT`."""
COUNTS = 5
"""Of an operation, of which the least is taken."""
PATIENCE_SECONDS = 5.0
"""For counts; more of them than `COUNTS` while all are too high, since something else may be on the interface."""


@dataclass(frozen=True)
class ByteRow:
    """What each rank sent in one operation: means over ranks."""

    case: Case
    reason: str
    """Why this algorithm, in the operation's own words."""
    messages: float
    reported: float
    interface: float | None
    """None where the system does not tell, or where the interface was never quiet."""

    @property
    def reported_off(self) -> float:
        return self.reported / self.case.cost.sent - 1

    @property
    def interface_off(self) -> float | None:
        return None if self.interface is None else self.interface / self.case.cost.sent - 1

    @property
    def framing(self) -> float | None:
        """Bytes for each message beyond its own."""
        return None if self.interface is None else (self.interface - self.reported) / self.messages

    @property
    def most(self) -> float:
        """Bytes that may be on the interface."""
        return self.case.cost.sent * (1 + LIMIT) + self.messages * FRAMING_LIMIT

    @property
    def fault(self) -> str | None:
        """What is off by more than it may be."""
        sent = self.case.cost.sent
        if abs(self.reported_off) > LIMIT:
            return f"{self.case.title}: reported {self.reported:,.0f} bytes, expected {sent:,.0f} within {LIMIT:.0%}"
        if self.interface is not None and not sent * (1 - LIMIT) <= self.interface <= self.most:
            return (
                f"{self.case.title}: {self.interface:,.0f} bytes on the interface, expected {sent:,.0f} within "
                f"{LIMIT:.0%} and {FRAMING_LIMIT} for each of {self.messages:g} messages; was something else on it?"
            )
        return None

    def record(self) -> dict[str, object]:
        """As a line of JSON."""
        return {
            "kind": "allreduce bytes",
            **{name: value for name, value in asdict(self.case).items() if name != "cost"},
            "reason": self.reason,
            "messages": self.messages,
            "formula_bytes": self.case.cost.sent,
            "reported_bytes": self.reported,
            "interface_bytes": self.interface,
            "reported_off": self.reported_off,
            "interface_off": self.interface_off,
            "framing_bytes_per_message": self.framing,
            "ok": self.fault is None,
        }


def count_all(settings: Settings, workers: Workers, progress: Progress) -> Iterator[ByteRow]:
    """A row of every case."""
    for world, group in groupby(settings.cases, lambda case: case.world):
        workers.form(world, Reducer)
        for case in group:
            progress.start(case.title)
            row = _count(case, workers)
            progress.finish(f"{row.reported:,.0f} bytes sent per rank, formula {case.cost.sent:,.0f}")
            yield row


def _count(case: Case, workers: Workers) -> ByteRow:
    workers.ask("take", case)
    counts: list[int] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        quiet_before, before = loopback.wait_until_quiet()
        reports: list[Report] = workers.ask("reduce")
        quiet_after, after = loopback.wait_until_quiet()
        if quiet_before and quiet_after:
            counts.append(after - before)
        assert all(report.algorithm == case.chosen for report in reports), f"{case.title}: {reports[0].algorithm}"
        row = ByteRow(
            case,
            reports[0].reason,
            sum(report.messages for report in reports) / case.world or case.cost.messages,
            sum(report.bytes_sent for report in reports) / case.world,
            min(counts) / case.world if counts else None,
        )
        enough = len(counts) >= COUNTS and (row.interface or 0) <= row.most
        if enough or not loopback.is_counted() or time.monotonic() > deadline:
            return row
