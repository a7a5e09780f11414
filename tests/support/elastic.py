"""Ranks of an `ElasticGroup` that die, leave and join by a plan. Each runs in a process of its own."""

import hashlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

import thinwire
from support.local_steps import adamw, loss_of, network
from thinwire.sync import buckets

PATIENCE = 6.0
"""Long enough for a process that gets no core for a while."""


class Plan(NamedTuple):
    """What one rank does.

    joins_after   a newcomer, which asks to join when the others have taken so many steps; None for a founder.
    dies          (phase, steps): killed in this phase, once that many local steps were taken.
    leaves_after  leaves after so many steps.
    """

    joins_after: int | None = None
    dies: tuple[str, int] | None = None
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
    "when it hands over": ("membership", "hand_over", "before"),
}
"""Where a rank is killed: before or after a call."""


def wait_between_buckets(sync: Any, is_due: Callable[[], bool]) -> None:
    """Let this rank go on with its next bucket only when the one before has failed; once."""
    send, waited = sync.send, []

    def send_and_wait(bucket: Any, *, last: bool) -> None:
        send(bucket, last=last)
        deadline = time.monotonic() + 30
        while is_due() and not waited and sync._step._sent and time.monotonic() < deadline:
            if any(sent.reduction.failure is not None for sent in sync._step._sent):
                waited.append(True)
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


def take_part(rank: int, world_size: int, plans: list[Plan], steps: int, options: dict[str, Any]) -> Ended:
    """Train as one rank of the plan, until `steps` local steps were taken."""
    plan, store = plans[rank], dist.distributed_c10d._get_default_store()
    waits_at = options.pop("waits_at", None)
    if waits_at is not None:
        buckets.BUCKET_BYTES = 1 << 14  # so that there are several; the processes of this test are used by no other
    founders = [number for number, each in enumerate(plans) if each.joins_after is None]
    model = network(with_buffers=False)
    if plan.joins_after is None:
        group = thinwire.ElasticGroup(store, rank=rank, size=len(founders), patience=PATIENCE, timeout=60)
    else:
        wait_for(store, f"reached/{plan.joins_after}")
        group = thinwire.ElasticGroup(store, patience=PATIENCE, timeout=60)
        if plan.dies == ("when it has asked", 0):
            die()
        if plan.dies == ("when it is admitted", 0):
            kill_at(group, "call_roll", "before", lambda: True)
        if plan.dies == ("before it gets the weights", 0):
            kill_at(group, "call_roll", "after", lambda: True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = thinwire.LocalSteps(adamw(model), group=group, model=model, **{"every": 4, **options})
        membership: Any = optimizer._membership
        owners = {"optimizer": optimizer, "sync": optimizer.sync, "group": group, "membership": membership}
        if plan.dies is not None and plan.dies[0] in PHASES:
            (owner, name, when), at = PHASES[plan.dies[0]], plan.dies[1]
            kill_at(
                owners[owner], name, when,
                lambda: optimizer.steps >= at and (owner != "membership" or membership._newcomers),
            )  # fmt: skip
        if waits_at is not None and plan.dies is None:
            wait_between_buckets(optimizer.sync, lambda: optimizer.steps >= waits_at)
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
            store.set(f"reached/{optimizer.steps}", "yes")
            if any(each.joins_after is not None for each in plans):
                time.sleep(0.02)  # so that newcomers are there before the training ends
    return Ended(
        digests, group.members, group.number, group.events, [str(each.message) for each in caught],
        optimizer.rounds, optimizer.has_left, optimizer.param_groups[0]["lr"],
    )  # fmt: skip


def wait_for(store: Any, key: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {key} within {seconds:g} s")
        time.sleep(0.01)


def lose_the_store(rank: int, world_size: int) -> str:
    """Train until rank 0, which hosts the store, dies. Return the error."""
    group = thinwire.ElasticGroup(
        dist.distributed_c10d._get_default_store(), rank=rank, size=world_size, patience=PATIENCE, timeout=60
    )
    model = network(with_buffers=False)
    optimizer = thinwire.LocalSteps(adamw(model), 4, group=group, model=model)
    try:
        while True:
            optimizer.zero_grad()
            loss_of(model, optimizer.steps, rank).backward()
            if rank == 0 and optimizer.steps == 9:
                die()
            optimizer.step()
    except thinwire.CollectiveError as error:
        return str(error)
