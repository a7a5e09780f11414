"""A rank is killed in a step of training, after it has encoded: the others get an error, and have changed nothing."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.slow import slow
from support.training import (
    SEVERAL,
    TOPK,
    differing,
    loss_of,
    make_batch,
    make_net,
    optimizer_bits,
    policy,
    seeded,
    sync_bits,
    take,
    weight_bits,
)  # fmt: skip
from thinwire import Collective
from thinwire.collectives.transport.channel import Connection
from thinwire.collectives.transport.link import Buffers, GlooLink, LinkBroken, Wait
from thinwire.sync.buckets import Bucket
from thinwire.testing import LOST, RankPool, store_barrier

STEPS = 3
"""That work before."""
SECONDS, AT_ONCE = 100.0, 15.0
"""The time-out of every wait, and what an error may take that is not a time-out."""


class Failure(NamedTuple):
    """The error of a rank that is left."""

    message: str
    ranks: tuple[int, ...]
    seconds: float
    changed: list[str]
    steps: int
    """That ended well, of those after the first ones."""


def try_to(step: Callable[[], object], bits: Callable[[], Mapping[str, Any]], steps: int) -> Failure | None:
    before, started = bits(), time.monotonic()
    try:
        step()
    except thinwire.PeerError as error:
        return Failure(str(error), error.ranks, time.monotonic() - started, differing(before, bits()), steps)
    return None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_wire(posts: int) -> threading.Event:
    """The wire of this rank posts so often, and then stands still: set when it does."""
    whole, reached, left = GlooLink.post, threading.Event(), [posts]

    def post(link: GlooLink, sends: Buffers, receives: Buffers, tag: int) -> Wait:
        if left[0] == 0:
            reached.set()
            threading.Event().wait(SECONDS)
        left[0] -= 1
        return whole(link, sends, receives, tag)

    patched: Any = GlooLink
    patched.post = post
    return reached


def take_steps(rank: int, world_size: int, victim: int, algorithm: str, posts: int | None) -> Failure | None:
    """AdamW on one matrix, so one operation a step. The victim dies between backward and step().

    posts   of the victim: 0, its payload is encoded and not sent; 1, it is sent. None: it has all that it waited for.
    """
    with seeded(0):
        model = DistributedDataParallel(nn.Linear(32, 64, bias=False))
    collective = Collective(algorithm=algorithm, timeout=SECONDS)
    optimizer = thinwire.AdamW(model, lr=1e-2, compressor=policy(TOPK), warmup_steps=1, collective=collective)

    def backward(step: int) -> None:
        optimizer.zero_grad()
        given = make_batch(rank, step)[0]
        (model(given) - given.repeat(1, 2)).square().mean().backward()

    for step in range(STEPS):
        backward(step)
        optimizer.step()
    optimizer.state_dict()  # of all ranks, or rank 0 would be warned that it saves alone
    store_barrier("all have begun", world_size)
    if rank == victim:
        reached = None if posts is None else stop_wire(posts)
        backward(STEPS)
        assert optimizer.sync.is_pending
        if reached is not None:
            assert reached.wait(SECONDS)
        elif optimizer.sync._step is not None:
            optimizer.sync._step.wait()
        die()
    backward(STEPS)  # which waits for no rank

    def next_step() -> None:
        backward(STEPS + 1)
        optimizer.step()

    bits = partial(optimizer_bits, optimizer)
    return try_to(optimizer.step, bits, 0) or try_to(next_step, bits, 1)


def check(found: list[Any], victim: int, steps: int) -> None:
    for rank, failure in enumerate(found):
        if rank == victim:
            assert failure is LOST
            continue
        assert failure is not None, f"rank {rank} did not notice"
        assert failure.ranks == (victim,), failure
        assert f"rank {victim}" in failure.message, failure
        assert failure.seconds < AT_ONCE, failure
        assert not failure.changed, failure
        assert failure.steps <= steps, failure


@pytest.mark.parametrize(
    ("world_size", "victim", "algorithm", "posts", "steps"),
    [(2, 0, "gather", 0, 0), slow(3, 0, "sharded", 0, 0), (3, 1, "sharded", 1, 0), (3, 1, "gather", None, 1)],
)
def test_between_backward_and_step(
    ranks: RankPool, world_size: int, victim: int, algorithm: str, posts: int | None, steps: int
) -> None:
    """If something of it is missing, step() of the others is not taken. If all is exchanged, the others may take it;
    then it is the next one that is not taken."""
    check(ranks.run(take_steps, world_size, victim, algorithm, posts, lost=[victim], timeout=150), victim, steps)


def go_backward(rank: int, world_size: int, victim: int, algorithm: str) -> Failure | None:
    """attach: the victim dies when all buckets but the last are exchanged."""
    model = DistributedDataParallel(make_net(), **SEVERAL)
    sync = thinwire.attach(model, policy(TOPK), collective=Collective(algorithm=algorithm, timeout=SECONDS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        take(optimizer, loss_of(model, rank, step))
    store_barrier("all have begun", world_size)
    if rank == victim:
        whole, sent = sync.send, [0]

        def send_or_die(bucket: Bucket, *, last: bool) -> None:
            if last:
                assert sent[0], "this is the first bucket"
                sync._step.wait()  # so that the others have them, too
                die()
            sent[0] += 1
            whole(bucket, last=last)

        sync.send = send_or_die  # type: ignore[method-assign]
    optimizer.zero_grad()
    return try_to(loss_of(model, rank, STEPS).backward, lambda: weight_bits(model) | sync_bits(sync), 0)


@pytest.mark.parametrize(("world_size", "victim", "algorithm"), [(2, 0, "gather"), (3, 1, "sharded")])
def test_in_the_last_bucket_of_attach(ranks: RankPool, world_size: int, victim: int, algorithm: str) -> None:
    """Residuals stay as they were, too: buckets that were exchanged are not applied."""
    check(ranks.run(go_backward, world_size, victim, algorithm, lost=[victim], timeout=150), victim, 0)


class Buckets:
    """A synchronizer, and buckets that it has sent for some steps."""

    def __init__(self, rank: int, compressor: Any, count: int) -> None:
        self.sync = thinwire.Synchronizer(compressor, collective=Collective(timeout=SECONDS))
        self.tensors = [torch.full((1 << 14,), 1.0 + rank) for _ in range(count)]
        for _ in range(STEPS):
            self.add(*range(count))
            self.sync.finish()

    def add(self, *numbers: int) -> None:
        for number in numbers:
            bucket = Bucket(self.tensors[number], (str(number),), (1 << 14,))
            self.sync.add_bucket(bucket, first=number == 0, last=number == len(self.tensors) - 1)


def send_after_a_failure(rank: int, world_size: int) -> str:
    """Rank 1 dies between two steps. Rank 0 adds a bucket while the wire reports that the one before it failed."""
    buckets = Buckets(0, policy(TOPK), 2)
    if rank == 1:
        die()
    fail, failed, added = Connection.fail, threading.Event(), threading.Event()

    def fail_slowly(connection: Connection, error: thinwire.CollectiveError) -> thinwire.CollectiveError:
        """Stand between the failure of the connections and its report."""
        found = fail(connection, error)
        if threading.current_thread() is not threading.main_thread():
            failed.set()
            assert added.wait(SECONDS)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "fail", fail_slowly)
        buckets.add(0)
        assert failed.wait(SECONDS)
        buckets.add(1)
        sent = len(buckets.sync._step.reports)
        added.set()
        try:
            buckets.sync.finish()
        except thinwire.PeerError as error:
            return f"{sent} of 2 buckets were sent: {error}"
    return "nothing was raised"


def test_a_bucket_that_comes_while_a_failure_is_reported(ranks: RankPool) -> None:
    """It is not sent: it would wait for the lost rank on new connections, until the time-out."""
    found, _ = ranks.run(send_after_a_failure, 2, lost=[1], timeout=150)
    assert "1 of 2 buckets were sent" in found
    assert "rank 1 is lost" in found


def go_on_after_a_failure(rank: int, world_size: int) -> list[float]:
    """The link of rank 1 breaks: it sees that before its second bucket, and rank 0 after its own. Then both go on."""
    buckets = Buckets(rank, "quantize:bits=8", 3)
    post: Any = GlooLink.post

    def breaks(*args: Any, **options: Any) -> Any:
        GlooLink.post = post  # type: ignore[method-assign]
        raise LinkBroken(0, False, "the wire is cut")

    if rank == 0:
        buckets.add(0, 1, 2)
    store_barrier("rank 0 has sent all", world_size)
    if rank == 1:
        GlooLink.post = breaks  # type: ignore[method-assign]
        buckets.add(0)
        while buckets.sync._step.flights[0].failure is None:
            time.sleep(0.001)
        buckets.add(1, 2)
    with pytest.raises(thinwire.CollectiveError, match="rank"):
        buckets.sync.finish()
    store_barrier("both have failed", world_size)
    for tensor in buckets.tensors:
        tensor.fill_(1.0 + rank)
    buckets.add(0, 1, 2)
    buckets.sync.finish()
    return [float(tensor.mean()) for tensor in buckets.tensors]


def test_ranks_that_see_a_failure_at_other_buckets_go_on(ranks: RankPool) -> None:
    """Operations that were not sent any more have numbers, too."""
    for found in ranks.run(go_on_after_a_failure, 2, timeout=120):
        assert found == pytest.approx([1.5] * 3, rel=0.01)
