"""A group whose ranks may leave and join, after any exchange, without a restart.

gloo's groups cannot change. So each set of members has connections of its own, and after every exchange the members
agree, by one entry in a store, whether the exchange counts and who takes part in the next one:

    all have received everything, and each knows it of all    ->  it counts; those who want to leave are
                                                                     out, and newcomers are in
    anything else: a rank died, stopped, or cannot be reached    ->  a roll call; the exchange is void, and
                                                                     those who answered repeat it

`decision/N` is written once, by whoever is first, and everybody does what it says: so all members of the next exchange
have applied the same ones. A member that is not in it has been left behind, and gets an error.

Keys of the store, below the name of the group:

    size, founder/RANK   the ranks that the group begins with
    beat/RANK            a number that a living member raises twice a second
    joins                how many have asked to join; the first gets the number after the founders
    admitted/RANK        the decision that admitted a newcomer
    here/N/RANK          the member has answered roll call N
    decision/N           the decision after exchange N
"""

import json
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from .transport.board import Board
from .transport.channel import Channel
from .transport.errors import PeerError, rank_list
from .transport.wire import Wire

_BEAT_SECONDS = 0.5
_NAMED_SECONDS = 2.0  # of silence, after which a rank is lost that an error has named
_POLL_SECONDS = 0.02
_DECISIONS_KEPT = 64
_LARGEST = 1 << 20  # number of ranks, or of exchanges, that is believed
MOST_ADMITTED = 8  # newcomers after one exchange


class Change(NamedTuple):
    """What the members have decided after an exchange."""

    counts: bool  # whether all have received everything; otherwise those who are left repeat the exchange
    lost: list[int]  # members before, which did not answer a roll call
    joined: list[int]  # newcomers, which have no common weights yet
    is_new: bool  # whether there are new connections: other members, or the same ones after an error
    ranks_before: int


class Decision(NamedTuple):
    """The entry of the store after an exchange: who takes part in the next one, who wanted to leave, who is new."""

    counts: bool
    members: list[int]
    left: list[int]
    joined: list[int]

    @staticmethod
    def read(text: str) -> "Decision":
        try:
            counts, *lists = json.loads(text)
            members, left, joined = (list(ranks) for ranks in lists)
            if type(counts) is bool and all(type(rank) is int for rank in (*members, *left, *joined)):
                return Decision(counts, members, left, joined)
        except (ValueError, TypeError, RecursionError):
            pass
        raise PeerError(f"the store of the group has a decision that no rank wrote: {text[:80]!r}")


class ElasticGroup:
    """The ranks of a `LocalSteps`, some of which may die, leave or join while the others go on.

    store      a store that all ranks reach, such as `torch.distributed.TCPStore`. It must outlive every rank: training
               ends if its host dies. Under torchrun the agent's store does: connect to MASTER_ADDR and MASTER_PORT.
    rank, size   of the ranks that training begins with; all of them must come. None: this is a newcomer, which gets the
               next number and takes part after the exchange that admits it.
    name       a name for each group on the same store.
    timeout    seconds that an exchange waits for a rank that is alive but late. The others go on without it then.
    patience   seconds without a sign of life after which a rank is lost.

    `rank` is the place among the members, as in a process group, and changes; `number` is this rank's own number, by
    which messages name it. `events` lists who was lost, left and joined.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int | None = None,
        size: int | None = None,
        name: str = "default",
        timeout: float = 300.0,
        patience: float = 10.0,
    ) -> None:
        if not isinstance(store, dist.Store):  # type: ignore[attr-defined]
            raise ValueError(f"store of type {type(store).__name__}, expected one such as torch.distributed.TCPStore")
        if (rank is None) != (size is None):
            raise ValueError(f"rank {rank!r} and size {size!r}, expected both, or none of them for a newcomer")
        if rank is not None and not (type(rank) is int and type(size) is int and 0 <= rank < size):
            raise ValueError(f"rank {rank!r} of {size!r}, expected whole numbers, and a rank from 0 to below the size")
        for option, given in (("timeout", timeout), ("patience", patience)):
            if type(given) not in (int, float) or not 0 < given < float("inf"):
                raise ValueError(f"{option} {given!r}, expected seconds above 0")
        self.timeout, self.patience = float(timeout), float(patience)
        self.events: list[str] = []
        own = store.clone() if hasattr(store, "clone") else store  # so that threads here never wait for the program's
        self._board, self._name = Board(f"thinwire/elastic/{name}", None, own), name
        self._exchange = 0  # number of exchanges that were decided
        self._unchanged: list[int] = []  # the last decisions by which no member changed
        self._wants_to_leave = self.has_left = False
        self._seen: dict[int, tuple[str | None, float]] = {}  # last signs of life, and when they were first seen
        self._asleep: set[int] = set()  # ranks that were here or asked to join, and have given no sign of life since
        self.members: tuple[int, ...] = ()
        self._channel: ElasticChannel | None = None
        self._stop_beating = threading.Event()
        if rank is None or size is None:
            self.ask_to_join()
        else:
            self._found(rank, size)

    def __repr__(self) -> str:
        return f"ElasticGroup(rank {self.number}, members {', '.join(map(str, self.members))})"

    @property
    def is_newcomer(self) -> bool:
        return not self.members

    @property
    def rank(self) -> int:
        if self.number not in self.members:
            raise RuntimeError("this rank is no member: it has left, or was left behind")
        return self.members.index(self.number)

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def channel(self) -> Channel:
        if self._channel is None:
            raise RuntimeError("this rank is no member: it has left, or thinwire.LocalSteps was not made for it yet")
        return self._channel

    def leave(self) -> None:
        """Leave after the next exchange, in which this rank still takes part; `has_left` is True then."""
        self._wants_to_leave = True

    def close(self) -> None:
        """Leave at once, as if this rank had died: the others find out in their next exchange."""
        self._stop_beating.set()
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def wishes(self) -> list[int]:
        """Return whether this rank leaves and, from the first member, the newcomers that it would admit."""
        admitted: list[int] = []
        if self.rank == 0:
            first, joins = self._number("size"), self._number("joins")
            numbers = (n for n in range(first, first + joins) if n not in self.members and n not in self._asleep)
            absent = [n for n in numbers if self._board.read(f"admitted/{n}") is None]  # else it was here before
            admitted = [number for number in absent if self._is_awake(number)][:MOST_ADMITTED]
        return [int(self._wants_to_leave), *admitted, *[0] * (MOST_ADMITTED - len(admitted))]

    def decide(self, left: Sequence[int], joined: Sequence[int]) -> Change:
        """Decide that an exchange counts, after every member has the receipts of all."""
        members = [member for member in self.members if member not in left]
        joined = joined if members else ()  # nobody could give them the weights
        members += joined
        return self._follow(Decision(True, members, list(left), list(joined)))

    def call_roll(self, named: Collection[int] = ()) -> Change:
        """Decide that the exchange is void, and who is left: all that answer or live; less patience for `named`."""
        assert self.number in self.members
        number, started = self._exchange + 1, time.monotonic()
        self._board.write(f"here/{number}/{self.number}", "yes")
        while self._board.read(f"decision/{number}") is None and self._board.lost is None:
            absent = [m for m in self.members if self._board.read(f"here/{number}/{m}") is None]
            alive = [m for m in absent if self._silence(m) < (_NAMED_SECONDS if m in named else self.patience)]
            if not alive or time.monotonic() > started + self.timeout:
                return self._follow(Decision(False, [m for m in self.members if m not in absent], [], []))
            time.sleep(_POLL_SECONDS)
        return self._follow(None)

    def ask_to_join(self) -> None:
        """Ask to join, as a newcomer with a number of its own, which is no other's before or after it."""
        self.close()
        self.members = ()
        if self._missing("size"):
            raise PeerError(f"there is no group named {self._name!r} on this store after {self.timeout:g} s")
        self._begin(self._number("size") + self._board.count("joins") - 1)

    def wait_for_admission(self) -> list[int]:
        """Wait until the members admit this rank, and answer their roll call; return all newcomers."""
        if self._missing(f"admitted/{self.number}"):
            raise PeerError(
                f"nobody has admitted rank {self.number} within {self.timeout:g} s: newcomers are admitted when a "
                f"round ends; is the training of the group {self._name!r} under way, and is `timeout` longer than "
                "two rounds?"
            )
        exchange = self._number(f"admitted/{self.number}")
        admitted = self._decision(exchange)
        self._exchange, self.members = exchange, tuple(admitted.members)
        self.call_roll()
        return admitted.joined

    def find_silent(self) -> PeerError | None:
        for member in self.members:
            if member != self.number and self._silence(member) > self.patience:
                return PeerError(f"rank {member} is lost: no sign of life for {self.patience:g} s", [member])
        return None

    def _follow(self, proposed: Decision | None) -> Change:
        number, before = self._exchange + 1, self.members
        found = self._decision(number, proposed)
        self._exchange, self.members = number, tuple(found.members)
        left = [member for member in before if member in found.left]
        lost = [member for member in before if member not in (*self.members, *left)]
        is_new = bool(found.joined or left or lost) or not found.counts
        others_lost = [member for member in lost if member != self.number]
        for what, ranks in (("is lost", others_lost), ("left", left), ("joined", found.joined)):
            self.events += [f"exchange {number}: rank {member} {what}" for member in ranks]
        if self.number not in self.members:
            self.close()
            self.has_left = self.number in left
            if not self.has_left:
                raise PeerError(
                    f"the others went on without rank {self.number}, which they had not heard from for "
                    f"{self.patience:g} s, or which was late by {self.timeout:g} s: start it again as a newcomer"
                )
        elif is_new:
            for member in found.joined:
                self._board.write(f"admitted/{member}", str(number))
            self._connect()
        if not is_new:  # the others stay: they tell a rank that wakes up late that it was left behind
            self._unchanged.append(number)
        if len(self._unchanged) > _DECISIONS_KEPT:
            self._board.delete(f"decision/{self._unchanged.pop(0)}")
        return Change(found.counts, lost, found.joined, is_new, ranks_before=len(before))

    def _decision(self, number: int, proposed: Decision | None = None) -> Decision:
        key = f"decision/{number}"
        text = self._board.read(key) if proposed is None else self._board.write_once(key, json.dumps(proposed))
        if text is None:
            raise self._without_store()
        return Decision.read(text)

    def _without_store(self) -> PeerError:
        return PeerError(
            f"the store of the group {self._name!r} does not answer, so its host is lost ({self._board.lost}): ranks "
            "cannot agree on who is left; start all of them again, from a checkpoint"
        )

    def _connect(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = ElasticChannel(self, self._board.below(f"link/{self._exchange}"))

    # Signs of life.

    def _number(self, key: str) -> int:
        text = self._board.read(key) or "0"
        if not text.isdecimal() or int(text) > _LARGEST:
            raise PeerError(f"the store of the group has {text[:40]!r} as {key}, which no rank wrote")
        return int(text)

    def _is_awake(self, number: int) -> bool:
        before = self._seen.get(number)
        if self._silence(number) > self.patience:
            self._asleep.add(number)
        return before is not None and before[0] is not None and self._seen[number] != before

    def _silence(self, member: int) -> float:
        """Return the seconds for which a rank has given no sign of life, since it was first looked for."""
        now, beat = time.monotonic(), self._board.read(f"beat/{member}")
        if member not in self._seen or self._seen[member][0] != beat:
            self._seen[member] = beat, now
        return now - self._seen[member][1]

    def _found(self, rank: int, size: int) -> None:
        """Begin as one of the first ranks, and wait for the others."""
        if self._board.count(f"founder/{rank}") != 1 and self._board.lost is None:
            raise ValueError(
                f"rank {rank} of a group named {self._name!r} was there before, on the same store: give each group a "
                "name of its own; a rank that comes back is a newcomer, without rank= and size="
            )
        there = self._board.write_once("size", str(size))
        if there is not None and there != str(size):
            raise ValueError(f"size {size}, but other ranks of the group {self._name!r} have {there}")
        self._begin(rank)
        beats = [f"beat/{founder}" for founder in range(size)]
        if late := [beats.index(beat) for beat in self._missing(*beats)]:
            raise PeerError(f"{rank_list(late)} did not come within {self.timeout:g} s", late)
        self.members = tuple(range(size))
        self._connect()

    def _begin(self, number: int) -> None:
        self.number, self._stop_beating = number, threading.Event()
        ended = self._stop_beating
        threading.Thread(target=_beat, args=(self._board, number, ended), name="thinwire-beat", daemon=True).start()
        weakref.finalize(self, ended.set)

    def _missing(self, *keys: str) -> list[str]:
        """Wait until the store has these keys, for the timeout at most. Return those that it does not have then."""
        deadline = time.monotonic() + self.timeout
        while missing := [key for key in keys if self._board.read(key) is None]:
            if self._board.lost is not None:
                raise self._without_store()
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        return missing


class ElasticChannel(Channel):
    """The connections of one set of members."""

    def __init__(self, group: ElasticGroup, board: Board) -> None:
        super().__init__(rank=group.rank, ranks=list(group.members), timeout=group.timeout, board=board, wire=Wire())
        self._members = weakref.ref(group)
        self._looked_at = 0.0

    def find_silent(self) -> PeerError | None:
        group, now = self._members(), time.monotonic()
        if group is None or now < self._looked_at + 1.0:
            return None
        self._looked_at = now
        return group.find_silent()


def _beat(board: Board, number: int, ended: threading.Event) -> None:
    count = 0
    while board.lost is None and not ended.is_set():
        count += 1
        board.write(f"beat/{number}", str(count))
        ended.wait(_BEAT_SECONDS)
