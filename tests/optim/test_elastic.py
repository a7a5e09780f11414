"""Ranks that die, leave and join while others go on: real processes, killed by SIGKILL, each by a plan."""

import hashlib
import os
import re
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch import nn

import thinwire
from support.local_steps import adamw, loss_of, network
from thinwire.sync import buckets
from thinwire.testing import LOST, RankPool, run_threads

PATIENCE = 6.0
"""Long enough for a process that gets no core for a while."""


class Plan(NamedTuple):
    """What one rank does."""

    dies: str = ""
    """The phase in which it is killed."""
    at: int = 0
    """How many local steps must have been taken before that."""
    joins_after: int | None = None
    """A newcomer, which asks to join when the others have taken so many steps; None for a founder."""
    leaves_after: int | None = None


class Ended(NamedTuple):
    digests: dict[int, str]
    """The weights after each round in which this rank took part, by the number of steps."""
    members: tuple[int, ...]
    number: int
    events: list[str]
    warned: list[str]
    rounds: int
    has_left: bool
    lr: float


PHASES: dict[str, tuple[str, str, str]] = {
    "in a local step": ("optimizer", "_step_here", "before"),
    "before it sends": ("optimizer", "_send", "before"),
    "when it has sent": ("sync", "collect", "before"),
    "when it has received": ("sync", "collect", "after"),
    "when all have a receipt": ("group", "decide", "before"),
    "when it is decided": ("group", "decide", "after"),
    "in a roll call": ("group", "call_roll", "before"),
    "after a roll call": ("group", "call_roll", "after"),
    "when it hands over": ("membership", "_gather", "before"),
    "when it has asked": ("group", "wait_for_admission", "before"),
    "when it is admitted": ("group", "call_roll", "before"),
    "before it gets the weights": ("group", "call_roll", "after"),
}
"""Where a rank is killed: before or after a call."""


class Scene(NamedTuple):
    """Ranks that train together until `steps` local steps were taken, in rounds of 4."""

    steps: int
    plans: list[Plan]
    options: dict[str, Any]


SCENES = {
    "phases of a round": Scene(28, [
        Plan(), Plan("in a local step", 4), Plan("before it sends", 12), Plan("when it has sent", 16),
        Plan("when it has received", 20), Plan(),
    ], {}),
    "phases of a decision": Scene(24, [
        Plan("when it is decided", 8), Plan("when all have a receipt", 4), Plan("in a roll call", 4),
        Plan("after a roll call", 12), Plan(), Plan(),
    ], {}),
    "between buckets": Scene(16, [Plan(), Plan("before it sends", 12), Plan()], {}),
    "fragments": Scene(24, [Plan(), Plan("in a local step", 9), Plan()], {"fragments": 2, "delay": 2}),
    "newcomers": Scene(80, [
        Plan(), Plan(), Plan("when it has asked", joins_after=5), Plan("when it is admitted", joins_after=5),
        Plan("before it gets the weights", joins_after=5), Plan(joins_after=5),
    ], {}),
    "hand over": Scene(80, [Plan("when it hands over", 9), Plan(), Plan(), Plan(joins_after=9)], {}),
    "leave and come back": Scene(60, [Plan(), Plan(leaves_after=9), Plan(), Plan(joins_after=16)], {}),
}  # fmt: skip
ROLES = [(name, number) for name, scene in SCENES.items() for number in range(len(scene.plans))]
"""Of each process, when all scenes run at once."""
SCENES["host of the store"] = Scene(24, [Plan("in a local step", 9), Plan(), Plan()], {})


def wait_between_buckets(sync: Any, is_due: Callable[[], bool]) -> None:
    """Let this rank go on with its next bucket only when the one before has failed; once."""
    send, waited = sync.send, []

    def send_and_wait(bucket: Any, *, last: bool) -> None:
        send(bucket, last=last)
        deadline = time.monotonic() + 30
        while is_due() and not waited and sync._step.flights and time.monotonic() < deadline:
            waited.extend(True for flight in sync._step.flights if flight.failure is not None)
            time.sleep(0.01)

    sync.send = send_and_wait


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(owner: Any, name: str, when: str, is_due: Callable[[], bool]) -> None:
    method = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        if when == "before" and is_due():
            die()
        result = method(*args, **options)
        if when == "after" and is_due():
            die()
        return result

    setattr(owner, name, call)


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def take_part(rank: int, world_size: int, roles: list[tuple[str, int]]) -> Ended | str:
    """Train by the plan of this process; return what came out of it, or the traceback of an error."""
    name, number = roles[rank]
    try:
        return train(name, number)
    except Exception:
        return f"rank {number} of {name!r}: {traceback.format_exc()}"


def train(name: str, number: int) -> Ended:
    (steps, plans, options), store = SCENES[name], dist.distributed_c10d._get_default_store()
    plan, has_waits = plans[number], name == "between buckets"
    if has_waits:
        buckets.BUCKET_BYTES = 1 << 14  # so that there are several; the processes of this test are used by no other
    model = network(with_buffers=False)
    if plan.joins_after is not None:
        store.wait([f"{name}/{plan.joins_after}"], timedelta(seconds=60))
    place = (
        {"rank": number, "size": sum(each.joins_after is None for each in plans)} if plan.joins_after is None else {}
    )
    group = thinwire.ElasticGroup(store, name=name, patience=PATIENCE, timeout=60, **place)
    owners: dict[str, Any] = {"group": group}
    owner, method, when = PHASES.get(plan.dies, ("nobody", "", ""))

    def is_due() -> bool:
        return "optimizer" not in owners or owners["optimizer"].steps >= plan.at

    if owner == "group":
        kill_at(group, method, when, is_due)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = thinwire.LocalSteps(adamw(model), group=group, model=model, every=4, **options)
        owners |= {"optimizer": optimizer, "sync": optimizer.sync, "membership": optimizer._membership}
        if owner in ("optimizer", "sync", "membership"):
            kill_at(owners[owner], method, when, is_due)
        if has_waits and not plan.dies:
            wait_between_buckets(optimizer.sync, lambda: optimizer.steps >= 12)
        digests: dict[int, str] = {}
        while optimizer.steps < steps and not optimizer.has_left:
            loss = loss_of(model, optimizer.steps, group.number)
            optimizer.zero_grad()
            loss.backward()
            for each in optimizer.param_groups:
                each["lr"] = 1e-2 * (1 - optimizer.steps / 1000)
            if plan.leaves_after is not None and optimizer.steps >= plan.leaves_after:
                group.leave()
            optimizer.step()
            if optimizer.steps % optimizer.every == 0:
                digests[optimizer.steps] = digest(model)
            store.set(f"{name}/{optimizer.steps}", "yes")
            if any(each.joins_after is not None for each in plans):
                time.sleep(0.02)  # so that newcomers are there before the training ends
    return Ended(
        digests, group.members, group.number, group.events, [str(each.message) for each in caught],
        optimizer.rounds, optimizer.has_left, optimizer.param_groups[0]["lr"],
    )  # fmt: skip


Results = Callable[[str], list[Ended]]


@pytest.fixture(scope="module")
def ended(ranks: RankPool) -> Results:
    """The results of a scene's ranks that did not die. All scenes run at once: most of their time they wait for signs
    of life."""
    lost = [rank for rank, (name, number) in enumerate(ROLES) if SCENES[name].plans[number].dies]
    results = ranks.run(take_part, len(ROLES), ROLES, lost=lost, timeout=150)

    def of_scene(name: str) -> list[Ended]:
        alive = [one for (of, _), one in zip(ROLES, results, strict=True) if of == name and one is not LOST]
        assert not [one for one in alive if isinstance(one, str)], "\n".join(map(str, alive))
        if "delay" not in SCENES[name].options:
            seen = {pair for one in alive for pair in one.digests.items()}
            assert len(seen) == len({step for step, _ in seen}), f"replicas must be the same after a round: {seen}"
            assert len(seen) == len({weights for _, weights in seen}), "it learns"
        return alive

    return of_scene


class TestDeath:
    def test_in_every_phase_of_a_round(self, ended: Results) -> None:
        """Rank by rank, each in another phase; the last two finish, with all rounds."""
        first, last = ended("phases of a round")
        assert first.members == last.members == (0, 5)
        assert first.rounds == last.rounds == 7
        for number in (1, 2, 3, 4):
            assert any(f"rank {number} is lost" in event for event in first.events)
            assert any(re.search(rf"ranks? [\d, ]*\b{number}\b.* lost, and with it", text) for text in first.warned)

    def test_in_every_phase_of_a_decision(self, ended: Results) -> None:
        """The first member too, since the store lives elsewhere; and one while the others call the roll."""
        first, last = ended("phases of a decision")
        assert first.members == last.members == (4, 5)
        assert first.rounds == 6

    def test_before_the_others_have_sent_everything(self, ended: Results) -> None:
        """They learn of it with their second bucket, when the first one has failed."""
        first, last = ended("between buckets")
        assert first.members == last.members == (0, 2)
        assert first.rounds == 4

    def test_while_training_goes_on(self, ended: Results) -> None:
        """With fragments under way, whose local steps stay, so that weights are never all common."""
        first, last = ended("fragments")
        assert first.members == last.members == (0, 2)
        assert first.rounds == last.rounds

    def test_the_host_of_the_store(self, ranks: RankPool) -> None:
        roles = [("host of the store", number) for number in range(3)]
        for error in ranks.run(take_part, 3, roles, store="rank0", lost=[0], timeout=150)[1:]:
            assert "PeerError: the store of the group 'host of the store' does not answer" in error
            assert "from a checkpoint" in error


class TestJoin:
    def test_newcomers_some_of_which_die_on_the_way(self, ended: Results) -> None:
        results = ended("newcomers")
        assert [result.number for result in results[:2]] == [0, 1]
        assert results[2].number >= 2
        assert {result.members for result in results} == {(0, 1, results[2].number)}
        assert len(results[2].digests) < results[2].rounds == 20  # it came later, and counts the rounds before
        assert results[2].lr == results[0].lr

    def test_the_one_that_hands_over_dies(self, ended: Results) -> None:
        """The newcomer asks once more, and gets the next number."""
        results = ended("hand over")
        assert {result.members for result in results} == {(1, 2, 4)}
        assert [result.number for result in results] == [1, 2, 4]

    def test_leave_and_come_back(self, ended: Results) -> None:
        results = ended("leave and come back")
        assert results[1].has_left
        assert max(results[1].digests) == 12  # it took part in the round that ended after it wanted to leave
        assert results[0].members == results[2].members == results[3].members == (0, 2, 3)
        assert any("rank 1 left" in event for event in results[0].events)
        assert not results[0].warned


class TestProtocol:
    """Without weights: what members decide, by threads and a store in memory."""

    def groups(self, size: int, **options: Any) -> list[thinwire.ElasticGroup]:
        store = dist.HashStore()  # type: ignore[attr-defined]
        return run_threads(lambda group: thinwire.ElasticGroup(store, rank=group.rank, size=size, **options), size)

    def test_the_first_decision_holds_for_all(self) -> None:
        """One has all receipts, and another calls the roll at the same time: whoever is first."""
        one, two = self.groups(2)
        assert one.decide([], []).counts
        assert two.call_roll([0]).counts
        one, two = self.groups(2, patience=0.5)
        one.close()  # as if it had stopped: its signs of life end
        assert not two.call_roll([0]).counts
        assert two.members == (1,)

    def test_a_rank_that_was_left_behind_is_told_so(self) -> None:
        one, two, three = self.groups(3, patience=0.5)
        three._stop_beating.set()
        changes = run_threads(lambda group: [one, two][group.rank].call_roll([2]), 2)
        assert [change.lost for change in changes] == [[2], [2]]
        with pytest.raises(thinwire.PeerError, match=r"the others went on without rank 2.*as a newcomer"):
            three.decide([], [])
        with pytest.raises(RuntimeError, match="this rank is no member"):
            _ = three.channel

    def test_one_that_was_here_before_is_not_admitted_again(self) -> None:
        (one,) = self.groups(1)
        one._board.count("joins")
        one._board.write("beat/1", "1")
        assert one.wishes()[1] == 0  # seen for the first time
        one._board.write("beat/1", "2")
        assert one.wishes()[1] == 1
        one._board.write("admitted/1", "1")
        one._board.write("beat/1", "3")
        assert one.wishes()[1] == 0

    def test_nobody_is_admitted_by_the_last_that_leaves(self) -> None:
        (one,) = self.groups(1)
        change = one.decide([0], [1])
        assert change.joined == []
        assert one.has_left
        with pytest.raises(RuntimeError, match="no member"):
            _ = one.rank

    def test_a_rank_that_is_late_but_alive_is_waited_for(self) -> None:
        one, two = self.groups(2, patience=0.6)

        def answer(group: Any) -> Any:
            if group.rank == 1:
                time.sleep(1.5)
            return (one, two)[group.rank].call_roll([1])

        assert [change.lost for change in run_threads(answer, 2)] == [[], []]

    def test_what_no_rank_wrote(self) -> None:
        (one,) = self.groups(1)
        for text in ("-1", "1e9", "1" * 30, "x"):
            one._board.write("joins", text)
            with pytest.raises(thinwire.PeerError, match="which no rank wrote"):
                one.wishes()
        for text in ("{}", "[true, 5, [], []]", "x", '[true, ["a"], [], []]', "[true, [0]]", "[" * 10_000):
            one._board.write(f"decision/{one._exchange + 1}", text)
            with pytest.raises(thinwire.PeerError, match="a decision that no rank wrote"):
                one.decide([], [])

    def test_a_rank_that_does_not_come_and_a_newcomer_whom_nobody_admits(self) -> None:
        store = dist.HashStore()  # type: ignore[attr-defined]
        with pytest.raises(thinwire.PeerError, match=r"rank 1 did not come within 0\.2 s"):
            thinwire.ElasticGroup(dist.HashStore(), rank=0, size=2, timeout=0.2)  # type: ignore[attr-defined]
        with pytest.raises(thinwire.PeerError, match="no group named 'default'"):
            thinwire.ElasticGroup(store, timeout=0.2)
        thinwire.ElasticGroup(store, rank=0, size=1)
        newcomer = thinwire.ElasticGroup(store, timeout=0.2)
        assert newcomer.is_newcomer
        with pytest.raises(thinwire.PeerError, match=r"nobody has admitted rank 1 within 0\.2 s"):
            newcomer.wait_for_admission()

    def test_bad_input(self) -> None:
        store = dist.HashStore()  # type: ignore[attr-defined]
        thinwire.ElasticGroup(store, rank=0, size=1)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"store": None}, "store of type NoneType"),
            ({"rank": 0}, "rank 0 and size None, expected both"),
            ({"rank": 2, "size": 2}, "rank 2 of 2"),
            ({"rank": 0, "size": 1, "patience": 0}, "patience 0, expected seconds above 0"),
            ({"rank": 0, "size": 1}, "rank 0 of a group named 'default' was there before"),
        ]
        for options, message in wrong:
            with pytest.raises(ValueError, match=message):
                thinwire.ElasticGroup(**{"store": store, **options})
