"""Ranks that call with something else get an error that says who and what, within seconds, and can go on."""

import time
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import thinwire
from support.slow import slow
from thinwire.testing import RankPool

TOPK = "topk:ratio=1/64,bits=2"


class Call(NamedTuple):
    """The arguments of one rank."""

    spec: str = TOPK
    shape: tuple[int, ...] = (10_000,)
    dtype: torch.dtype = torch.float32
    residual: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def __call__(self) -> Any:
        tensor = torch.ones(self.shape, dtype=self.dtype)
        residual = torch.zeros(self.shape) if self.residual else None
        return thinwire.all_reduce_compressed(tensor, self.spec, residual, **self.options)


class Failure(NamedTuple):
    error: str
    mismatch: bool
    message: str
    ranks: tuple[int, ...]
    seconds: float


def catch(call: Callable[[], Any]) -> Failure | None:
    started = time.monotonic()
    try:
        call()
    except thinwire.CollectiveError as error:
        mismatch = isinstance(error, thinwire.MismatchError)
        return Failure(type(error).__name__, mismatch, str(error), error.ranks, time.monotonic() - started)
    except ValueError as error:
        return Failure("ValueError", False, str(error), (), time.monotonic() - started)
    return None


def works(world_size: int) -> bool:
    """A call that all ranks make alike gives the right sum."""
    tensor = torch.full((5000,), 127.0)  # eight bits hold it exactly
    thinwire.all_reduce_compressed(tensor, "quantize:bits=8", algorithm="gather")
    return bool((tensor == 127 * world_size).all())


def differ(rank: int, world_size: int, odd: int, pairs: list[tuple[Call, Call]], known: bool) -> list[Any]:
    """Rank `odd` makes the second call of each pair, the others the first; then all make one alike.

    known: every call was made by all ranks before, so that none of them is new.
    """
    found: list[Any] = []
    for pair in pairs:
        if known:
            for call in pair:
                call()
        found.append((catch(pair[rank == odd]), works(world_size)))
    return found


DIFFERENT = {
    "topk": (Call(), Call(spec="topk:ratio=1/32,bits=2")),
    "quantize": (Call(), Call(spec="quantize:bits=8")),
    "10000": (Call(), Call(shape=(10_001,))),
    "float32": (Call(), Call(dtype=torch.bfloat16)),
    "op": (Call(), Call(options={"op": dist.ReduceOp.AVG})),
    "algorithm": (Call(options={"algorithm": "gather"}), Call(options={"algorithm": "sharded"})),
    "residual": (Call(options={"algorithm": "gather"}), Call(residual=True, options={"algorithm": "gather"})),
    "shard_compressor": (
        Call(options={"algorithm": "sharded"}),
        Call(options={"algorithm": "sharded", "shard_compressor": "quantize:bits=8"}),
    ),
    "key": (
        Call("randomk:ratio=1/4", options={"key": 1}),
        Call("randomk:ratio=1/4", options={"key": 2}),
    ),
}  # fmt: skip


def check(found: list[list[Any]], odd: int, words: list[str]) -> None:
    for rank, outcomes in enumerate(found):
        for word, (failure, worked) in zip(words, outcomes, strict=True):
            where = f"rank {rank}, {word}: {failure}"
            assert failure is not None, f"rank {rank} did not notice: {word}"
            assert failure.mismatch, where
            assert failure.seconds < 15, where
            assert odd in failure.ranks, where
            assert f"rank {odd}" in failure.message, where
            assert word in failure.message, where
            assert worked, f"rank {rank} after {word}: the next call gave a wrong sum"


KNOWN = {2: ["topk", "float32", "algorithm"], 3: ["quantize", "10000", "op", "residual", "shard_compressor"]}
"""Fewer, since each takes a second to show. A key is new on every call, and so is not here."""


@pytest.mark.parametrize(("world_size", "odd", "known"), [(2, 1, False), (2, 1, True), (3, 0, False), slow(3, 0, True)])
def test_different_calls_are_an_error_that_names_the_rank(
    ranks: RankPool, world_size: int, odd: int, known: bool
) -> None:
    names = KNOWN[world_size] if known else [*DIFFERENT]
    found = ranks.run(differ, world_size, odd, [DIFFERENT[name] for name in names], known, timeout=100)
    check(found, odd, names)


def swap(rank: int, world_size: int, new: bool) -> list[Any]:
    """Two calls that all ranks make, rank 1 in the other order."""
    calls = [Call(), Call(spec="quantize:bits=8", shape=(77, 5))]
    if not new:
        for call in calls:
            call()
    if rank == 1:
        calls.reverse()
    return [catch(calls[0]), catch(calls[1]), works(world_size)]


@pytest.mark.parametrize("new", [True, False])
def test_calls_in_another_order_are_an_error(ranks: RankPool, new: bool) -> None:
    for rank, (first, second, worked) in enumerate(ranks.run(swap, 3, new)):
        for failure in (first, second):
            assert failure is not None, f"rank {rank} did not notice"
            assert failure.mismatch, failure
            assert failure.seconds < 15, failure
        assert worked, f"rank {rank}"


def refuse(rank: int, world_size: int) -> list[Any]:
    """Rank 1 gives a residual of the wrong shape, then a spec that does not exist, then a tensor with holes."""
    found = []
    good = [Call(residual=True, options={"algorithm": "gather"}), Call(), Call()]
    bad = [
        lambda: thinwire.all_reduce_compressed(torch.ones(10_000), TOPK, torch.zeros(3), algorithm="gather"),
        lambda: thinwire.all_reduce_compressed(torch.ones(10_000), "topk:ratio=7"),
        lambda: thinwire.all_reduce_compressed(torch.ones(100, 200)[:, ::2], TOPK),
    ]
    for right, wrong in zip(good, bad, strict=True):
        found.append((catch(wrong if rank == 1 else right), works(world_size)))
    return found


def test_input_that_one_rank_refuses_fails_on_all(ranks: RankPool) -> None:
    found = ranks.run(refuse, 3)
    for rank, outcomes in enumerate(found):
        for failure, worked in outcomes:
            assert failure is not None, f"rank {rank} did not notice"
            assert failure.error == "ValueError" if rank == 1 else failure.ranks == (1,), failure
            assert failure.seconds < 15, failure
            assert worked, f"rank {rank}"


def refused_operations(rank: int, world_size: int) -> None:
    names = ("PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
    for spec, name in product((TOPK, "none"), names):
        with pytest.raises(ValueError, match=f"{name}, expected SUM or AVG.*dist.all_reduce"):
            thinwire.all_reduce_compressed(torch.ones(5000), spec, op=getattr(dist.ReduceOp, name))


def test_operations_other_than_sums_are_refused(ranks: RankPool) -> None:
    ranks.run(refused_operations, 2)
