"""Payloads of the right size that no compressor could have made: the receiver names the sender, and changes nothing."""

import time
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

import thinwire
from support.damage import DAMAGES, DAMAGES_OF_A_DENSE_SUM, Damage, damaged
from support.hostile_calls import AT_ONCE, DENSE, QUANTIZE, SECONDS, TOPK, Call, Route, fault, flip_bits
from support.run import Run
from support.slow import slow
from support.training import TOPK as TOPK_OF_TRAINING
from support.training import differing, policy
from thinwire.collectives.cost import owned
from thinwire.kernels.layout import Layout
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
    """What is damaged in training; `small` is the compressor of small tensors, if it is theirs."""

    algorithm: str
    stage: str
    small: str = ""


def target_layout(sync: thinwire.Synchronizer, target: Target) -> Layout:
    """Of what the last step has sent in this stage; the last rank owns it."""
    assert sync.last_step is not None
    plans = [slot.request.plan for slot in sync.last_step.slots_used]
    fitting = [plan for plan in plans if isinstance(plan.first, thinwire.TopK) is not bool(target.small)]
    plan = max(fitting, key=lambda plan: plan.segments[-1][1])
    numel = plan.segments[-1][1]
    if target.stage == "gather":
        assert plan.algorithm == "gather"
        return plan.first.layout(numel, torch.float32)
    assert plan.algorithm in ("sharded", "dense")
    start, stop = owned(plan.first, numel, torch.float32, sync.world_size)[-1]
    return (plan.first if target.stage == "piece" else plan.second).layout(stop - start, torch.float32)


def train(rank: int, world_size: int, targets: list[Target], to_all: bool) -> list[str]:
    """Damage each target in a step after the warm-up, of a model of its own; says what is wrong."""
    wrong = []
    for target in targets:
        rules = policy(TOPK_OF_TRAINING, small_compressor=target.small or QUANTIZE)
        collective = thinwire.Collective(algorithm=target.algorithm, timeout=SECONDS)
        run = Run(rank, "AdamW", ddp=True, buckets={}, compressor=rules, warmup_steps=1, collective=collective)

        def step(index: int, run: Run = run) -> thinwire.CollectiveError | None:
            try:
                run.train(index, index + 1)
            except thinwire.CollectiveError as error:
                return error
            return None

        run.train(0, 3)
        layout, route = target_layout(run.sync, target), Route("", target.stage, world_size)
        is_dense_sum = (target.small, target.stage) == ("none", "sum")
        damage = (DAMAGES_OF_A_DENSE_SUM if is_dense_sum else DAMAGES[type(layout)])[0]
        found = watch(rank, route, damage, layout, to_all, partial(step, 3), partial(step, 4), run.bits)
        wrong += [f"{target}: {what}" for what in found]
        store_barrier(f"{target}", world_size)
    return wrong


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
