"""A step settles once, when all is exchanged, and all of it alike."""

import threading

import pytest

from thinwire.collectives.errors import PeerError
from thinwire.collectives.step import Received, Step


class Watched:
    """An operation's end of a step, and what it was told."""

    def __init__(self, finite: bool = True) -> None:
        self.told: list[object] = []
        self.received = Received(finite, self.told.append, self.told.append)


def test_nothing_takes_effect_before_the_last_exchange() -> None:
    step, first, second = Step(), Watched(), Watched()
    step.join()
    step.join()
    step.deposit(first.received)
    step.close()
    assert (step.finite, first.told) == (None, [])
    step.deposit(second.received)
    assert step.finite is True
    assert (first.told, second.told) == ([True], [True])


def test_nothing_takes_effect_before_the_step_is_closed() -> None:
    step, part = Step(), Watched()
    step.join()
    step.deposit(part.received)
    assert (step.finite, part.told) == (None, [])
    step.close()
    assert (step.finite, part.told) == (True, [True])


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_that_is_not_finite_counts_for_all(bad: int) -> None:
    step, parts = Step(), [Watched(index != bad) for index in range(3)]
    for _ in parts:
        step.join()
    step.close()
    for part in parts:
        step.deposit(part.received)
    assert step.finite is False
    assert [part.told for part in parts] == [[False]] * 3


def test_a_step_without_operations_counts() -> None:
    step = Step()
    step.close()
    assert step.finite is True


def test_one_failure_fails_all_that_were_exchanged() -> None:
    step, part = Step(), Watched()
    step.join()
    step.join()
    step.deposit(part.received)
    step.close()
    step.fail(ValueError("the wire is cut"))
    assert step.finite is None
    (error,) = part.told
    assert isinstance(error, ValueError)
    assert "the wire is cut" in str(error)


def test_the_first_failure_is_the_one_that_is_told() -> None:
    step, part = Step(), Watched()
    for _ in range(3):
        step.join()
    step.close()
    step.fail(ValueError("first"))
    step.fail(ValueError("second"))
    step.deposit(part.received)
    assert "first" in str(part.told[0])


def test_an_abandoned_step_has_no_effect_even_if_all_its_exchanges_end_well() -> None:
    step, early, late = Step(), Watched(), Watched()
    step.join()
    step.join()
    step.deposit(early.received)
    step.abandon("its backward pass did not come to an end")
    assert early.told == []  # others may still write to the same tensors
    step.deposit(late.received)
    for part in (early, late):
        assert "backward pass" in str(part.told[0])
    assert step.finite is None


def test_a_closed_step_cannot_be_abandoned() -> None:
    step, part = Step(), Watched()
    step.join()
    step.close()
    step.abandon("too late")
    step.deposit(part.received)
    assert (step.finite, part.told) == (True, [True])


def test_closing_twice_settles_once() -> None:
    step, part = Step(), Watched()
    step.join()
    step.deposit(part.received)
    step.close()
    step.close()
    assert part.told == [True]


def test_the_closing_thread_does_not_overrule_the_one_that_settles() -> None:
    """close() in one thread while the last operation ends in another: both find the step complete."""
    step, told = Step(), []
    closed, settling, finished = threading.Event(), threading.Event(), threading.Event()
    settle_if_complete = step._settle_if_complete

    def meanwhile() -> None:
        if threading.current_thread() is closer:
            closed.set()
            settling.wait(1.0)  # on a step that settles under its lock this thread never sees it: goes on
        settle_if_complete()

    class Slow(Received):
        @property
        def finite(self) -> bool:  # type: ignore[override]
            settling.set()
            finished.wait(0.2)
            return False

    step._settle_if_complete = meanwhile  # type: ignore[method-assign]
    step.join()

    def close() -> None:
        step.close()
        finished.set()

    closer = threading.Thread(target=close)
    closer.start()
    assert closed.wait(10)
    step.deposit(Slow(False, told.append, told.append))
    closer.join(10)
    assert not closer.is_alive()
    assert told == [False]
    assert step.finite is False


def test_many_threads() -> None:
    for finite in (True, False):
        for _ in range(50):
            step, parts = Step(), [Watched(finite or index != 7) for index in range(16)]
            for _ in parts:
                step.join()
            threads = [threading.Thread(target=step.deposit, args=(part.received,)) for part in parts]
            threads.append(threading.Thread(target=step.close))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
            assert step.finite is finite
            assert [part.told for part in parts] == [[finite]] * 16


def test_who_fails_with_another_gets_an_error_of_the_same_kind() -> None:
    """Whoever catches a CollectiveError need not know which exchange of a step it was, nor how fast it failed."""
    step, part = Step(), Watched()
    step.join()
    step.join()
    step.deposit(part.received)
    step.fail(PeerError("rank 3 is late", [3]))
    with pytest.raises(PeerError, match="rank 3 is late") as caught:
        step.join()
    assert caught.value.ranks == (3,)
    step.close()
    (told,) = part.told
    assert isinstance(told, PeerError)
    assert told.ranks == (3,)
