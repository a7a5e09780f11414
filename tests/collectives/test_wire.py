"""The thread that sends and receives for a group: what it posts, what it waits for, and in which order."""

import threading
from collections.abc import Iterator

import pytest

from support.wires import SECONDS, Holding
from thinwire.collectives.transport.wire import AT_ONCE, Wire


class Line:
    """A wire, and what its reductions had to do."""

    def __init__(self, ordered: bool = False) -> None:
        self.wire, self.log = Wire(ordered=ordered), list[str]()
        self.under_way = self.most_under_way = 0

    def carry(self, *reductions: "Fake") -> list[str]:
        """The log, once all these are carried, which come at once."""
        self.log.clear()
        holding = Holding()
        self.wire.submit(holding)
        assert holding.begun.wait(SECONDS)
        for reduction in reductions:
            self.wire.submit(reduction)
        holding.free.set()
        for reduction in reductions:
            assert reduction.ended.wait(SECONDS), f"{reduction.name} was never carried: {self.log}"
        return list(self.log)


class Fake:
    """Writes down what the wire asks it for.

    rounds   how often it exchanges.
    brings   what is submitted while it waits for its first exchange.
    """

    def __init__(
        self,
        line: Line,
        name: str,
        rounds: int = 1,
        *,
        encoded: bool = True,
        waits_for_all: bool = False,
        brings: "Fake | None" = None,
    ) -> None:
        self.line, self.name, self.left = line, name, rounds
        self.encoded, self.waits_for_all, self.has_two_rounds = encoded, waits_for_all, rounds <= 2
        self.brings, self.ended = brings, threading.Event()

    def post(self) -> bool:
        self.line.log.append(f"post {self.name}")
        self.line.under_way += 1
        self.line.most_under_way = max(self.line.most_under_way, self.line.under_way)
        return self._goes_on()

    def collect(self) -> bool:
        self.line.log.append(f"collect {self.name}")
        if self.brings is not None:
            self.line.wire.submit(self.brings)
            self.brings = None
        self.left -= 1
        return self._goes_on()

    def _goes_on(self) -> bool:
        if not self.left:
            self.line.under_way -= 1
            self.ended.set()
        return self.left > 0


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.wire.close()


@pytest.fixture
def ordered() -> Iterator[Line]:
    made = Line(ordered=True)
    yield made
    made.wire.close()


def test_all_are_posted_before_the_first_is_waited_for(line: Line) -> None:
    log = line.carry(*(Fake(line, name) for name in "abc"))
    assert log == ["post a", "post b", "post c", "collect a", "collect b", "collect c"]


def test_second_rounds_come_behind_the_first_ones(line: Line) -> None:
    log = line.carry(Fake(line, "a", 2), Fake(line, "b", 1), Fake(line, "c", 2))
    assert log == ["post a", "post b", "post c", "collect a", "collect b", "collect c", "collect a", "collect c"]


def test_what_comes_meanwhile_is_posted_before_the_next_wait(line: Line) -> None:
    late = Fake(line, "late")
    log = line.carry(Fake(line, "a", 2, brings=late), Fake(line, "b"))
    assert late.ended.wait(SECONDS)
    assert log[:4] == ["post a", "post b", "collect a", "post late"]
    assert line.log[4:] == ["collect b", "collect a", "collect late"]


def test_what_is_over_when_it_was_posted_is_not_waited_for(line: Line) -> None:
    """As a reduction that fails, and says so by itself."""
    log = line.carry(Fake(line, "a"), Fake(line, "failed", 0), Fake(line, "b"))
    assert log == ["post a", "post failed", "post b", "collect a", "collect b"]


def test_an_operation_that_waits_for_all_ranks_runs_alone(line: Line) -> None:
    """Nothing is under way then; who comes behind it is posted behind it, and not before."""
    log = line.carry(Fake(line, "a", 2), Fake(line, "b"), Fake(line, "meets", waits_for_all=True), Fake(line, "c"))
    assert log == [
        *("post a", "post b", "collect a", "collect b", "collect a"),
        *("post meets", "post c", "collect meets", "collect c"),
    ]


def test_in_order_one_ends_before_the_next_begins(ordered: Line) -> None:
    log = ordered.carry(Fake(ordered, "a", 2), Fake(ordered, "b", 3), Fake(ordered, "c", encoded=False))
    assert log == ["post a", *["collect a"] * 2, "post b", *["collect b"] * 3, "post c", "collect c"]
    assert ordered.most_under_way == 1


def test_few_are_encoded_at_once(line: Line) -> None:
    """Each takes memory from there on; the next begins when one of them has ended."""
    log = line.carry(*(Fake(line, str(index), encoded=False) for index in range(AT_ONCE + 2)))
    assert line.most_under_way == AT_ONCE
    assert log[:AT_ONCE] == [f"post {index}" for index in range(AT_ONCE)]
    assert log[AT_ONCE : AT_ONCE + 4] == ["collect 0", f"post {AT_ONCE}", "collect 1", f"post {AT_ONCE + 1}"]


def test_those_that_are_encoded_take_no_more_memory(line: Line) -> None:
    line.carry(*(Fake(line, str(index)) for index in range(AT_ONCE + 2)))
    assert line.most_under_way == AT_ONCE + 2


def test_one_of_more_than_two_rounds_stays_in_front(line: Line) -> None:
    """Another rank may wait for its third round before it posts the first of the next."""
    log = line.carry(Fake(line, "a", 3), Fake(line, "b", 2), Fake(line, "c"))
    assert log == [
        *("post a", "post b", "post c", "collect a", "collect a", "collect a"),
        *("collect b", "collect c", "collect b"),
    ]


def test_it_can_be_idle_in_between(line: Line) -> None:
    for name in "abc":
        assert line.carry(Fake(line, name)) == [f"post {name}", f"collect {name}"]


def test_after_close_nothing_begins_but_what_is_under_way_ends() -> None:
    line, holding = Line(), Holding()
    line.wire.submit(holding)
    assert holding.begun.wait(SECONDS)
    last = Fake(line, "last", 2)
    line.wire.submit(last)
    line.wire.close()
    with pytest.raises(RuntimeError):
        line.wire.submit(Fake(line, "too late"))
    holding.free.set()
    assert last.ended.wait(SECONDS)
    assert line.log[:3] == ["post last", "collect last", "collect last"]
