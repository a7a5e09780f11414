"""Communication hooks of DDP for the methods that are not thinwire's.

DDP checks annotations: a bucket is a dist.GradBucket.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def send_nothing(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Send nothing: what is left is DDP itself, which copies gradients into buckets and calls Python for each."""
    buffer = bucket.buffer()
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


def fp16_hook() -> Callable[..., Any]:
    """Return torch's hook, which sends float16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return fp16_compress_hook


def bf16_hook(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Send bfloat16. torch's own hook refuses gloo."""
    small = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(small, async_op=True)

    def widen(done: Any) -> Tensor:
        whole: Tensor = bucket.buffer()
        return whole.copy_(done.value()[0])

    assert work is not None
    widened: torch.futures.Future[Tensor] = work.get_future().then(widen)
    return widened
