"""What the ranks of a group write on its notice board about an operation: on its first use, and if something is wrong.

    here/RANK/SLOT    the record of the operation that the rank is at; written on the first use of a call, and by a rank
                      that has waited for a second, so that fast operations do not write it
    verdict/N         on first use, whether all ranks called with the same arguments; written by the last rank to arrive
    error/N           the error that ended the connections made at operation N; written by the first rank to find it

So ranks that disagree get an error that names them. A late rank can be distinguished from a waiting one. A failure on
one rank reaches the others at once.
"""

import json
import re
import time

from .channel import Channel, Connection
from .errors import CollectiveError, MismatchError, PeerError, Record, difference, rank_list, read_notice, write_notice
from .link import LinkBroken

PATIENCE_SECONDS = 1.0
_LONGEST_PATIENCE_SECONDS = 8.0  # between two looks for closed connections
_SLOTS = 4096  # `here` keys of each rank, which are reused
_AGREED = "agreed"


class Agreement:
    """The part of an `Operation` that uses the board, and finds out which rank is at fault."""

    channel: Channel
    name: str
    number: int
    _connection: Connection
    _timeout: float
    _deadline = 0.0
    _call = ""  # the arguments as JSON
    _draw: int | None = None
    _refused: str | None = None
    _arrived = _published = False
    _waits_for: int

    def refuse(self, reason: str) -> None:
        """Notify the other ranks that this rank does not take part, with the reason."""
        if self.channel.size > 1:
            self._refused = reason
            self._arrive()
            self._connection.fail(
                MismatchError(f"the call was refused by rank {self.channel.me}: {reason}", [self.channel.me])
            )

    def malformed(self, peer: int, reason: str) -> CollectiveError:
        """Return the error for a payload of `peer`, a rank of the group, that no compressor could have made."""
        rank = self.channel.ranks[peer]
        reason = f"rank {rank} sent a malformed payload: {reason}; rank {self.channel.me} did not use it"
        return self._failed(PeerError(reason, [rank]))

    def check_others(self) -> None:
        """Write the record of this rank, and check for errors on other ranks, while the exchange takes long."""
        if not self._published:
            self._write_here()
            self._published = True
        peer = self._waits_for
        theirs = self._read_here(peer)
        cause = self._connection.reported_error() or self.channel.find_silent()
        if cause is None and theirs is not None and theirs != self._record:
            cause = difference({self.channel.me: self._record, self.channel.ranks[peer]: theirs})
        if cause is not None:
            self._connection.fail(cause)

    def _agree(self) -> None:
        """Compare the arguments of all ranks. Raise an error that names those who differ, are late or lost."""
        board, pause = self.channel.board, 2e-4
        check_at, patience = time.monotonic() + PATIENCE_SECONDS, PATIENCE_SECONDS
        self._arrive()
        while (verdict := board.read(f"verdict/{self.number}")) is None:
            cause = self._connection.reported_error() or self.channel.find_silent()
            if cause is None and board.lost is not None:
                cause = self._without_store(board.lost)
            if cause is None and time.monotonic() > self._deadline:
                cause = self._missing()
            if cause is None and time.monotonic() > check_at:  # nothing is exchanged here that a dead rank would break
                cause, patience = self._closed(), min(2 * patience, _LONGEST_PATIENCE_SECONDS)
                check_at = time.monotonic() + patience
            if cause is not None:
                raise self._failed(cause)
            self.channel.pause(pause)
            pause = min(0.02, 1.5 * pause)
        if board.count(f"read/{self.number}") == self.channel.size:
            board.delete(f"verdict/{self.number}")
            board.delete(f"read/{self.number}")
        if verdict == _AGREED:
            cause = self._connection.reported_error()  # this rank may be so late that the others have given up
        else:
            unknown = PeerError(f"the group's store has a verdict that no rank wrote: {verdict[:80]!r}")
            cause = read_notice(verdict) or unknown
        if cause is not None:
            raise self._failed(cause)

    def _arrive(self) -> None:
        """Count this rank as arrived at this operation. The last rank to arrive compares the arguments of all ranks."""
        board, self._arrived = self.channel.board, True
        self._write_here()
        if board.count(f"arrived/{self.number}") != self.channel.size:
            return
        records = {self.channel.ranks[rank]: self._read_here(rank) for rank in range(self.channel.size)}
        calls, own = {rank: record for rank, record in records.items() if record is not None}, self._record
        agreed = all(record == own and record.refused is None for record in calls.values())
        board.write(f"verdict/{self.number}", _AGREED if agreed else write_notice(difference(calls)))
        board.delete(f"arrived/{self.number}")

    def _explained(self, error: LinkBroken | RuntimeError) -> CollectiveError:
        """End the connections after an error of the link. Return an error that names the ranks at fault."""
        known = self._connection.reported_error()
        if known is None and isinstance(error, LinkBroken):
            known = self._failure_of(error)
        elif known is None:  # connecting failed: gloo's message ends with a key, and that with the peer it did not find
            key = re.search(r"keys: \S*/(\d+)\s*$", str(error))
            peers = [self.channel.ranks[int(key[1])]] if key and int(key[1]) < self.channel.size else []
            known = self._lost(PeerError(f"cannot connect: {error}", peers))
        return self._failed(known)

    def _failure_of(self, broken: LinkBroken) -> CollectiveError:
        peer = self.channel.ranks[broken.peer]
        theirs = self._read_here(broken.peer)
        if theirs is not None and theirs != self._record:
            return difference({self.channel.me: self._record, peer: theirs})
        if not broken.late:
            lost = self.channel.board.lost
            if lost is not None and 0 in self.channel.ranks and 0 not in (peer, self.channel.me):
                # The peer may have closed its connections because of rank 0, and could not leave a notice.
                return self._without_store(f"{lost}; rank {peer}: {broken}")
            return PeerError(f"rank {peer} is lost: {broken}", [peer])
        how = "it has not reached this operation"
        if theirs is not None:
            how = "it has reached this operation, but is slow or waits for another rank"
        return PeerError(f"rank {peer} is late: nothing from it within {self._timeout:g} s; {how}", [peer])

    def _lost(self, found: CollectiveError) -> CollectiveError:
        """Return an error that names ranks without a record, where all live ranks fail and write one; else `found`."""
        self._write_here()
        end = time.monotonic() + 2 * PATIENCE_SECONDS
        while (gone := self._absent()) and time.monotonic() < end and self.channel.board.lost is None:
            self.channel.pause(0.02)
        if not gone or self.channel.board.lost is not None:
            return found
        return PeerError(f"{rank_list(gone)} lost: {found}", gone)

    def _missing(self) -> CollectiveError:
        late, end = self._absent(), time.monotonic() + 2 * PATIENCE_SECONDS
        if late:
            verb = "are" if len(late) > 1 else "is"
            return PeerError(f"{rank_list(late)} {verb} late: no call within {self._timeout:g} s", late)
        # All have come, and the last one has not compared their calls: it may have died just now.
        while (cause := self._closed()) is None and self._connection.connected and time.monotonic() < end:
            self.channel.pause(0.02)
        return cause or PeerError(f"no rank has compared the calls within {self._timeout:g} s")

    def _absent(self) -> list[int]:
        return [self.channel.ranks[rank] for rank in range(self.channel.size) if self._read_here(rank) is None]

    def _closed(self) -> CollectiveError | None:
        """Return an error that names a rank whose connection is closed, or one that a rank has reported; else None."""
        cause = self._connection.reported_error()
        if cause is None and self._connection.connected:
            try:
                self._connection.link(self._deadline).check()
            except LinkBroken as broken:
                cause = self._connection.reported_error() or self._failure_of(broken)
        return cause

    def _without_store(self, reason: str) -> PeerError:
        """Return the error after the store was lost. Usually rank 0 runs it, or an agent that ends together with it."""
        if 0 in self.channel.ranks and self.channel.me != 0:
            return PeerError(f"rank 0 is lost, and with it the group's store: {reason}", [0])
        return PeerError(f"the group's store does not answer, so the rank that runs it is lost: {reason}")

    def _failed(self, cause: CollectiveError) -> CollectiveError:
        """End the connections, and return their first error as that of this operation."""
        return self._error(self._connection.fail(cause))

    def _error(self, cause: CollectiveError, before: str = "") -> CollectiveError:
        error = type(cause)(f"{self.name} #{self.number} on rank {self.channel.me}: {before}{cause}", cause.ranks)
        error.found = cause
        return error

    def _write_here(self) -> None:
        self.channel.board.write(f"here/{self.channel.rank}/{self.number % _SLOTS}", self._record.text)

    def _read_here(self, rank: int) -> Record | None:
        text = self.channel.board.read(f"here/{rank}/{self.number % _SLOTS}")
        record = None if text is None else Record.read(text)
        return record if record is not None and record.number == self.number else None

    @property
    def _record(self) -> Record:
        """Return what this rank writes on the board, if it comes to that."""
        if self._refused is not None or not self._call:
            return Record(self.number, refused=self._refused)
        since = {"connected since operation": self._connection.number}
        drawn = {} if self._draw is None else {"key": self._draw}
        return Record(self.number, {**json.loads(self._call), **drawn, **since})
