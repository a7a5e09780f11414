"""Futures of tensors that several operations work on, each on a stream of its own."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future


def future_on(device: torch.device) -> "Future[Tensor]":
    return Future(devices=[device] if device.type == "cuda" else None)


def when_all(futures: "Sequence[Future[Any]]", tensor: Tensor, finish: Callable[[], None]) -> "Future[Tensor]":
    """A future of `tensor`, after `finish`, which comes after all the others; or the error of one of them.

    `collect_all(...).then(...)` would wait for the stream of whichever future was last, and for no other.
    """
    made, lock, open_ones = future_on(tensor.device), threading.Lock(), [len(futures)]

    def one_is_done(_: "Future[Any]") -> None:
        with lock:
            open_ones[0] -= 1
            if open_ones[0]:
                return
        stream = torch.cuda.Stream(tensor.device) if tensor.device.type == "cuda" else None
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                for future in futures:
                    future.wait()  # done, so this makes the stream wait for its tensors, or raises
                if stream is not None:
                    tensor.record_stream(stream)
                finish()
                made.set_result(tensor)
        except Exception as error:
            made.set_exception(error)  # type: ignore[arg-type]

    for future in futures:
        future.add_done_callback(one_is_done)
    return made


def pass_result(source: "Future[Any]", target: "Future[Tensor]", tensor: Tensor) -> None:
    """Let `target`, of `tensor`, be done when `source` is."""

    def pass_on(done: "Future[Any]") -> None:
        try:
            done.wait()
        except Exception as error:
            fail(target, error)
        else:
            with suppress(RuntimeError):  # it has failed meanwhile
                target.set_result(tensor)

    source.add_done_callback(pass_on)


def fail(future: "Future[Any]", error: Exception) -> None:
    """Unless it is done."""
    with suppress(RuntimeError):
        future.set_exception(error)
