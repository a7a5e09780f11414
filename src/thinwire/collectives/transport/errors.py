"""What can go wrong between ranks. Every error names the operation, the rank that reports it, and who is at fault."""

from collections.abc import Iterable


class CollectiveError(RuntimeError):
    """An operation failed on every rank that took part in it. Tensors and residuals may be half done: restore both.

    After it, a call that all ranks make alike starts afresh, on new connections.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(set(ranks)))
        """Global ranks: those that are late or lost, or that called with something else."""
        self.found: CollectiveError | None = None
        """What was found, without the operation and the rank that reports it."""


class MismatchError(CollectiveError):
    """Ranks called with different compressors, shapes, dtypes, …, or one of them refused its input."""


class PeerError(CollectiveError):
    """A rank is late or lost."""
