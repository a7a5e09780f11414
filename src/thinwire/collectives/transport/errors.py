"""Errors between ranks, and what ranks write for each other so that these name the ranks at fault.

Every error names the operation, the rank that reports it, and the ranks at fault. A notice is the text of an error. A
record is the text of the operation that a rank is at; the difference of records is an error.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


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


_KINDS = {kind.__name__: kind for kind in (CollectiveError, MismatchError, PeerError)}


@dataclass(frozen=True)
class Record:
    """Operation `number` of a rank: the arguments `call`, or the reason why the rank `refused` it.

    >>> Record.read(Record(7, {"dtype": "float32"}).text)
    Record(number=7, call={'dtype': 'float32'}, refused=None)
    """

    number: int
    call: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None

    @property
    def text(self) -> str:
        return json.dumps([self.number, self.call, self.refused])

    @staticmethod
    def read(text: bytes | str) -> "Record | None":
        """Return the record with this JSON text, or None if it is not the text of a record."""
        try:
            number, call, refused = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            return None
        fits = type(number) is int and isinstance(call, dict) and isinstance(refused, str | None)
        fits = fits and isinstance(call.get("call", ""), str)
        return Record(number, call, refused) if fits else None


def write_notice(error: CollectiveError) -> str:
    """Return the text by which an error reaches the other ranks."""
    return json.dumps({"kind": type(error).__name__, "message": str(error), "ranks": error.ranks})


def read_notice(text: str) -> CollectiveError | None:
    """Return the error with this text, or None if it is not one that thinwire writes."""
    try:
        found = json.loads(text)
        kind, message, ranks = _KINDS[found["kind"]], found["message"], found["ranks"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    fits = isinstance(message, str) and isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
    return kind(message, ranks) if fits else None


def difference(records: Mapping[int, Record]) -> MismatchError:
    """Return an error that lists the arguments that differ, and the ranks that called with each of them.

    >>> print(difference({0: Record(1, {"op": "SUM"}), 1: Record(1, {"op": "AVG"}), 2: Record(1, {"op": "SUM"})}))
    ranks called with different arguments: op 'SUM' on ranks 0, 2, 'AVG' on rank 1
    """
    refused = [f"rank {rank}: {record.refused}" for rank, record in records.items() if record.refused is not None]
    if refused:
        at_fault = [rank for rank, record in records.items() if record.refused is not None]
        return MismatchError(f"the call was refused by {'; '.join(refused)}", at_fault)
    calls = {rank: record.call.get("call", "all_reduce_compressed") for rank, record in records.items()}
    if len(set(calls.values())) > 1:  # their other arguments have nothing in common
        records = {rank: Record(0, {"call": call}) for rank, call in calls.items()}
    parts, odd = [], set()
    for name in dict.fromkeys(name for record in records.values() for name in record.call):
        by_value: dict[str, list[int]] = {}
        for rank, record in records.items():
            by_value.setdefault(repr(record.call.get(name)), []).append(rank)
        if len(by_value) > 1:
            parts.append(f"{name} " + ", ".join(f"{value} on {rank_list(ranks)}" for value, ranks in by_value.items()))
            most = max(map(len, by_value.values()))
            majority = [ranks for ranks in by_value.values() if len(ranks) == most]
            odd |= {r for ranks in by_value.values() for r in ranks if len(majority) > 1 or ranks is not majority[0]}
    return MismatchError(f"ranks called with different arguments: {'; '.join(parts)}", odd)


def rank_list(ranks: list[int]) -> str:
    """Return a text such as `rank 3` or `ranks 0, 2`. It names at most eight ranks, and the number of the others."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
