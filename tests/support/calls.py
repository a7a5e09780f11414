"""Calls of ranks whose sum is known, and what went wrong in one of them."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire


class Failure(NamedTuple):
    error: str
    message: str
    ranks: tuple[int, ...]
    seconds: float


def start(numel: int = 5000, number: int = 1, *, async_op: bool = True, **options: Any) -> tuple[Any, Tensor]:
    """127 times a number, which eight bits hold exactly, from every rank."""
    tensor = torch.full((numel,), 127.0 * number)
    return thinwire.all_reduce_compressed(tensor, "quantize:bits=8", async_op=async_op, **options), tensor


def is_right(tensor: Tensor, number: int = 1, group: Any = None) -> bool:
    return bool((tensor == 127 * number * dist.get_world_size(group)).all())


def reduce(numel: int = 5000, **options: Any) -> None:
    """A call that all ranks make alike gives the right sum."""
    _, tensor = start(numel, async_op=False, **options)
    assert is_right(tensor, group=options.get("group"))


def catch(call: Callable[[], Any]) -> Failure | None:
    started = time.monotonic()
    try:
        call()
    except (thinwire.CollectiveError, ValueError) as error:
        return Failure(type(error).__name__, str(error), getattr(error, "ranks", ()), time.monotonic() - started)
    return None
