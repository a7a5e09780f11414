"""Statistics of a synchronizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..collectives import Handle, Report
from .step import Step


@dataclass
class SyncStats:
    """Counts, bytes and times of a synchronizer on this rank."""

    steps: int = 0  # that were not skipped
    skipped: int = 0  # because some rank's gradient was not finite
    skipped_in_a_row: int = 0  # since the last step that was taken
    bytes_sent: int = 0
    bytes_dense: int = 0  # of a dense ring all-reduce of the same gradients
    bytes_between_nodes: int = 0  # part of `bytes_sent`; with one group, all of it
    bytes_dense_between_nodes: int = 0  # if this rank's share of the gradients had been sent dense
    warmup_bytes_sent: int = 0  # until the end of the warm-up, and of the trials of "auto"
    warmup_bytes_dense: int = 0
    refreshes: int = 0  # averages of the ranks' second moments, by AdamW
    last_bytes_sent: int = 0  # in the last step, and in averages after it
    messages: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of encode, exchange, decode and update, summed over operations, which overlap."""
    blocked: dict[str, float] = field(default_factory=dict)
    """Seconds after the last gradient in which the step waited, by phase: encode, decode, update and exchange."""
    algorithms: dict[str, int] = field(default_factory=dict)  # number of operations

    @property
    def reduction(self) -> float:
        """Return the dense bytes divided by the bytes sent, over the whole run; 1.0 before the first step."""
        return _reduction(self.bytes_dense, self.bytes_sent)

    @property
    def reduction_after_warmup(self) -> float:
        """Return the same for the steps after the warm-up; 1.0 before the first of them."""
        return _reduction(self.bytes_dense - self.warmup_bytes_dense, self.bytes_sent - self.warmup_bytes_sent)

    @property
    def reduction_between_nodes(self) -> float:
        """Return the same for what is sent between nodes; with one group, the same as `reduction`."""
        return _reduction(self.bytes_dense_between_nodes, self.bytes_between_nodes)

    @property
    def bytes_inside_nodes(self) -> int:
        """Return the bytes that this rank has sent inside its node, where nothing is compressed."""
        return self.bytes_sent - self.bytes_between_nodes

    def add(self, step: Step, *, warms_up: bool = False) -> None:
        """Count a step that was taken or skipped; `warms_up` if it is one of the warm-up."""
        counts = step.finite is not False
        self.steps, self.skipped = self.steps + counts, self.skipped + (not counts)
        self.skipped_in_a_row = 0 if counts else self.skipped_in_a_row + 1
        self.last_bytes_sent = 0
        self.bytes_dense += step.bytes_dense
        self.bytes_dense_between_nodes += step.bytes_dense_between_nodes
        for report in step.reports:
            self._count(report)
        if warms_up:
            self.warmup_bytes_sent, self.warmup_bytes_dense = self.bytes_sent, self.bytes_dense
        self._add_blocked({**_worked(step.reports, step.closed_at), "exchange": step.waited})

    def add_averages(self, handles: Sequence[Handle], started: float) -> None:
        """Count operations outside a step, for which the caller has waited since `started`."""
        for handle in handles:
            self._count(handle.report)
        if self.bytes_dense == self.warmup_bytes_dense:  # averages at the end of the warm-up are a part of it
            self.warmup_bytes_sent = self.bytes_sent
        whole = max((handle.ended or started for handle in handles), default=started) - started
        worked = _worked([handle.report for handle in handles], started)
        self._add_blocked({**worked, "exchange": max(0.0, whole - sum(worked.values()))})

    def _add_blocked(self, seconds: Mapping[str, float]) -> None:
        for phase, more in seconds.items():
            self.blocked[phase] = self.blocked.get(phase, 0.0) + more

    def _count(self, report: Report) -> None:
        self.bytes_sent += report.bytes_sent
        self.bytes_between_nodes += report.bytes_between_nodes
        self.last_bytes_sent += report.bytes_sent
        self.messages += report.messages
        self.algorithms[report.algorithm] = self.algorithms.get(report.algorithm, 0) + 1
        for phase, start, stop in report.spans:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + stop - start


def _reduction(dense: int, sent: int) -> float:
    return dense / sent if sent else 1.0


def _worked(reports: Sequence[Report], since: float) -> dict[str, float]:
    """Return the seconds of computing since a time, by phase; where two operations overlap, the first one counts."""
    worked = dict.fromkeys(("encode", "decode", "update"), 0.0)
    counted = since
    for start, stop, phase in sorted((s.start, s.stop, s.phase) for report in reports for s in report.spans):
        if phase in worked:
            worked[phase] += max(0.0, stop - max(start, counted))
            counted = max(counted, stop)
    return worked
