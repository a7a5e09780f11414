"""Payloads of the right size that no compressor could have made: who gets one says whose it is, and changes nothing."""

import random
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from damage import DAMAGES, DAMAGES_OF_A_DENSE_SUM, Damage, damaged, outside, padding
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training import TOPK as TOPK_OF_TRAINING
from training import differing, loss_of, make_net, optimizer_bits, policy

import thinwire
from oracle import bytes_of
from ranks import Ranks, meet
from thinwire.collectives.cost import owned
from thinwire.kernels.layout import DenseLayout, Layout, TopKLayout

NUMEL = 8 * 1024 + 1001
"""So that the last rank owns more than the others, and its payloads have a size of their own."""
TOPK, QUANTIZE = "topk:ratio=1/16,bits=2,chunk=1024", "quantize:bits=8,block=32"
DENSE = "topk:ratio=1/16,bits=8,chunk=1024"
"""Sent by the algorithm "dense", where there is one."""
SECONDS, AT_ONCE = 100.0, 10.0
"""For every call, the first of which may compile kernels; and what an error may take that is not a time-out."""


class Way(NamedTuple):
    """Which payload is damaged: of what, from whom to whom. The last rank owns the shorter record."""

    spec: str
    stage: str
    world_size: int

    @property
    def algorithm(self) -> str:
        if self.stage == "gather":
            return "gather"
        return "dense" if self.spec == DENSE else "sharded"

    @property
    def sender(self) -> int:
        return {"gather": 1, "piece": 0, "sum": self.world_size - 1}[self.stage]

    @property
    def receiver(self) -> int:
        return {"gather": 0, "piece": self.world_size - 1, "sum": 0}[self.stage]

    @property
    def layout(self) -> Layout:
        first = thinwire.compressor("none" if self.algorithm == "dense" else self.spec)
        if self.stage == "gather":
            return first.layout(NUMEL, torch.float32)
        start, stop = owned(first, NUMEL, torch.float32, self.world_size)[-1]
        return (first if self.stage == "piece" else first.for_sum(self.world_size)).layout(stop - start, torch.float32)

    @property
    def damages(self) -> list[Damage]:
        is_sum = (self.stage, self.algorithm) == ("sum", "dense")
        return DAMAGES_OF_A_DENSE_SUM if is_sum else DAMAGES[type(self.layout)]


class Call:
    """One rank's side of an all-reduce with all that is kept."""

    def __init__(self, rank: int, way: Way) -> None:
        self.way, self.state = way, thinwire.ShardState()
        self.generator = torch.Generator().manual_seed(rank)
        self.residual = 0.01 * torch.randn(NUMEL, generator=self.generator)
        self.tensor = torch.empty(0)
        self.seconds = 0.0
        self.finite = True

    def draw(self) -> None:
        self.tensor = torch.randn(NUMEL, generator=self.generator)

    def kept(self) -> list[Tensor]:
        return [self.residual, *([] if self.state.residual is None else [self.state.residual])]

    def bits(self) -> list[bytes]:
        return [bytes_of(tensor) for tensor in (self.tensor, *self.kept())]

    def reduce(self) -> thinwire.CollectiveError | None:
        started = time.monotonic()
        try:
            work = thinwire.all_reduce_compressed(
                self.tensor, self.way.spec, self.residual, algorithm=self.way.algorithm, state=self.state,
                timeout=SECONDS,
            )  # fmt: skip
            self.finite = work.report.finite
        except thinwire.CollectiveError as error:
            return error
        finally:
            self.seconds = time.monotonic() - started
        return None


def fault(error: thinwire.CollectiveError | None, sender: int) -> str:
    """What is wrong with an error that must name the sender of a malformed payload."""
    if error is None:
        return "nothing was raised"
    if not isinstance(error, thinwire.PeerError) or error.ranks != (sender,):
        return f"not a PeerError that names rank {sender} alone: {error!r}"
    missing = [word for word in ("malformed payload", f"rank {sender}") if word not in str(error)]
    return f"{missing} not in {error}" if missing else ""


def suffer(rank: int, world_size: int, ways: list[Way], everybody: bool) -> list[str]:
    """Each damage in turn, between calls that work; says what is wrong."""
    wrong = []
    for way in ways:
        call = Call(rank, way)
        for damage in way.damages:
            name = f"{way.spec}, {way.stage}, {damage.__name__}"
            wrong += [f"{name}: {what}" for what in suffer_one(rank, call, damage, everybody, name)]
    return wrong


def suffer_one(rank: int, call: Call, damage: Damage, everybody: bool, name: str) -> list[str]:
    way, wrong = call.way, []
    call.draw()
    if call.reduce() is not None:
        wrong.append("the call before it failed")
    call.draw()
    before = call.bits()
    peer = None if everybody else way.receiver
    with damaged(damage, way.layout, peer) if rank == way.sender else nullcontext() as done:
        error = call.reduce()
    if done is not None and done.count != 1:
        wrong.append("nothing was damaged")
    receives = rank == way.receiver or (everybody and (rank != way.sender or way.stage != "piece"))
    if receives and fault(error, way.sender):
        wrong.append(fault(error, way.sender))
    if error is not None and call.bits() != before:
        wrong.append("something has changed")
    if call.seconds > AT_ONCE:
        wrong.append(f"it took {call.seconds:.1f} s")
    call.draw()
    then = call.reduce()
    if not receives and fault(error or then, way.sender):
        wrong.append(f"at the next call: {fault(error or then, way.sender)}")
    if call.seconds > AT_ONCE:
        wrong.append(f"the next call took {call.seconds:.1f} s")
    meet(name, way.world_size)
    return wrong


@pytest.mark.parametrize("everybody", [False, True], ids=["in transit", "of the sender"])
@pytest.mark.parametrize("stage", ["gather", "piece", "sum"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_who_gets_it_names_its_sender_and_has_changed_nothing(
    ranks: Ranks, world_size: int, stage: str, everybody: bool
) -> None:
    ways = [Way(spec, stage, world_size) for spec in (TOPK, QUANTIZE, "none", DENSE)]
    for rank, wrong in enumerate(ranks.run(suffer, world_size, ways, everybody, timeout=150)):
        assert not wrong, f"rank {rank}: {wrong}"


class Target(NamedTuple):
    """What is damaged in training."""

    algorithm: str
    stage: str
    small: str = ""
    """Those that are sent together, and by what; "": those that are not."""


def target_layout(optimizer: thinwire.AdamW, target: Target, owner: int) -> Layout:
    """Of what the last step has sent in this stage."""
    assert optimizer.sync.last_step is not None
    plans = [slot.request.plan for slot in optimizer.sync.last_step.slots]
    fitting = [plan for plan in plans if isinstance(plan.first, thinwire.TopK) is not bool(target.small)]
    plan = max(fitting, key=lambda plan: plan.segments[-1][1])
    numel = plan.segments[-1][1]
    if target.stage == "gather":
        assert plan.algorithm == "gather"
        return plan.first.layout(numel, torch.float32)
    assert plan.algorithm in ("sharded", "dense")
    start, stop = owned(plan.first, numel, torch.float32, optimizer.sync.world_size)[owner]
    return (plan.first if target.stage == "piece" else plan.second).layout(stop - start, torch.float32)


def train(rank: int, world_size: int, targets: list[Target], everybody: bool) -> list[str]:
    """A model and its optimizer for each damage, of a step after the warm-up; says what is wrong."""
    wrong = []
    for target in targets:
        way = Way("", target.stage, world_size)
        number, damages = 0, DAMAGES[DenseLayout]
        while number < len(damages):
            damages, found = train_one(rank, way, target, number, everybody)
            wrong += [f"{target}, {damages[number].__name__}: {what}" for what in found]
            meet(f"{target} {number}", world_size)
            number += 1
    return wrong


def train_one(rank: int, way: Way, target: Target, number: int, everybody: bool) -> tuple[list[Damage], list[str]]:
    """(the damages that fit, what is wrong) with that of this number."""
    model = DistributedDataParallel(make_net())
    rules = policy(TOPK_OF_TRAINING, small_compressor=target.small or QUANTIZE)
    optimizer = thinwire.AdamW(
        model, lr=1e-2, compressor=rules, warmup_steps=1, algorithm=target.algorithm, timeout=SECONDS
    )

    def step(index: int) -> thinwire.CollectiveError | None:
        try:
            optimizer.zero_grad()
            loss_of(model, rank, index).backward()
            optimizer.step()
        except thinwire.CollectiveError as error:
            return error
        return None

    wrong = [f"step {index} failed" for index in range(3) if step(index) is not None]
    layout = target_layout(optimizer, target, way.world_size - 1)
    damages = DAMAGES_OF_A_DENSE_SUM if (target.small, target.stage) == ("none", "sum") else DAMAGES[type(layout)]
    if isinstance(layout, TopKLayout) and layout.tail is None:
        damages = [damage for damage in damages if damage not in (outside, padding)]
    before, started = optimizer_bits(optimizer), time.monotonic()
    peer = None if everybody else way.receiver
    with damaged(damages[number], layout, peer) if rank == way.sender else nullcontext() as done:
        error = step(3)
    if done is not None and done.count != 1:
        wrong.append("nothing was damaged")
    receives = rank == way.receiver or (everybody and (rank != way.sender or way.stage != "piece"))
    if receives and fault(error, way.sender):
        wrong.append(fault(error, way.sender))
    if error is not None:
        wrong += [f"{name} has changed" for name in differing(before, optimizer_bits(optimizer))]
    then = step(4)
    if not receives and fault(error or then, way.sender):
        wrong.append(f"at the next step: {fault(error or then, way.sender)}")
    if time.monotonic() - started > AT_ONCE:
        wrong.append(f"it took {time.monotonic() - started:.1f} s")
    return damages, wrong


@pytest.mark.parametrize("everybody", [False, True], ids=["in transit", "of the sender"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_in_training_not_a_bit_of_weights_moments_or_residuals_changes(
    ranks: Ranks, world_size: int, everybody: bool
) -> None:
    targets = [Target("gather", "gather"), Target("sharded", "piece"), Target("sharded", "sum")]
    targets += [Target("gather", stage, "none") for stage in (["gather"] if world_size == 2 else ["piece", "sum"])]
    targets += [Target("gather", "gather", QUANTIZE)] if world_size == 2 else []
    for rank, wrong in enumerate(ranks.run(train, world_size, targets, everybody, timeout=150)):
        assert not wrong, f"rank {rank}: {wrong}"


def flip(bit: int) -> Damage:
    def damage(payload: Tensor, layout: Layout) -> None:
        payload[bit // 8] ^= 1 << bit % 8

    return damage


def flip_bits(rank: int, world_size: int, count: int, everybody: bool) -> tuple[int, list[str]]:
    """A random bit of one payload in each of `count` calls: how many were refused, and what is wrong."""
    draw, wrong, refused = random.Random(world_size), [], 0
    ways = [Way(spec, stage, world_size) for spec in (TOPK, QUANTIZE, "none") for stage in ("gather", "piece", "sum")]
    for number in range(count):
        way = ways[number % len(ways)]
        bit = draw.randrange(8 * way.layout.nbytes)
        name = f"{number}: {way.spec}, {way.stage}, bit {bit}"
        call = Call(rank, way)
        call.draw()
        before = bytes_of(call.residual)
        peer = None if everybody else way.receiver
        with damaged(flip(bit), way.layout, peer) if rank == way.sender else nullcontext():
            error = call.reduce()
        if error is None and call.finite:
            if not all(each.isfinite().all() for each in (call.tensor, *call.kept())):
                wrong.append(f"{name}: something is not finite")
        elif bytes_of(call.residual) != before or any(bool(each.any()) for each in call.kept()[1:]):
            wrong.append(f"{name}: what is kept has changed")
        found: list[Any] = [None] * world_size
        dist.all_gather_object(found, (error is not None, bytes_of(call.tensor)))
        raised = [each for each, _ in found]
        refused += any(raised)
        if any(raised) and not raised[way.receiver]:
            wrong.append(f"{name}: its receiver goes on, others do not")
        if everybody and not any(raised) and len({bits for _, bits in found}) > 1:
            wrong.append(f"{name}: ranks differ")
        if any(raised) and fault(error, way.sender) and rank == way.receiver:
            wrong.append(f"{name}: {fault(error, way.sender)}")
        if any(raised) and not all(raised):
            call.draw()
            call.reduce()  # the others learn of it
        dist.barrier()
    return refused, wrong


@pytest.mark.parametrize(("world_size", "everybody", "count"), [(3, True, 200), (2, False, 100)])
def test_a_random_bit(ranks: Ranks, world_size: int, everybody: bool, count: int) -> None:
    """Who gets it refuses it, or nobody has anything that is not finite; and what all ranks got is the same on all.

    A bit of a value that is damaged in transit alone is another value, which no judge can see: ranks may differ then.
    """
    for rank, (refused, wrong) in enumerate(ranks.run(flip_bits, world_size, count, everybody, timeout=150)):
        assert not wrong, f"rank {rank}: {wrong}"
        assert count / 20 < refused < count, refused
