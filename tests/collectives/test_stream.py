"""Ranks send to one rank in turn: what it gets, how long those wait whose turn comes later, and errors of a turn."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from support.training import raises
from thinwire import CollectiveError
from thinwire.collectives import LocalGroup
from thinwire.collectives.stream import stream
from thinwire.testing import run_threads

SECONDS = 0.6
OPTIONS: dict[str, Any] = {"to": 0, "most": 10_000, "name": "test"}


def long_turn(group: LocalGroup) -> dict[int, set[int]]:
    """Rank 1 sends messages for longer than two time-outs, and then rank 2 one."""
    found: dict[int, set[int]] = {}

    def send() -> Iterator[Tensor]:
        until = time.monotonic() + (2.3 * SECONDS if group.rank == 1 else 0.0)
        yield torch.full((2,), group.rank, dtype=torch.uint8)
        while time.monotonic() < until:
            yield torch.full((3,), group.rank, dtype=torch.uint8)

    def receive(source: int, messages: Iterator[Tensor]) -> None:
        found[source] = {number for message in messages for number in message.tolist()}

    stream(group, torch.device("cpu"), send=send, receive=receive, timeout=SECONDS, **OPTIONS)
    return found


def test_a_rank_waits_for_the_turns_before_its_own() -> None:
    assert run_threads(long_turn, 3) == [{1: {1}, 2: {2}}, {}, {}]


def fail(group: LocalGroup) -> None:
    def receive(source: int, messages: Iterator[Tensor]) -> None:
        raise OSError("no space left")

    with raises(OSError if group.rank == 0 else CollectiveError, "no space left"):
        messages = [torch.ones(1, dtype=torch.uint8)]
        stream(group, torch.device("cpu"), send=lambda: messages, receive=receive, timeout=60.0, **OPTIONS)


def test_ranks_that_wait_for_their_turn_get_the_error_of_another_turn_at_once() -> None:
    run_threads(fail, 3, timeout=30.0)
