"""What a synchronizer has done so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .collectives import Handle, Report
from .exchange import Exchange


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

    def add(self, exchange: Exchange) -> None:
        counts = exchange.step.finite
        self.steps, self.skipped = self.steps + bool(counts), self.skipped + (not counts)
        self.skipped_in_a_row = 0 if counts else self.skipped_in_a_row + 1
        self.last_bytes_sent = 0
        self.bytes_dense += exchange.bytes_dense
        for handle in exchange.handles:
            self._count(handle.report)
        self._block(exchange.handles, exchange.whole_at)

    def add_averages(self, handles: Sequence[Handle], started: float) -> None:
        """Operations outside a step, which was waited for since they were started."""
        for handle in handles:
            self._count(handle.report)
        self._block(handles, started)

    def _block(self, handles: Sequence[Handle], since: float) -> None:
        """A moment in which two operations worked, as a small one may beside a large one, counts for the first."""
        whole = max((handle.ended or since for handle in handles), default=since) - since
        worked = dict.fromkeys(("encode", "decode", "update"), 0.0)
        counted = since
        for start, stop, phase in sorted((s.start, s.stop, s.phase) for handle in handles for s in handle.report.spans):
            if phase in worked:
                worked[phase] += max(0.0, stop - max(start, counted))
                counted = max(counted, stop)
        for phase, seconds in {**worked, "exchange": max(0.0, whole - sum(worked.values()))}.items():
            self.blocked[phase] = self.blocked.get(phase, 0.0) + seconds

    def _count(self, report: Report) -> None:
        self.bytes_sent += report.bytes_sent
        self.last_bytes_sent += report.bytes_sent
        self.messages += report.messages
        self.algorithms[report.algorithm] = self.algorithms.get(report.algorithm, 0) + 1
        for phase, seconds in report.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
