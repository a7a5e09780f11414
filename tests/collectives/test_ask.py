"""One rank asks the others in turn: what it gets, and how long those wait whose turn comes later."""

import time

import torch
from torch import Tensor

from support.training import raises
from thinwire import CollectiveError
from thinwire.collectives import LocalGroup
from thinwire.collectives.ask import Ask, ask_ranks
from thinwire.testing import run_threads

SECONDS = 0.6


def message(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)


def long_turn(group: LocalGroup, requests: int) -> dict[int, list[int]]:
    """Rank 0 asks rank 1 again and again, for longer than two time-outs, and then rank 2."""
    found: dict[int, list[int]] = {}

    def visit(source: int, ask: Ask) -> None:
        until = time.monotonic() + (2.3 * SECONDS if source == 1 else 0.0)
        found[source] = ask(message(source, 7)).tolist()
        while time.monotonic() < until:
            assert ask(message(source, 7)).tolist() == found[source]

    ask_ranks(
        group,
        torch.device("cpu"),
        to=0,
        visit=visit,
        answer=lambda request: message(group.rank, *request.tolist()),
        requests=requests,
        timeout=SECONDS,
        name="test",
    )
    return found


def test_a_rank_waits_for_the_turns_before_its_own() -> None:
    """Each message comes in time, but there are many of them."""
    assert run_threads(long_turn, 3, 10_000) == [{1: [1, 1, 7], 2: [2, 2, 7]}, {}, {}]


def fail(group: LocalGroup) -> None:
    def visit(source: int, ask: Ask) -> None:
        raise OSError("no space left")

    with raises(OSError if group.rank == 0 else CollectiveError, "no space left"):
        ask_ranks(
            group,
            torch.device("cpu"),
            to=0,
            visit=visit,
            answer=lambda request: request,
            requests=10_000,
            timeout=60.0,
            name="test",
        )


def test_ranks_that_wait_for_their_turn_get_the_error_of_another_turn() -> None:
    """At once: none of them waits until its time is over."""
    run_threads(fail, 3, timeout=30.0)
