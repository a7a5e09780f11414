"""Payloads of the right size that no compressor could have made: the receiver names the sender, and changes nothing."""

import time
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support.damage import DAMAGES, DAMAGES_OF_A_DENSE_SUM, Damage, damaged, outside, padding
from support.hostile_calls import AT_ONCE, DENSE, QUANTIZE, SECONDS, TOPK, Call, Route, fault, flip_bits
from support.slow import slow
from support.training import TOPK as TOPK_OF_TRAINING
from support.training import differing, loss_of, make_net, optimizer_bits, policy
from thinwire.collectives.cost import owned
from thinwire.kernels.layout import DenseLayout, Layout, TopKLayout
from thinwire.testing import RankPool, store_barrier


def watch(
    rank: int, route: Route, damage: Damage, layout: Layout, to_all: bool, one: Any, then: Any, bits: Any
) -> list[str]:
    """Damage a payload of the call `one`; `then` is the next. Says what is wrong."""
    wrong, before, started = [], bits(), time.monotonic()
    peer = None if to_all else route.receiver
    with damaged(damage, layout, peer) if rank == route.sender else nullcontext():
        error = one()
    receives = rank == route.receiver or (to_all and (rank != route.sender or route.stage != "piece"))
    if receives and fault(error, route.sender):
        wrong.append(fault(error, route.sender))
    if error is not None:
        wrong += [f"{name} has changed" for name in differing(before, bits())]
    after = then()
    if not receives and fault(error or after, route.sender):
        wrong.append(f"at the next call: {fault(error or after, route.sender)}")
    if time.monotonic() - started > AT_ONCE:
        wrong.append(f"it took {time.monotonic() - started:.1f} s")
    return wrong


def suffer(rank: int, world_size: int, routes: list[Route], to_all: bool) -> list[str]:
    """Each damage in turn, between calls that work; says what is wrong."""
    wrong = []
    for route in routes:
        call = Call(rank, route)
        for damage in route.damages:
            name = f"{route.spec}, {route.stage}, {damage.__name__}"
            if call.draw_and_reduce() is not None:
                wrong.append(f"{name}: the call before it failed")
            call.draw()
            found = watch(rank, route, damage, route.layout, to_all, call.reduce, call.draw_and_reduce, call.bits)
            wrong += [f"{name}: {what}" for what in found]
            store_barrier(name, world_size)
    return wrong


@pytest.mark.parametrize("to_all", [False, True], ids=["in transit", "of the sender"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_receiver_names_the_sender_and_changes_nothing(ranks: RankPool, world_size: int, to_all: bool) -> None:
    specs, stages = (TOPK, QUANTIZE, "none", DENSE), ("gather", "piece", "sum")
    routes = [Route(spec, stage, world_size) for stage, spec in product(stages, specs)]
    for rank, wrong in enumerate(ranks.run(suffer, world_size, routes, to_all, timeout=150)):
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
    plans = [slot.request.plan for slot in optimizer.sync.last_step.slots_used]
    fitting = [plan for plan in plans if isinstance(plan.first, thinwire.TopK) is not bool(target.small)]
    plan = max(fitting, key=lambda plan: plan.segments[-1][1])
    numel = plan.segments[-1][1]
    if target.stage == "gather":
        assert plan.algorithm == "gather"
        return plan.first.layout(numel, torch.float32)
    assert plan.algorithm in ("sharded", "dense")
    start, stop = owned(plan.first, numel, torch.float32, optimizer.sync.world_size)[owner]
    return (plan.first if target.stage == "piece" else plan.second).layout(stop - start, torch.float32)


def train(rank: int, world_size: int, targets: list[Target], to_all: bool) -> list[str]:
    """A model and its optimizer for each damage, of a step after the warm-up; says what is wrong."""
    wrong = []
    for target in targets:
        route = Route("", target.stage, world_size)
        number, damages = 0, DAMAGES[DenseLayout]
        while number < len(damages):
            damages, found = train_one(rank, route, target, number, to_all)
            wrong += [f"{target}, {damages[number].__name__}: {what}" for what in found]
            store_barrier(f"{target} {number}", world_size)
            number += 1
    return wrong


def train_one(rank: int, route: Route, target: Target, number: int, to_all: bool) -> tuple[list[Damage], list[str]]:
    """(the damages that fit, what is wrong) with that of this number."""
    model = DistributedDataParallel(make_net())
    rules = policy(TOPK_OF_TRAINING, small_compressor=target.small or QUANTIZE)
    collective = thinwire.Collective(algorithm=target.algorithm, timeout=SECONDS)
    optimizer = thinwire.AdamW(model, lr=1e-2, compressor=rules, warmup_steps=1, collective=collective)

    def step(index: int) -> thinwire.CollectiveError | None:
        try:
            optimizer.zero_grad()
            loss_of(model, rank, index).backward()
            optimizer.step()
        except thinwire.CollectiveError as error:
            return error
        return None

    wrong = [f"step {index} failed" for index in range(3) if step(index) is not None]
    layout = target_layout(optimizer, target, route.world_size - 1)
    damages = DAMAGES_OF_A_DENSE_SUM if (target.small, target.stage) == ("none", "sum") else DAMAGES[type(layout)]
    if isinstance(layout, TopKLayout) and layout.tail is None:
        damages = [damage for damage in damages if damage not in (outside, padding)]
    wrong += watch(
        rank,
        route,
        damages[number],
        layout,
        to_all,
        lambda: step(3),
        lambda: step(4),
        lambda: optimizer_bits(optimizer),
    )
    return damages, wrong


@pytest.mark.parametrize(("world_size", "to_all"), [(2, True), slow(2, False), (3, False), slow(3, True)])
def test_in_training_no_weight_moment_or_residual_changes(ranks: RankPool, world_size: int, to_all: bool) -> None:
    targets = [Target("gather", "gather"), Target("sharded", "piece"), Target("sharded", "sum")]
    targets += [Target("gather", stage, "none") for stage in (["gather"] if world_size == 2 else ["piece", "sum"])]
    targets += [Target("gather", "gather", QUANTIZE)] if world_size == 2 else []
    for rank, wrong in enumerate(ranks.run(train, world_size, targets, to_all, timeout=150)):
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize(("world_size", "to_all", "count"), [(3, True, 200), (2, False, 100)])
def test_a_random_bit(ranks: RankPool, world_size: int, to_all: bool, count: int) -> None:
    """The receiver refuses it, or no rank has anything that is not finite; and what all ranks got is the same on all.

    A bit of a value that is damaged in transit alone is another value, which no check can see: ranks may differ then.
    """
    for rank, (refused, wrong) in enumerate(ranks.run(flip_bits, world_size, count, to_all, timeout=150)):
        assert not wrong, f"rank {rank}: {wrong}"
        assert count / 20 < refused < count, refused
