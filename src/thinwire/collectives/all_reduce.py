"""`all_reduce_compressed`: the one function of this package that everything else is for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from ..compressors import Compressor
from .groups import channels
from .handle import Handle
from .plan import max_bytes as budget
from .reduction import Reduction, pass_on
from .request import make_request
from .state import ShardState
from .transport.operation import Operation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .local import LocalGroup


def all_reduce_compressed(
    tensor: Tensor,
    compressor: Compressor | str,
    residual: Tensor | None = None,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: "dist.ProcessGroup | DeviceMesh | tuple[dist.ProcessGroup, dist.ProcessGroup] | LocalGroup | None" = None,
    async_op: bool = False,
    algorithm: str = "auto",
    key: int | None = None,
    shard_compressor: Compressor | str | None = None,
    state: ShardState | None = None,
    max_bytes: int | None = None,
    timeout: float | timedelta | None = None,
) -> Handle:
    """Sum tensor + residual over all ranks, sending what the compressor makes of it; the result is in `tensor`.

    Every rank ends with the same bits. The residual keeps what this rank did not send, in place. All ranks of the group
    must call it in the same order with the same arguments; the first time that is compared, and an error names who
    differs. Until the handle is done, tensor, residual and state must be left alone.

    tensor      float32, float64, float16 or bfloat16, contiguous, of any shape.
    compressor  a `Compressor`, or a spec such as "topk:ratio=1/64,bits=2".
    residual    float32 (float64 for float64), of the tensor's shape; None: what is not sent is lost.
    op          SUM or AVG.
    group       a process group on gloo or NCCL; None for the default one. For nodes with fast wires inside: a
                `DeviceMesh` of (nodes, ranks of a node), or a pair of groups (ranks of this node, my peers in the other
                nodes): dense inside a node, compressed between them. Only this rank's share of `residual` is used then.
                Or a `LocalGroup`: ranks that are threads of this process.
    async_op    return at once; the result is there after `wait()`. (The first "none" of a kind waits for all ranks.)
    algorithm   "gather", "sharded", "dense", "values" (randomk only), or "auto": the one that sends the least.
    key         what a compressor that draws depends on, others do not look at it; by default the number of the call.
    shard_compressor   what owners compress sums with, for "sharded"; by default more entries and more bits.
    state       for "sharded", where owners keep what they do not send on. With a residual, "auto" takes "sharded" only
                if it is given.
    max_bytes   memory for all calls on this group that are under way, of which one takes a quarter at most;
                by default THINWIRE_MAX_BYTES, or 1 GiB.
    timeout     seconds; by default that of the group.

    Returns a handle, finished unless `async_op`, whose `report` says what was done and why. If any rank's tensor holds
    NaN or Inf, the result is NaN on all of them and no residual has changed.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> grad, residual = torch.tensor([1.0, -5.0, 2.0, 0.5]), torch.zeros(4)
    >>> _ = all_reduce_compressed(grad, "topk:ratio=1/4", residual)
    >>> grad, residual
    (tensor([ 0., -5.,  0.,  0.]), tensor([1.0000, 0.0000, 2.0000, 0.5000]))
    >>> dist.destroy_process_group()
    """
    operations = [Operation(channel) for channel in channels(group, tensor.device)]
    with refusing(operations):
        for operation in operations:
            operation.limit(check_timeout(timeout))
        if residual is not None and not isinstance(residual, Tensor):
            raise ValueError(f"residual of type {type(residual).__name__}, expected a tensor or None")
        request = make_request(
            [operation.channel for operation in operations],
            tensor,
            compressor,
            op=op,
            algorithm=algorithm,
            shard_compressor=shard_compressor,
            has_residual=residual is not None,
            state=state,
            max_bytes=budget(max_bytes),
        )
        request.asked_for.check_input(tensor, residual, request.key_of(key, operations[-1].number))
        if not request.passes_on:
            flat, kept = tensor.detach().view(-1), None if residual is None else residual.detach().view(-1)
            reduction = Reduction(request, operations, flat, kept, state, key, has_future=True)
    if request.passes_on:
        handle = pass_on(request, operations[0], tensor)
    else:
        reduction.run_all(tensor)
        handle = reduction.handle
    if not async_op:
        handle.wait()
    return handle


@contextmanager
def refusing(operations: Sequence[Operation]) -> Iterator[None]:
    """Let the other ranks, who wait for this one, know why it does not take part."""
    try:
        yield
    except Exception as error:
        for operation in operations:
            operation.refuse(str(error))
        raise


def check_timeout(timeout: float | timedelta | None) -> float | None:
    """In seconds."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
        raise ValueError(f"timeout {timeout!r}, expected seconds above 0, or a timedelta")
    return seconds
