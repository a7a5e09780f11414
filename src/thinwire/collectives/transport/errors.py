"""Errors between ranks. Every error names the operation, the rank that reports it, and the ranks at fault."""

from collections.abc import Iterable


class CollectiveError(RuntimeError):
    """An operation failed on every rank that took part in it. Restore tensors and residuals: they may be half updated.

    The next call that all ranks make with the same arguments works again, on new connections.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(set(ranks)))
        """Global ranks at fault: late, lost, failed, or called with different arguments."""
        self.found: CollectiveError | None = None  # the same, without the operation and the reporting rank


class MismatchError(CollectiveError):
    """Ranks called with different compressors, shapes, dtypes, …, or a rank refused its input."""


class PeerError(CollectiveError):
    """A rank is late or lost, or sent a malformed payload."""
