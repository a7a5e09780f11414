"""Ranks that call with something else get an error that says who and what, within seconds, and can go on."""

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import thinwire
from support.calls import Failure, catch, is_right, reduce, start
from support.slow import slow
from thinwire.testing import RankPool, store_barrier

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


def differ(rank: int, world_size: int, odd: int, words: list[str], known: bool, between: bool) -> list[Failure | None]:
    """Rank `odd` makes the second call of each pair, the others the first; in the end all make one alike.

    known     every call was made by all ranks before, so that none of them is new.
    between   all make a call alike after each pair, too.
    """
    found = []
    for call in [call for word in words for call in DIFFERENT[word]] if known else []:
        call()
    for word in words:
        found.append(catch(DIFFERENT[word][rank == odd]))
        if between:
            reduce(algorithm="gather")
    reduce(algorithm="gather")
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
KNOWN = {2: ["topk", "float32", "algorithm"], 3: ["quantize", "10000", "op", "residual", "shard_compressor"]}
"""Fewer, since each takes a second to show. A key is new on every call, and so is not here."""


@pytest.mark.parametrize(
    ("world_size", "odd", "known", "between"),
    [(2, 1, False, True), (2, 1, True, False), (3, 0, False, False), slow(3, 0, True, True)],
)
def test_different_calls_are_an_error_that_names_the_rank(
    ranks: RankPool, world_size: int, odd: int, known: bool, between: bool
) -> None:
    words = KNOWN[world_size] if known else [*DIFFERENT]
    found = ranks.run(differ, world_size, odd, words, known, between, timeout=100)
    for rank, failures in enumerate(found):
        for word, failure in zip(words, failures, strict=True):
            where = f"rank {rank}, {word}: {failure}"
            assert failure is not None, f"rank {rank} did not notice: {word}"
            assert (failure.error, odd in failure.ranks) == ("MismatchError", True), where
            # Two ranks alone cannot tell which is odd. Later calls are compared by messages, so by two ranks, too.
            assert failure.ranks == (odd,) or world_size == 2 or known, where
            assert failure.seconds < 15, where
            assert f"rank {odd}" in failure.message, where
            assert word in failure.message, where


def refuse(rank: int, world_size: int) -> list[Failure | None]:
    """What rank 1 alone gets wrong: it counts as a call, so that the next ones still meet their own."""
    found = []
    for right, wrong in (
        (
            Call(residual=True, options={"algorithm": "gather"}),
            lambda: thinwire.all_reduce_compressed(torch.ones(10_000), TOPK, torch.zeros(3), algorithm="gather"),
        ),
        (Call(), Call("topk:ratio=7")),
        (Call(), Call(options={"timeout": -1.0})),
        (Call(), lambda: thinwire.all_reduce_compressed(torch.ones(100, 200)[:, ::2], TOPK)),
    ):
        found.append(catch(wrong if rank == 1 else right))
        reduce(algorithm="gather")
    return found


def refuse_operations(rank: int, world_size: int) -> None:
    names = ("PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
    for spec, name in product((TOPK, "none"), names):
        with pytest.raises(ValueError, match=f"{name}, expected SUM or AVG.*dist.all_reduce"):
            Call(spec, options={"op": getattr(dist.ReduceOp, name)})()


def test_input_that_one_rank_refuses_fails_on_all(ranks: RankPool) -> None:
    for rank, failures in enumerate(ranks.run(refuse, 3)):
        for failure in failures:
            assert failure is not None, f"rank {rank} did not notice"
            assert failure.error == "ValueError" if rank == 1 else failure.ranks == (1,), failure
            assert failure.seconds < 15, failure
    ranks.run(refuse_operations, 2)


def disagree(rank: int, world_size: int, count: int, odd: int, known: bool, alone: int | None) -> list[str]:
    """Calls at once, of which that of number `odd` is another one on rank 1; what each handle raises.

    known: all of them were called with before. Rank `alone` waits for each before it starts the next.
    """
    sizes = [5000 + index for index in range(count)]
    if known:
        for size in (*sizes, 77):
            reduce(size)
    if rank == 1:
        sizes[odd] = 77
    errors = []
    for group in [[size] for size in sizes] if rank == alone else [sizes]:
        for work, tensor in [start(size) for size in group]:
            failure = catch(work.wait)
            assert failure is not None or is_right(tensor)
            assert work.is_completed()
            errors.append("" if failure is None else failure.error)
    store_barrier("all have failed", world_size)
    reduce()
    return errors


@pytest.mark.parametrize(
    ("world_size", "known", "alone"), [(2, True, None), (3, False, None), (3, False, 0), (3, True, 0)]
)
def test_one_that_differs_ends_those_behind_it(
    ranks: RankPool, world_size: int, known: bool, alone: int | None
) -> None:
    count, odd = (10, 3) if alone is None else (6, 2)
    for rank, errors in enumerate(ranks.run(disagree, world_size, count, odd, known, alone, timeout=15)):
        assert errors[odd] == "MismatchError", f"rank {rank}: {errors}"
        assert alone is None or errors[:odd] == [""] * odd, f"rank {rank}: {errors}"
