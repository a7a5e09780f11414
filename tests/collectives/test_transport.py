"""The thread that sends and receives for a group: what it posts, what it waits for, and in which order.

And with ranks: several all-reduces under way, of which ranks have different ones; no ranks wait in a circle. The notice
board of a group, and ranks that send to one of them in turn.
"""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from support.by_threads import by_threads
from support.calls import is_right, start
from support.training import raises
from thinwire import CollectiveError
from thinwire.collectives import LocalGroup
from thinwire.collectives.groups import channels
from thinwire.collectives.stream import stream
from thinwire.collectives.transport.board import Board
from thinwire.collectives.transport.wire import AT_ONCE, Wire
from thinwire.testing import RankPool, store_barrier

SECONDS = 30.0


class Holding:
    """Keeps the wire busy until it is let go, so that all that is submitted meanwhile is there at once."""

    encoded, waits_for_all, has_two_rounds = True, False, True

    def __init__(self, wire: Wire) -> None:
        self.begun, self.free = threading.Event(), threading.Event()
        wire.submit(self)
        assert self.begun.wait(SECONDS)

    def post(self) -> bool:
        self.begun.set()
        assert self.free.wait(SECONDS)
        return False

    def collect(self) -> bool:
        raise AssertionError("nothing was posted")


class Line:
    """A wire, and what its reductions had to do."""

    def __init__(self, ordered: bool = False) -> None:
        self.wire, self.log = Wire(ordered=ordered), list[str]()
        self.under_way = self.most_under_way = 0

    def carry(self, *reductions: "Fake") -> str:
        """The log, once all these are carried, which come at once."""
        self.log.clear()
        holding = Holding(self.wire)
        for reduction in reductions:
            self.wire.submit(reduction.on(self))
        holding.free.set()
        for reduction in reductions:
            assert reduction.ended.wait(SECONDS), f"{reduction.name} was never carried: {self.log}"
        return " ".join(self.log)


class Fake:
    """Writes down what the wire asks it for: "+a" when a is posted, "a" when it is collected.

    rounds   how often it exchanges.
    brings   what is submitted while it waits for its first exchange.
    """

    line: Line

    def __init__(
        self, name: str, rounds: int = 1, *, encoded: bool = True, waits_for_all: bool = False, brings: Any = None
    ) -> None:
        self.name, self.left = name, rounds
        self.encoded, self.waits_for_all, self.has_two_rounds = encoded, waits_for_all, rounds <= 2
        self.brings, self.ended = brings, threading.Event()

    def on(self, line: Line) -> "Fake":
        self.line = line
        return self

    def post(self) -> bool:
        self.line.log.append(f"+{self.name}")
        self.line.under_way += 1
        self.line.most_under_way = max(self.line.most_under_way, self.line.under_way)
        return self._goes_on()

    def collect(self) -> bool:
        self.line.log.append(self.name)
        if self.brings is not None:
            self.line.wire.submit(self.brings.on(self.line))
            self.brings = None
        self.left -= 1
        return self._goes_on()

    def _goes_on(self) -> bool:
        if not self.left:
            self.line.under_way -= 1
            self.ended.set()
        return self.left > 0


def test_the_order_of_exchanges() -> None:
    """On one wire after another, which is idle in between."""
    line = Line()
    for what, reductions, log in (
        ("all are posted before the first is waited for", [Fake("a"), Fake("b"), Fake("c")], "+a +b +c a b c"),
        ("one alone", [Fake("a")], "+a a"),
        (
            "second rounds come behind the first ones",
            [Fake("a", 2), Fake("b", 1), Fake("c", 2)],
            "+a +b +c a b c a c",
        ),
        (
            "what is over when it was posted, as one that fails, is not waited for",
            [Fake("a"), Fake("failed", 0), Fake("b")],
            "+a +failed +b a b",
        ),
        (
            "one that waits for all ranks runs alone; who comes behind it is posted behind it",
            [Fake("a", 2), Fake("b"), Fake("meets", waits_for_all=True), Fake("c")],
            "+a +b a b a +meets +c meets c",
        ),
        (
            "one of three rounds stays in front: a rank may wait for the third before it posts the first of the next",
            [Fake("a", 3), Fake("b", 2), Fake("c")],
            "+a +b +c a a a b c b",
        ),
    ):
        assert line.carry(*reductions) == log, what
    late = Fake("late")
    line.carry(Fake("a", 2, brings=late), Fake("b"))
    assert late.ended.wait(SECONDS)
    assert line.log == ["+a", "+b", "a", "+late", "b", "a", "late"], "posted before the next wait"
    line.wire.close()
    ordered = Line(ordered=True)
    log = ordered.carry(Fake("a", 2), Fake("b", 3), Fake("c", encoded=False))
    assert (log, ordered.most_under_way) == ("+a a a +b b b b +c c", 1), "one ends before the next begins"
    ordered.wire.close()


def test_few_are_encoded_at_once() -> None:
    """Each takes memory from there on; the next begins when one of them has ended. Encoded ones take no more."""
    line = Line()
    line.carry(*(Fake(str(index), encoded=False) for index in range(AT_ONCE + 2)))
    assert line.most_under_way == AT_ONCE
    assert line.log[:AT_ONCE] == [f"+{index}" for index in range(AT_ONCE)]
    assert line.log[AT_ONCE : AT_ONCE + 4] == ["0", f"+{AT_ONCE}", "1", f"+{AT_ONCE + 1}"]
    line.carry(*(Fake(str(index)) for index in range(AT_ONCE + 2)))
    assert line.most_under_way == AT_ONCE + 2
    line.wire.close()


def test_after_close_nothing_begins_but_what_is_under_way_ends() -> None:
    line = Line()
    holding, last = Holding(line.wire), Fake("last", 2).on(line)
    line.wire.submit(last)
    line.wire.close()
    with pytest.raises(RuntimeError):
        line.wire.submit(Fake("too late"))
    holding.free.set()
    assert last.ended.wait(SECONDS)
    assert line.log[:3] == ["+last", "last", "last"]


NUMEL, COUNT = 30_000, 6


def come_apart(rank: int, world_size: int, nodes: bool, slow: list[int], options: dict[str, Any]) -> list[bool]:
    """Ranks in `slow` wait for each before they start the next; the others have all of them under way at once."""
    group = init_device_mesh("cpu", (2, 2)) if nodes else None

    def begin(number: int) -> tuple[Any, Tensor]:
        return start(NUMEL, number, group=group, timeout=SECONDS, **options)

    begin(1)[0].wait(SECONDS)  # all agree, and connect
    store_barrier("all are connected", world_size)
    right = []
    if rank in slow:
        for number in range(COUNT):
            work, tensor = begin(number)
            work.wait(SECONDS)
            right.append(is_right(tensor, number))
    else:
        wire = channels(group, torch.device("cpu"))[-1].wire
        assert wire is not None
        holding = Holding(wire)  # so that the wire finds all of them when it looks for the first
        started = [begin(number) for number in range(COUNT)]
        holding.free.set()
        store_barrier("some have started", world_size - len(slow))
        for number, (work, tensor) in enumerate(started):
            work.wait(SECONDS)
            right.append(is_right(tensor, number))
    return right


@pytest.mark.parametrize(
    ("nodes", "slow", "options"),
    [
        (True, [0], {"algorithm": "gather"}),  # three rounds, or four: they must not wait behind the first of others
        (True, [1, 2], {"algorithm": "sharded"}),
        (True, [0, 1, 3], {"algorithm": "sharded"}),
        (False, [0], {"algorithm": "sharded"}),
        (False, [1, 2], {"algorithm": "sharded", "max_bytes": 400_000}),
    ],
)
def test_ranks_that_have_different_ones_under_way(
    ranks: RankPool, nodes: bool, slow: list[int], options: dict[str, Any]
) -> None:
    world_size = 4 if nodes else 3
    assert ranks.run(come_apart, world_size, nodes, slow, options) == [[True] * COUNT] * world_size


# The notice board, on a store whose `set` returns before the text is there, as torch's TCPStore does ------------------


class Connection(dist.Store):  # type: ignore[name-defined, misc]
    """A connection to a store that handles its requests in their order, and waits for answers where there are some."""

    def __init__(self, texts: dict[str, bytes]) -> None:
        super().__init__()
        self._texts, self._under_way = texts, dict[str, bytes]()

    def set(self, key: str, value: bytes) -> None:
        self._under_way[key] = value

    def check(self, keys: list[str]) -> bool:
        self._texts.update(self._under_way)
        return all(key in self._texts for key in keys)

    def get(self, key: str) -> bytes:
        assert self.check([key])
        return self._texts[key]


def test_what_is_written_can_be_read_by_all_ranks() -> None:
    texts: dict[str, Any] = {}
    writer, reader = (Board("group", None, Connection(texts)) for _ in range(2))
    assert reader.read("saved") is None
    writer.write("saved", "5")
    assert reader.read("saved") == "5"
    assert (writer.lost, reader.lost) == (None, None)


# Ranks send to one rank in turn ---------------------------------------------------------------------------------------

TURN = 0.6
OPTIONS: dict[str, Any] = {"to": 0, "most": 10_000, "name": "test"}


@by_threads(3)
def test_a_rank_waits_for_the_turns_before_its_own(group: LocalGroup) -> None:
    """Rank 1 sends messages for longer than two time-outs, and then rank 2 one."""
    found: dict[int, set[int]] = {}

    def send() -> Iterator[Tensor]:
        until = time.monotonic() + (2.3 * TURN if group.rank == 1 else 0.0)
        yield torch.full((2,), group.rank, dtype=torch.uint8)
        while time.monotonic() < until:
            yield torch.full((3,), group.rank, dtype=torch.uint8)

    def receive(source: int, messages: Iterator[Tensor]) -> None:
        found[source] = {number for message in messages for number in message.tolist()}

    stream(group, torch.device("cpu"), send=send, receive=receive, timeout=TURN, **OPTIONS)
    assert found == ({} if group.rank else {1: {1}, 2: {2}})


@by_threads(3, timeout=30.0)
def test_ranks_that_wait_for_their_turn_get_the_error_of_another_turn_at_once(group: LocalGroup) -> None:
    def receive(source: int, messages: Iterator[Tensor]) -> None:
        raise OSError("no space left")

    with raises(OSError if group.rank == 0 else CollectiveError, "no space left"):
        messages = [torch.ones(1, dtype=torch.uint8)]
        stream(group, torch.device("cpu"), send=lambda: messages, receive=receive, timeout=60.0, **OPTIONS)
