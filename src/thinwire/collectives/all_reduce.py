"""`all_reduce_compressed`, the main function of this package."""

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from ..compressors import Compressor
from .flight import Flight, Handle
from .groups import Group, channels
from .plan import max_bytes as budget
from .request import ShardState, make_request
from .transport.operation import Operation, check_timeout, refusing


def all_reduce_compressed(
    tensor: Tensor,
    compressor: Compressor | str,
    residual: Tensor | None = None,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    algorithm: str = "auto",
    key: int | None = None,
    shard_compressor: Compressor | str | None = None,
    state: ShardState | None = None,
    max_bytes: int | None = None,
    timeout: float | timedelta | None = None,
) -> Handle:
    """Sum tensor + residual over all ranks, in compressed form. The result is written into `tensor`.

    Every rank gets the same bits. The part that this rank does not send is kept in `residual`, in place. All ranks of
    the group must make the same calls, in the same order and with the same arguments. The first call with given
    arguments compares them between ranks, and an error names the ranks that differ. Do not use tensor, residual and
    state until the handle is completed.

    tensor      float32, float64, float16 or bfloat16, contiguous, of any shape.
    compressor  a `Compressor`, or a spec such as "topk:ratio=1/64,bits=2".
    residual    float32 (float64 for float64), of the tensor's shape. None: the part that is not sent is lost.
    op          SUM or AVG; for others use `torch.distributed.all_reduce`.
    group       a process group on gloo or NCCL, or a `DeviceMesh` of one dimension; None for the default group. If the
                network inside a node is fast, a `DeviceMesh` of (nodes, ranks of a node) or a pair of groups (ranks of
                this node, peers of this rank in the other nodes): the sum is dense inside a node and compressed between
                nodes, and this rank keeps only the residual of its share. A `LocalGroup` stands for ranks that are
                threads of this process.
    async_op    return at once; the result is written by the time `wait()` returns.
    algorithm   "gather", "sharded", "dense", "values" (randomk only), or "auto": the one with the fewest bytes sent.
    key         seed for compressors that draw random numbers; by default made from the number of the call.
    shard_compressor   compressor of the sums that owners send, for "sharded"; by default made from `compressor`, with
                more elements and more bits.
    state       residual of owners, for "sharded". With a residual, "auto" uses "sharded" only if a state is given.
    max_bytes   memory in bytes for all calls under way on this group. One call uses at most a quarter of it. By default
                THINWIRE_MAX_BYTES, or 1 GiB.
    timeout     seconds or a timedelta; by default the timeout of the group.

    Returns a handle, which is completed unless `async_op` is set. Its `report` has the algorithm, the reason for it and
    the bytes. If the tensor of any rank holds NaN or Inf, the result is NaN on all ranks and no residual has changed.

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
        if key is not None and type(key) is not int:
            raise ValueError(f"key {key!r}, expected a whole number, such as that of the step")
        request.asked_for.check_input(tensor, residual, operations[-1].number if key is None else key)
        flat, kept = tensor.detach().view(-1), None if residual is None else residual.detach().view(-1)
        flight = Flight(request, operations, flat, kept, state=state, key=key, has_future=True)
    flight.do_all(tensor)
    if not async_op:
        flight.wait()
    return flight
