"""Counts bytes by the report of the operation and on the loopback interface, to compare both with the formula.

The interface also counts what gloo and TCP add. A gloo message consists of a notice from each side and the data. Each
of the three has 48 bytes in front of it. They take at least four packets with 52 bytes of headers each, plus
acknowledgements: 350 to 650 bytes in total. Other traffic on the interface can only add to a count, and TCP may send a
packet twice. Each count therefore covers one operation between two moments without traffic, and the lowest of several
counts is used. If the interface is never quiet, there is no count.
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
"""Largest relative difference between a count and the formula."""
FRAMING_LIMIT = 700
"""Bytes that gloo and TCP may add to a message.

Messages of many packets have more, but that stays within `LIMIT`.
"""
COUNTS = 5
"""Number of counts of an operation, of which the lowest is used."""
PATIENCE_SECONDS = 5.0
"""Longest time spent on the counts of an operation.

More than `COUNTS` counts are taken while all are too high, because other traffic may be on the interface.
"""


@dataclass(frozen=True)
class ByteRow:
    """Bytes and messages that each rank sent in one operation, as means over ranks."""

    case: Case
    reason: str
    """Why the algorithm was chosen, from the report of the operation."""
    messages: float
    reported: float
    interface: float | None
    """Bytes on the interface. None if the system has no counters or the interface was never quiet."""

    @property
    def reported_off(self) -> float:
        """Relative difference between the reported bytes and the formula."""
        return self.reported / self.case.cost.sent - 1

    @property
    def interface_off(self) -> float | None:
        """Relative difference between the bytes on the interface and the formula."""
        return None if self.interface is None else self.interface / self.case.cost.sent - 1

    @property
    def framing(self) -> float | None:
        """Bytes on the interface beyond the reported ones, for each message."""
        return None if self.interface is None else (self.interface - self.reported) / self.messages

    @property
    def most(self) -> float:
        """Largest number of bytes on the interface that is accepted."""
        return self.case.cost.sent * (1 + LIMIT) + self.messages * FRAMING_LIMIT

    @property
    def fault(self) -> str | None:
        """Description of a count that is out of its limits. None if all are within them."""
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
        """Return the row as a dict for one line of JSON."""
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
    """Count the bytes of every case and yield a row for each."""
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
