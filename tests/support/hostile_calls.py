"""All-reduces in which one payload is damaged: which one, by whom, and what must come of it."""

import random
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from support.damage import DAMAGES, DAMAGES_OF_A_DENSE_SUM, Damage, damaged
from support.oracle import bytes_of
from thinwire.collectives.cost import owned
from thinwire.kernels.layout import Layout

NUMEL = 8 * 1024 + 1001
"""So that the last rank owns more than the others, and its payloads have a size of their own."""
TOPK, QUANTIZE = "topk:ratio=1/16,bits=2,chunk=1024", "quantize:bits=8,block=32"
DENSE = "topk:ratio=1/16,bits=8,chunk=1024"
"""Sent by the algorithm "dense", where there is one."""
SECONDS, AT_ONCE = 100.0, 10.0
"""For every call, the first of which may compile kernels; and what an error may take that is not a time-out."""


class Route(NamedTuple):
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
        return self.world_size - 1 if self.stage == "piece" else 0

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

    def __init__(self, rank: int, route: Route) -> None:
        self.route, self.state = route, thinwire.ShardState()
        self.generator = torch.Generator().manual_seed(rank)
        self.residual = 0.01 * torch.randn(NUMEL, generator=self.generator)
        self.tensor = torch.empty(0)
        self.finite = True

    def draw(self) -> None:
        self.tensor = torch.randn(NUMEL, generator=self.generator)

    def kept(self) -> list[Tensor]:
        return [self.residual, *([] if self.state.residual is None else [self.state.residual])]

    def bits(self) -> dict[str, bytes]:
        names = ("the tensor", "the residual", "the residual of the share")
        return {name: bytes_of(tensor) for name, tensor in zip(names, (self.tensor, *self.kept()), strict=False)}

    def draw_and_reduce(self) -> thinwire.CollectiveError | None:
        self.draw()
        return self.reduce()

    def reduce(self) -> thinwire.CollectiveError | None:
        try:
            work = thinwire.all_reduce_compressed(
                self.tensor, self.route.spec, self.residual, algorithm=self.route.algorithm, state=self.state,
                timeout=SECONDS,
            )  # fmt: skip
            self.finite = work.report.finite
        except thinwire.CollectiveError as error:
            return error
        return None


def fault(error: thinwire.CollectiveError | None, sender: int) -> str:
    """What is wrong with an error that must name the sender of a malformed payload."""
    if error is None:
        return "nothing was raised"
    if not isinstance(error, thinwire.PeerError) or error.ranks != (sender,):
        return f"not a PeerError that names rank {sender} alone: {error!r}"
    missing = [word for word in ("malformed payload", f"rank {sender}") if word not in str(error)]
    return f"{missing} not in {error}" if missing else ""


def flip(bit: int) -> Damage:
    def damage(payload: Tensor, layout: Layout) -> None:
        payload[bit // 8] ^= 1 << bit % 8

    return damage


def flip_bits(rank: int, world_size: int, count: int, to_all: bool, seed: str = "") -> tuple[int, list[str]]:
    """A random bit of one payload in each of `count` calls: how many were refused, and what is wrong."""
    draw, wrong, refused = random.Random(f"{world_size}{seed}"), [], 0
    routes = [
        Route(spec, stage, world_size) for spec in (TOPK, QUANTIZE, "none") for stage in ("gather", "piece", "sum")
    ]
    for number in range(count):
        route = routes[number % len(routes)]
        bit = draw.randrange(8 * route.layout.nbytes)
        name = f"{number}: {route.spec}, {route.stage}, bit {bit}"
        call = Call(rank, route)
        call.draw()
        before = bytes_of(call.residual)
        peer = None if to_all else route.receiver
        with damaged(flip(bit), route.layout, peer) if rank == route.sender else nullcontext():
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
        if any(raised) and not raised[route.receiver]:
            wrong.append(f"{name}: its receiver goes on, others do not")
        if to_all and not any(raised) and len({bits for _, bits in found}) > 1:
            wrong.append(f"{name}: ranks differ")
        if any(raised) and fault(error, route.sender) and rank == route.receiver:
            wrong.append(f"{name}: {fault(error, route.sender)}")
        if any(raised) and not all(raised):
            call.draw_and_reduce()  # the others learn of it
        dist.barrier()
    return refused, wrong
