"""What a synchronizer has done so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..collectives import Handle, Report
from .parts import StepRecord


@dataclass
class SyncStats:
    """What a synchronizer has done so far, on this rank."""

    steps: int = 0
    """Steps that counted."""
    skipped: int = 0
    """Steps that some rank's NaN or Inf ended."""
    skipped_in_a_row: int = 0
    """Those of them since the last step that counted."""
    bytes_sent: int = 0
    """Handed to the network by this rank."""
    bytes_dense: int = 0
    """What a dense ring all-reduce of the same gradients would have sent."""
    last_bytes_sent: int = 0
    """In the last step."""
    messages: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Of encode, exchange, decode and update, summed over operations, which overlap with each other and with the
    backward pass."""
    blocked: dict[str, float] = field(default_factory=dict)
    """What of that came after the last gradient, so that the step waited for it: encode, decode, update and, for what
    was none of these, exchange. They add up."""
    algorithms: dict[str, int] = field(default_factory=dict)
    """Operations by algorithm."""

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than dense; 1.0 before the first step."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0

    def add(self, step: StepRecord) -> None:
        counts = step.finite is not False
        self.steps, self.skipped = self.steps + counts, self.skipped + (not counts)
        self.skipped_in_a_row = 0 if counts else self.skipped_in_a_row + 1
        self.last_bytes_sent = 0
        self.bytes_dense += step.bytes_dense
        for handle in step.handles:
            self._count(handle.report)
        self._add_blocked({**_worked(step.handles, step.whole_at), "exchange": step.waited})

    def add_averages(self, handles: Sequence[Handle], started: float) -> None:
        """Operations outside a step, which was waited for since they were started."""
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
    """Seconds of computing from then on. A moment in which two operations worked counts for the first."""
    worked = dict.fromkeys(("encode", "decode", "update"), 0.0)
    counted = since
    for start, stop, phase in sorted((s.start, s.stop, s.phase) for handle in handles for s in handle.report.spans):
        if phase in worked:
            worked[phase] += max(0.0, stop - max(start, counted))
            counted = max(counted, stop)
    return worked
