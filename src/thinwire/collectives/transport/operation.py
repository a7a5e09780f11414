"""One call on one group. All ranks compare their arguments before they exchange the first byte.

Ranks use these keys on the notice board of the group:

    here/RANK/SLOT    the record of the operation that the rank is at; written on the first use of a call, and by a rank
                      that has waited for a second, so that fast operations do not write it
    verdict/N         on first use, whether all ranks called with the same arguments; written by the last rank to arrive
    error/N           the error that ended the connections made at operation N; written by the first rank to find it

So ranks that disagree get an error that names them. A late rank can be distinguished from a waiting one. A failure on
one rank reaches the others at once.
"""

import itertools
import json
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

from .channel import Channel
from .errors import CollectiveError, MismatchError, PeerError
from .link import Buffers, LinkBroken, Seen, Wait
from .records import Record, difference, rank_list, read_notice
from .watch import PATIENCE_SECONDS, watch

_SLOTS = 4096  # `here` keys of each rank, which are reused
_LONGEST_PATIENCE_SECONDS = 8.0  # between two looks for closed connections


class Operation:
    """One call on one group, from its number to its last byte."""

    def __init__(self, channel: Channel, name: str = "all_reduce_compressed") -> None:
        self.channel, self.name = channel, name
        self.number, self._connection = channel.next()
        self._timeout = channel.timeout
        self._call: dict[str, Any] = {}
        self._draw: int | None = None
        self._refused: str | None = None
        self._first_use, self._tag = False, 0
        self._deadline = 0.0
        self._exchanges = itertools.count()
        self._arrived = self._published = False
        self._waits_for = (channel.rank + 1) % channel.size
        self.bytes_sent = self.bytes_received = self.messages = 0

    def limit(self, timeout: float | None) -> None:
        """Set the timeout in seconds, counted from `start`. None keeps the timeout of the group."""
        self._timeout = self._timeout if timeout is None else timeout

    def restart(self) -> None:
        self._deadline = time.monotonic() + self._timeout

    def describe(self, call: dict[str, Any], text: str, draw: int | None) -> None:
        """Set the arguments that must be the same on all ranks, by name and as JSON, and a key that may change."""
        self._call, self._draw = call, draw
        self._first_use = text not in self._connection.agreed
        self._connection.agreed.add(text)
        # 12 bits of the number, 3 for each exchange, 16 by the arguments: calls that differ are not matched.
        digest = zlib.crc32(f"{draw} {self._connection.number}".encode(), zlib.crc32(text.encode()))
        self._tag = self.number % 4096 << 19 | digest & 0xFFFF

    def refuse(self, reason: str) -> None:
        """Notify the other ranks that this rank does not take part, with the reason."""
        if self.channel.size > 1:
            self._refused = reason
            self.__dict__.pop("_record", None)
            self._arrive()
            self._connection.fail(MismatchError(f"the call was refused by rank {self._me}: {reason}", [self._me]))

    def start(self) -> None:
        """Start the timeout, and on first use compare the arguments with the other ranks."""
        self._deadline = time.monotonic() + self._timeout
        if self.channel.size == 1:
            return
        cause = self._connection.cause
        if cause is not None:
            self.refuse(f"an earlier operation failed: {cause}")
            raise self._error(cause, "an earlier operation failed: ")
        if self._first_use:
            self._agree()

    @property
    def waits_for_all(self) -> bool:
        """Return whether this operation first waits for all ranks, to compare arguments or to connect."""
        return self.channel.size > 1 and (self._first_use or not self._connection.connected)

    @property
    def failure(self) -> CollectiveError | None:
        cause = self._connection.cause
        return None if cause is None else self._error(cause)

    def post(self, sends: Buffers, receives: Buffers) -> Wait:
        """Start to send and receive all buffers. Return a function for `collect`, or raise the same errors."""
        tag = self._tag | next(self._exchanges) % 8 << 16
        if not any(buffer.numel() for buffers in (sends, receives) for buffer in buffers.values()):
            return lambda deadline, waits_for: Seen(sends, receives)
        with self._naming_failures():
            wait = self._connection.link(self._deadline).post(sends, receives, tag)
        self.bytes_sent += sum(buffer.numel() for buffer in sends.values())
        self.bytes_received += sum(buffer.numel() for buffer in receives.values())
        self.messages += sum(buffer.numel() > 0 for buffer in sends.values())
        return wait

    def collect(self, wait: Wait) -> Seen:
        """Wait for a posted exchange. If it fails, raise a `CollectiveError` on every rank."""
        if self.channel.size == 1:
            return wait(self._deadline, self._set_peer)
        watch.begin(self)  # only the exchange that is waited for, to limit the requests to the store
        try:
            with self._naming_failures():
                return wait(self._deadline, self._set_peer)
        finally:
            watch.end(self)

    @contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """If the link breaks, raise an error that names the ranks at fault, and notify the other ranks."""
        try:
            yield
        except LinkBroken as broken:
            cause = self._connection.cause or self._connection.reported_error() or self._failure_of(broken)
            raise self._error(self._connection.fail(cause)) from broken
        except RuntimeError as error:  # connecting failed
            known = self._connection.cause or self._connection.reported_error()
            if known is None:  # gloo's message ends with a key, and the key with the peer that it could not connect to
                key = re.search(r"keys: \S*/(\d+)\s*$", str(error))
                peers = [self.channel.ranks[int(key[1])]] if key and int(key[1]) < self.channel.size else []
                known = self._lost(PeerError(f"cannot connect: {error}", peers))
            raise self._error(self._connection.fail(known)) from error

    def malformed(self, peer: int, reason: str) -> CollectiveError:
        """Return the error for a payload of `peer`, a rank of the group, that no compressor could have made."""
        rank = self.channel.ranks[peer]
        found = PeerError(f"rank {rank} sent a malformed payload: {reason}; rank {self._me} did not use it", [rank])
        return self._error(self._connection.fail(found))

    def give_up(self, error: BaseException) -> CollectiveError:
        """End this operation with an error from this rank or from another group, and notify the other ranks."""
        watch.end(self)
        found = error.found if isinstance(error, CollectiveError) else None
        cause = found or CollectiveError(f"rank {self._me} gave up: {error!r}", [self._me])
        if self.channel.size > 1:
            cause = self._connection.fail(cause)
            if not self._arrived:  # a rank on new connections would wait for this one to arrive
                self.refuse(str(cause))
        return self._error(cause)

    def _closed(self) -> CollectiveError | None:
        """Return an error that names a rank whose connection is closed, or one that a rank has reported; else None."""
        end = time.monotonic() + 2 * PATIENCE_SECONDS
        while (cause := self._closed_now()) is None and self._connection.connected and time.monotonic() < end:
            self.channel.pause(0.02)
        return cause

    def _closed_now(self) -> CollectiveError | None:
        cause = self._connection.reported_error()
        if cause is None and self._connection.connected:
            try:
                self._connection.link(self._deadline).check()
            except LinkBroken as broken:
                cause = self._connection.reported_error() or self._failure_of(broken)
        return cause

    def _lost(self, found: CollectiveError) -> CollectiveError:
        """Return an error that names ranks without a record, where all live ranks fail and write one; else `found`."""
        self._write_here()
        end = time.monotonic() + 2 * PATIENCE_SECONDS
        while (gone := self._absent()) and time.monotonic() < end and self.channel.board.lost is None:
            self.channel.pause(0.02)
        if not gone or self.channel.board.lost is not None:
            return found
        return PeerError(f"{rank_list(gone)} lost: {found}", gone)

    def _absent(self) -> list[int]:
        return [self.channel.ranks[rank] for rank in range(self.channel.size) if self._read_here(rank) is None]

    def check_others(self) -> None:
        """Write the record of this rank, and check for errors on other ranks, while the exchange takes long."""
        if not self._published:
            self._write_here()
            self._published = True
        peer = self._waits_for
        theirs = self._read_here(peer)
        cause = self._connection.reported_error() or self.channel.find_silent()
        if cause is None and theirs is not None and theirs != self._record:
            cause = difference({self._me: self._record, self.channel.ranks[peer]: theirs})
        if cause is not None:
            self._connection.fail(cause)

    def _agree(self) -> None:
        board, pause = self.channel.board, 2e-4
        check_at, patience = time.monotonic() + PATIENCE_SECONDS, PATIENCE_SECONDS
        self._arrive()
        while (verdict := board.read(f"verdict/{self.number}")) is None:
            cause = self._connection.cause or self._connection.reported_error() or self.channel.find_silent()
            if cause is None and board.lost is not None:
                cause = self._without_store(board.lost)
            if cause is None and time.monotonic() > self._deadline:
                cause = self._missing()
            if cause is None and time.monotonic() > check_at:  # nothing is exchanged here that a dead rank would break
                cause, patience = self._closed_now(), min(2 * patience, _LONGEST_PATIENCE_SECONDS)
                check_at = time.monotonic() + patience
            if cause is not None:
                raise self._error(self._connection.fail(cause))
            self.channel.pause(pause)
            pause = min(0.02, 1.5 * pause)
        if board.count(f"read/{self.number}") == self.channel.size:
            board.delete(f"verdict/{self.number}")
            board.delete(f"read/{self.number}")
        found = read_notice(verdict)
        if found is None:
            cause = PeerError(f"the group's store has a verdict that no rank wrote: {verdict[:80]!r}", [])
        else:
            cause = MismatchError(found["message"], found["ranks"]) if found else self._connection.reported_error()
        if cause is not None:  # a mismatch, or this rank is so late that the others have given up
            raise self._error(self._connection.fail(cause))

    def _arrive(self) -> None:
        """Count this rank as arrived at this operation. The last rank to arrive compares the arguments of all ranks."""
        board, self._arrived = self.channel.board, True
        self._write_here()
        if board.count(f"arrived/{self.number}") != self.channel.size:
            return
        records = {self.channel.ranks[rank]: self._read_here(rank) for rank in range(self.channel.size)}
        calls = {rank: record for rank, record in records.items() if record is not None}
        found = {}
        if any(record != self._record or record.refused is not None for record in calls.values()):
            error = difference(calls)
            found = {"message": str(error), "ranks": error.ranks}
        board.write(f"verdict/{self.number}", json.dumps(found))
        board.delete(f"arrived/{self.number}")

    def _missing(self) -> CollectiveError:
        late = self._absent()
        if not late:  # all have come, and the last one has not compared their calls
            return self._closed() or PeerError(f"no rank has compared the calls within {self._timeout:g} s")
        verb = "are" if len(late) > 1 else "is"
        return PeerError(f"{rank_list(late)} {verb} late: no call within {self._timeout:g} s", late)

    def _without_store(self, reason: str) -> PeerError:
        """Return the error after the store was lost. Usually rank 0 runs it, or an agent that ends together with it."""
        if 0 in self.channel.ranks and self._me != 0:
            return PeerError(f"rank 0 is lost, and with it the group's store: {reason}", [0])
        return PeerError(f"the group's store does not answer, so the rank that runs it is lost: {reason}")

    def _failure_of(self, broken: LinkBroken) -> CollectiveError:
        peer = self.channel.ranks[broken.peer]
        theirs = self._read_here(broken.peer)
        if theirs is not None and theirs != self._record:
            return difference({self._me: self._record, peer: theirs})
        if not broken.late:
            lost = self.channel.board.lost
            if lost is not None and 0 in self.channel.ranks and 0 not in (peer, self._me):
                # The peer may have closed its connections because of rank 0, and could not leave a notice.
                return self._without_store(f"{lost}; rank {peer}: {broken}")
            return PeerError(f"rank {peer} is lost: {broken}", [peer])
        how = "it has not reached this operation"
        if theirs is not None:
            how = "it has reached this operation, but is slow or waits for another rank"
        return PeerError(f"rank {peer} is late: nothing from it within {self._timeout:g} s; {how}", [peer])

    def _error(self, cause: CollectiveError, before: str = "") -> CollectiveError:
        where = f"{self.name} #{self.number} on rank {self._me}"
        error = type(cause)(f"{where}: {before}{cause}", cause.ranks)
        error.found = cause
        return error

    def _write_here(self) -> None:
        self.channel.board.write(f"here/{self.channel.rank}/{self.number % _SLOTS}", self._record.text)

    def _read_here(self, rank: int) -> Record | None:
        text = self.channel.board.read(f"here/{rank}/{self.number % _SLOTS}")
        record = None if text is None else Record.read(text)
        return record if record is not None and record.number == self.number else None

    def _set_peer(self, peer: int) -> None:
        self._waits_for = peer

    @cached_property
    def _record(self) -> Record:
        """What this rank writes on the board, if it comes to that."""
        if self._refused is not None or not self._call:
            return Record(self.number, refused=self._refused)
        since = {"connected since operation": self._connection.number}
        return Record(self.number, {**self._call, **({} if self._draw is None else {"key": self._draw}), **since})

    @property
    def _me(self) -> int:
        return self.channel.ranks[self.channel.rank]


@contextmanager
def refusing(operations: Sequence[Operation]) -> Iterator[None]:
    """Notify the other ranks if the `with` block raises an error, so that they do not wait for this rank."""
    try:
        yield
    except Exception as error:
        for operation in operations:
            operation.refuse(str(error))
        raise


def check_timeout(timeout: float | timedelta | None) -> float | None:
    """Return a timeout in seconds, or None. Raise ValueError unless it is above 0 and finite."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
        raise ValueError(f"timeout {timeout!r}, expected seconds above 0, or a timedelta")
    return seconds
