"""Statistics of a synchronizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..collectives import Handle, Report
from .parts import StepRecord


@dataclass
class SyncStats:
    """Counts, bytes and times of a synchronizer on this rank."""

    steps: int = 0
    """Steps that were not skipped."""
    skipped: int = 0
    """Steps that were skipped because some rank's gradient was not finite."""
    skipped_in_a_row: int = 0
    """Steps skipped since the last step that was taken."""
    bytes_sent: int = 0
    """Bytes sent by this rank."""
    bytes_dense: int = 0
    """Bytes that a dense ring all-reduce of the same gradients would have sent."""
    last_bytes_sent: int = 0
    """Bytes sent by this rank in the last step, and in averages after it."""
    messages: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of encode, exchange, decode and update, summed over operations.

    Operations overlap with each other and with the backward pass.
    """
    blocked: dict[str, float] = field(default_factory=dict)
    """Seconds after the last gradient in which the step waited, by phase: encode, decode, update and exchange.

    In a step, exchange is the time spent waiting for operations. Outside a step, it is the time without another phase.
    """
    algorithms: dict[str, int] = field(default_factory=dict)
    """Number of operations by algorithm."""

    @property
    def ratio(self) -> float:
        """Return the dense bytes divided by the bytes sent; 1.0 before the first step."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0

    def add(self, step: StepRecord) -> None:
        """Count a step that was taken or skipped."""
        counts = step.finite is not False
        self.steps, self.skipped = self.steps + counts, self.skipped + (not counts)
        self.skipped_in_a_row = 0 if counts else self.skipped_in_a_row + 1
        self.last_bytes_sent = 0
        self.bytes_dense += step.bytes_dense
        for handle in step.handles:
            self._count(handle.report)
        self._add_blocked({**_worked(step.handles, step.whole_at), "exchange": step.waited})

    def add_averages(self, handles: Sequence[Handle], started: float) -> None:
        """Count operations outside a step, for which the caller has waited since `started`."""
        for handle in handles:
            self._count(handle.report)
        self._block(handles, started)

    def _block(self, handles: Sequence[Handle], since: float) -> None:
        whole = max((handle.ended or since for handle in handles), default=since) - since
        worked = _worked(handles, since)
        self._add_blocked({**worked, "exchange": max(0.0, whole - sum(worked.values()))})

    def _add_blocked(self, seconds: Mapping[str, float]) -> None:
        for phase, more in seconds.items():
            self.blocked[phase] = self.blocked.get(phase, 0.0) + more

    def _count(self, report: Report) -> None:
        self.bytes_sent += report.bytes_sent
        self.last_bytes_sent += report.bytes_sent
        self.messages += report.messages
        self.algorithms[report.algorithm] = self.algorithms.get(report.algorithm, 0) + 1
        for phase, seconds in report.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


def _worked(handles: Sequence[Handle], since: float) -> dict[str, float]:
    """Return the seconds of computing since a time, by phase; where two operations overlap, the first one counts."""
    worked = dict.fromkeys(("encode", "decode", "update"), 0.0)
    counted = since
    for start, stop, phase in sorted((s.start, s.stop, s.phase) for handle in handles for s in handle.report.spans):
        if phase in worked:
            worked[phase] += max(0.0, stop - max(start, counted))
            counted = max(counted, stop)
    return worked
