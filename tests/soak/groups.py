"""Attacks on ranks that train: killed or stopped at any moment, links cut, NaN, damaged payloads, strangers.

A moment is so many seconds after all ranks have begun, and a signal comes from another process: what the rank does at
that moment is up to the machine. Everything else is the same when a case is repeated.
"""

import hashlib
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from soak.campaign import Tried, ranks
from support.hostile_calls import flip_bits
from support.ports import ports_of_this_process
from support.signals import Moments, signal_me
from support.training import (
    SEVERAL,
    TOPK,
    differing,
    identical,
    loss_of,
    make_net,
    optimizer_bits,
    policy,
    sync_bits,
    weight_bits,
)
from thinwire.testing import LOST, NotFinite, inject, store_barrier
from thinwire.testing.pool import Workers
from thinwire.tools.links.relay import Relay

METHODS = ("adamw gather", "adamw sharded", "adamw auto", "sgd gather", "attach gather", "attach sharded")
FIRST, STEPS = 3, 20
"""Steps before anything happens: DDP has its final buckets then, and the warm-up is over. And those of a case."""
LIMIT, LATE = 60.0, 4.0
"""Seconds until a wait fails, and those that a rank may be late where ranks are stopped for longer."""


class Training:
    """A model of four layers between the ranks of a group, trained by one of METHODS."""

    def __init__(self, rank: int, method: str, timeout: float = 60.0) -> None:
        name, algorithm = method.split()
        options: dict[str, Any] = {"collective": thinwire.Collective(algorithm=algorithm, timeout=timeout)}
        self.model, self.rank, self.ours = DistributedDataParallel(make_net(), **SEVERAL), rank, name != "attach"
        if self.ours:
            kind = {"adamw": thinwire.AdamW, "sgd": thinwire.SGD}[name]
            self.optimizer: Any = kind(self.model, lr=1e-2, compressor=policy(TOPK), warmup_steps=1, **options)
            self.sync = self.optimizer.sync
        else:
            self.sync = thinwire.attach(self.model, policy(TOPK), **options)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def take(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, self.rank, step).backward()
        if self.ours or self.sync.finite:  # torch's own would apply NaN
            self.optimizer.step()

    def bits(self) -> dict[str, bytes]:
        """Return all that a step may change. A residual of zeros is none: the first step makes them."""
        found = optimizer_bits(self.optimizer) if self.ours else weight_bits(self.model) | sync_bits(self.sync)
        return {name: bits for name, bits in found.items() if any(bits)}

    def digest(self) -> str:
        return hashlib.sha256(b"".join(weight_bits(self.model).values())).hexdigest()[:16]


def begin(rank: int, method: str, timeout: float) -> Training:
    training = Training(rank, method, timeout)
    for step in range(FIRST):
        training.take(step)
    return training


def warm_up(rank: int, world_size: int) -> None:
    """Take steps by all methods, so that kernels are compiled before a time-out counts."""
    for method in METHODS:
        begin(rank, method, 900)


class End(NamedTuple):
    """How training ended on a rank."""

    digests: list[str]
    """Of the weights after each step that was taken."""
    error: str = ""
    ranks: tuple[int, ...] = ()
    changed: tuple[str, ...] = ()
    """What the step that raised has changed."""


def train(rank: int, world_size: int, method: str, timeout: float, steps: int, victim: int, moments: Moments) -> End:
    """Take so many steps, or those until an error, while the victim gets its signals."""
    training = begin(rank, method, timeout)
    store_barrier("all have begun", world_size)
    if rank == victim:
        signal_me(moments)
    return go_on(training, steps)


def go_on(training: Training, steps: int) -> End:
    digests: list[str] = []
    deadline = time.monotonic() + LIMIT
    while len(digests) < steps and time.monotonic() < deadline:
        before, taken = training.bits(), training.sync.steps
        try:
            training.take(FIRST + len(digests))
        except thinwire.CollectiveError as error:
            changed = tuple(differing(before, training.bits()))
            if training.sync.steps > taken:  # AdamW averages second moments after a step that it has taken
                digests, changed = [*digests, training.digest()], ()
            return End(digests, f"{type(error).__name__}: {error}", error.ranks, changed)
        digests.append(training.digest())
    return End(digests)


def check(ends: dict[int, End], victim: int | None) -> int:
    """Check that ranks have the same weights after each step, and errors that name the victim; return the steps."""
    for rank, end in ends.items():
        assert bool(end.error) == (victim is not None), f"rank {rank}: {end.error or 'it did not notice'}"
        assert not end.changed, f"rank {rank}: {end.changed} changed in the step that raised {end.error}"
        assert victim in (None, rank) or end.ranks == (victim,), f"rank {rank} names {end.ranks}: {end.error}"
    taken = [len(end.digests) for end in ends.values()]
    assert max(taken) - min(taken) <= (victim is not None), f"steps taken by ranks: {taken}"
    assert identical([end.digests[: min(taken)] for end in ends.values()]), "weights differ between ranks"
    return FIRST + max(taken)


def kill(draw: Random) -> Tried:
    """SIGKILL: the others get an error that names the rank, and have the weights of a whole step."""
    world, method = draw.randint(2, 4), draw.choice(METHODS)
    victim, store, moment = draw.randrange(world), draw.choice(["parent", "rank0"]), draw.uniform(0, 0.3)
    args = (method, LIMIT, 10**6, victim, [(moment, "KILL")])
    found = ranks().run(train, world, *args, lost=[victim], store=store, timeout=2 * LIMIT)
    assert found[victim] is LOST
    steps = check({rank: end for rank, end in enumerate(found) if rank != victim}, victim)
    what = f"{method}, {world} ranks, store of {store}: rank {victim} killed after {moment:.3f} s, {steps} steps"
    return Tried(what, {"kills": 1, "steps": steps})


def stop(draw: Random) -> Tried:
    """SIGSTOP and SIGCONT: a short stop is a pause for all, a long one is an error that names the rank."""
    world, method = draw.randint(2, 4), draw.choice(METHODS)
    victim, is_long = draw.randrange(world), draw.random() < 0.1
    pauses = [2 * LATE] if is_long else [draw.uniform(0.01, 0.8) for _ in range(draw.randint(1, 3))]
    moments = [each for pause in pauses for each in ((draw.uniform(0, 0.1), "STOP"), (pause, "CONT"))]
    args = (method, *((LATE, 10**6) if is_long else (LIMIT, 2 * STEPS)), victim, moments)
    steps = check(dict(enumerate(ranks().run(train, world, *args, timeout=2 * LIMIT))), victim if is_long else None)
    what = f"{method}, {world} ranks: rank {victim} stopped for {', '.join(f'{pause:.2f}' for pause in pauses)} s"
    return Tried(f"{what}, {steps} steps", {"stops": len(pauses), "steps": steps})


class LinkedRank:
    """Trains behind a link."""

    def __init__(self, rank: int, size: int, method: str) -> None:
        self.training = begin(rank, method, LATE)

    def go_on(self) -> End:
        return go_on(self.training, 10**6)


def cut_link(draw: Random) -> Tried:
    """A link is cut in a step, without an error to anybody: every rank raises after the time-out."""
    world, method, nbytes = draw.randint(2, 4), draw.choice(METHODS), draw.randint(1, 30_000)
    rank = draw.randrange(world)
    with Relay(world, 2e6) as relay, Workers(world, limit=LATE, links=relay.links) as workers:
        workers.form(world, LinkedRank, method)
        with ThreadPoolExecutor(1) as thread:
            answers = thread.submit(workers.ask, "go_on", limit=LIMIT)
            before, deadline = sum(relay.sent_bytes()), time.monotonic() + LIMIT
            while sum(relay.sent_bytes()) < before + nbytes and time.monotonic() < deadline:
                time.sleep(0.001)
            relay.cut(rank)
            for each, end in enumerate(answers.result(2 * LIMIT)):
                assert end.error, f"rank {each} did not notice"
                assert not end.changed, f"rank {each}: {end.changed} changed in the step that raised {end.error}"
    return Tried(f"{method}, {world} ranks: link of rank {rank} cut after {nbytes:,} bytes", {"cut links": 1})


def payloads(draw: Random) -> Tried:
    """A random bit of one payload in each of many calls, in transit or for all: refused by name, or nothing is lost."""
    world, to_all, count = draw.randint(2, 4), draw.random() < 0.5, 45
    found = ranks().run(flip_bits, world, count, to_all, str(draw.random()), timeout=2 * LIMIT)
    for rank, (_, wrong) in enumerate(found):
        assert not wrong, f"rank {rank}: {wrong}"
    what = f"{world} ranks, {'for all' if to_all else 'in transit'}: {found[0][0]} of {count} refused"
    return Tried(what, {"damaged payloads": count, "refused payloads": found[0][0]})


def meet_not_finite(rank: int, world_size: int, method: str, faults: list[NotFinite]) -> list[str]:
    """Take each step, and before it a void one if there are faults for it. Return digests of weights."""
    training, digests = Training(rank, method), []
    for step in range(STEPS):
        if any(fault.step == step for fault in faults):
            before = training.bits()
            with inject(faults, step, parameters=training.model.parameters()):
                training.take(1000 + step)
            assert training.sync.finite is False, f"step {step} was not void"
            after = training.bits()
            changed = [name for name in before if before[name] != after.get(name)]  # it may make moments of zeros
            assert not changed, f"the void step {step} has changed {changed}"
        training.take(step)
        assert training.sync.finite is True, f"step {step}, after a void one, was void"
        digests.append(training.digest())
    return digests


def nan(draw: Random) -> Tried:
    """NaN or Inf on some ranks: the step changes nothing, and the next ones are as if it had not been."""
    world, method, void = draw.randint(2, 4), draw.choice(METHODS), 4
    faults = [
        NotFinite(rank, step, float(draw.choice(["nan", "inf", "-inf"])), draw.randrange(10), draw.randrange(8))
        for step in draw.sample(range(FIRST, STEPS), void)  # before, owners hand their residuals on to other buckets
        for rank in draw.sample(range(world), draw.randint(1, world))
    ]
    found = [digests for each in (faults, []) for digests in ranks().run(meet_not_finite, world, method, each)]
    assert identical(found), "ranks, or runs with and without void steps, differ"
    return Tried(f"{method}, {world} ranks: {void} void steps", {"void steps": void, "steps": 2 * STEPS + void})


def garbage(draw: Random) -> bytes:
    """Return noise, the greeting of another protocol, a length without end, a query of the store, or nothing."""
    noise, number = draw.randbytes(draw.randrange(1, 3000)), struct.pack("<Q", draw.choice([1, 1 << 40, 1 << 62]))
    others = (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01" + noise, b"\xff" * len(noise), b"")
    return draw.choice((noise, number + noise, bytes([draw.randrange(20)]) + number, *others))


def bother(draw: Random, ports: list[int], ended: threading.Event, made: list[int]) -> None:
    """Connect again and again, at most 500 times; some connections stay open, some are closed, some are reset."""
    kept = []
    while not ended.wait(0.002) and len(made) < 500:
        with suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", draw.choice(ports)), timeout=5)
            made.append(connection.fileno())
            connection.sendall(garbage(draw))
            fate = draw.choice(("open", "closed", "reset"))
            if fate == "open":
                kept.append(connection)
                continue
            if fate == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    for connection in kept:
        connection.close()


def train_bothered(rank: int, world_size: int, method: str, seed: str) -> tuple[int, list[list[str]]]:
    """Train alone, then with strangers. Return the number of their connections, and digests of weights of both."""
    found: list[list[str]] = []
    made: list[int] = []
    for are_there in (False, True):
        training, ended = Training(rank, method), threading.Event()
        training.take(0)
        ports: list[Any] = [None] * world_size
        dist.all_gather_object(ports, ports_of_this_process())
        everybodys = [port for each in ports for port in each]
        thread = threading.Thread(target=bother, args=(Random(seed), everybodys, ended, made), daemon=True)
        if are_there and rank == world_size - 1:
            thread.start()
        found.append([])
        for step in range(1, STEPS):
            training.take(step)
            found[-1].append(training.digest())
        ended.set()
        if thread.ident:
            thread.join(LIMIT)
    return len(made), found


def strangers(draw: Random) -> Tried:
    """Garbage to the ports of the store and of gloo: training goes on as if nobody had come."""
    world, method = draw.randint(2, 4), draw.choice(METHODS)
    found = ranks().run(train_bothered, world, method, str(draw.random()), store="rank0", timeout=2 * LIMIT)
    assert identical([digests for _, both in found for digests in both]), "ranks, or runs with and without, differ"
    made = found[-1][0]
    assert made, "nobody came"
    return Tried(f"{method}, {world} ranks: {made} connections", {"hostile connections": made, "steps": 2 * STEPS})
