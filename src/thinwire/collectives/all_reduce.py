"""`all_reduce_compressed`: checks, plans, and hands the work to a thread of the group's channel."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..compressors import Compressor, NoCompression, format_spec
from ..compressors import compressor as parse
from ..compressors.spec import mix_key
from ..kernels.layout import RandomKLayout, residual_dtype
from .channel import Channel, channel_of
from .cost import Span, owned, shares
from .gather import gather
from .handle import Handle, Report, new_future, settle
from .hierarchical import hierarchical
from .link import backend_of
from .operation import Operation
from .plan import Plan, choose, plan
from .plan import max_bytes as budget
from .sharded import sharded
from .stage import Clock, Outcome, Stage
from .state import ShardState
from .values import values

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group = "dist.ProcessGroup | DeviceMesh | tuple[dist.ProcessGroup, dist.ProcessGroup] | None"

_ALGORITHMS: dict[str, Callable[[Stage], Outcome]] = {
    "gather": gather,
    "sharded": sharded,
    "dense": sharded,
    "values": values,
}
_WHY_NOT = {
    "PRODUCT": "an entry that is not sent would count as 0, and make every product 0",
    "MIN": "an entry that is not sent would count as 0, which may be less than the rest",
    "MAX": "an entry that is not sent would count as 0, which may be more than the rest",
    "BAND": "bits of floats that were rounded mean nothing",
    "BOR": "bits of floats that were rounded mean nothing",
    "BXOR": "bits of floats that were rounded mean nothing",
}


def all_reduce_compressed(
    tensor: Tensor,
    compressor: Compressor | str,
    residual: Tensor | None = None,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: "dist.ProcessGroup | DeviceMesh | tuple[dist.ProcessGroup, dist.ProcessGroup] | None" = None,
    async_op: bool = False,
    algorithm: str = "auto",
    key: int | None = None,
    second: Compressor | str | None = None,
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
    async_op    return at once; the result is there after `wait()`.
    algorithm   "gather", "sharded", "dense", "values" (randomk only), or "auto": the one that sends the least.
    key         what a compressor that draws depends on; by default the number of the call on this group.
    second      what owners compress sums with, for "sharded"; by default more entries and more bits.
    state       for "sharded", where owners keep what they do not send on. "auto" takes "sharded" only if it is given.
    max_bytes   memory for all calls on this group that are under way, of which one takes a quarter at most;
                by default THINWIRE_MAX_BYTES, or 1 GiB.
    timeout     seconds; by default that of the group.

    Returns a handle, finished unless `async_op`, whose `report` says what was done and why. If any rank's tensor holds
    NaN or Inf, the result is NaN on all of them and no residual has changed.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> grad, residual = torch.tensor([1.0, -5.0, 2.0, 0.5]), torch.zeros(4)
    >>> _ = all_reduce_compressed(grad, "topk:ratio=1/4", residual)
    >>> grad, residual
    (tensor([ 0., -5.,  0.,  0.]), tensor([1.0000, 0.0000, 2.0000, 0.5000]))
    >>> dist.destroy_process_group()
    """
    inside, between = _groups(group)
    seconds = _seconds(timeout)
    channels = [_channel(member, tensor.device) for member in (inside, between) if member is not None]
    operations = [Operation(channel, seconds) for channel in channels]
    try:
        job = _prepare(
            tensor, compressor, residual, op, operations, algorithm, key, second, state, budget(max_bytes)
        )  # fmt: skip
    except ValueError as error:
        for operation in operations:
            operation.refuse(str(error))
        raise
    handle = _pass_on(job, op) if job.passes_on else _submit(job)
    if not async_op:
        handle.wait()
    return handle


@dataclass(frozen=True)
class Job:
    """One call, checked and planned."""

    tensor: Tensor
    residual: Tensor | None
    operations: list[Operation]
    """The one inside the node, if there are two stages, and the compressed one."""
    plan: Plan
    owner_residuals: list[Tensor | None]
    """By segment."""
    key: int | None
    weight: float
    passes_on: bool
    """Nothing to compress and nothing kept: torch's own all-reduce does it."""
    report: Report


def _prepare(
    tensor: Tensor,
    compressor: Compressor | str,
    residual: Tensor | None,
    op: dist.ReduceOp.RedOpType,
    operations: list[Operation],
    algorithm: str,
    key: int | None,
    second: Compressor | str | None,
    state: ShardState | None,
    max_bytes: int,
) -> Job:
    first = parse(compressor) if isinstance(compressor, str) else compressor
    *nodes, channel = [operation.channel for operation in operations]
    in_node = nodes[0].size if nodes else 1
    passes_on = isinstance(first, NoCompression) and residual is None and not nodes and algorithm in ("auto", "dense")
    op_name = _op_name(op, passes_on)
    last = parse(second) if isinstance(second, str) else second or first.for_sum(channel.size)

    if key is None and first.draws:
        number = operations[-1].number
        shared = isinstance(first.layout(tensor.numel(), tensor.dtype), RandomKLayout)
        key = number if shared else mix_key(number, dist.get_rank())
    first.check_input(tensor, residual, key)
    dtype = tensor.dtype if not nodes else residual_dtype(tensor.dtype)
    share = -(-tensor.numel() // in_node)
    chosen, reason = choose(algorithm, first, last, share, dtype, channel.size, can_shard=state is not None)
    if chosen == "sharded":
        if state is None and residual is not None:
            raise ValueError(
                "algorithm 'sharded' with a residual but no state: what owners do not send on would be lost; give "
                "state=thinwire.ShardState() and keep it beside the residual"
            )
        if state is not None and not last.contracts:
            raise ValueError(f"second {format_spec(last)}, whose residual would grow for ever; use another rounding")
    made = plan(chosen, reason, first, last, tensor.numel(), tensor.dtype, channel.size, in_node, max_bytes)
    draws_alike = isinstance(first.layout(share, dtype), RandomKLayout)
    call = {
        "spec": format_spec(first),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "op": op_name,
        "algorithm": chosen,
        "second": format_spec(last) if chosen == "sharded" else None,
        "residual": residual is not None,
        "state": state is not None if chosen == "sharded" else None,
        "segments": len(made.segments),
        "ranks": [in_node, channel.size],
    }
    owner_residuals = _owner_residuals(state, made, tensor, operations) if chosen == "sharded" else []
    for operation in operations:
        operation.describe(call, key if draws_alike else None)
    name = ("hierarchical, " if nodes else "") + chosen
    return Job(
        tensor.detach().view(-1),
        None if residual is None else residual.detach().view(-1),
        operations,
        made,
        owner_residuals or [None] * len(made.segments),
        key,
        1.0 if op_name != "AVG" else 1 / (in_node * channel.size),
        passes_on,
        Report(name, reason, len(made.segments), made.cost.memory),
    )


def _owner_residuals(
    state: ShardState | None, made: Plan, tensor: Tensor, operations: list[Operation]
) -> list[Tensor | None]:
    """The part of the state's residual that belongs to each segment."""
    if state is None:
        return []
    *nodes, channel = [operation.channel for operation in operations]
    wide = residual_dtype(tensor.dtype)
    spans: list[Span] = []
    for start, stop in made.segments:
        if nodes:
            granule = made.first.layout(tensor.numel(), wide).granule
            low, high = shares(stop - start, granule, nodes[0].size)[nodes[0].rank]
            start, stop = start + low, start + high
        dtype = wide if nodes else tensor.dtype
        low, high = owned(made.first, stop - start, dtype, channel.size)[channel.rank]
        spans.append((start + low, start + high))
    residual = state.prepare(spans, wide, tensor.device)
    return list(residual.split([stop - start for start, stop in spans]))


def _submit(job: Job) -> Handle:
    future = new_future(job.tensor.device)
    handle = Handle(future, job.report)
    stream = None
    if job.tensor.device.type == "cuda":
        # The work waits for what the caller has queued so far, and frees nothing that the caller's stream still uses.
        stream = torch.cuda.Stream(job.tensor.device)
        stream.wait_stream(torch.cuda.current_stream(job.tensor.device))
        for used in (job.tensor, job.residual, *job.owner_residuals):
            if used is not None:
                used.record_stream(stream)

    def work() -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                _run(job)
                settle(future, [job.tensor])
        except BaseException as error:
            settle(future, error)

    job.operations[-1].channel.pool.submit(work)
    return handle


def _run(job: Job) -> None:
    clock = Clock(job.report.seconds)
    *inside, operation = job.operations
    for each in job.operations:
        each.start()
    segments, first = job.plan.segments, job.plan.first
    # The first segment's residual must not change if the last one turns out to hold NaN, on any rank.
    finite = len(segments) == 1 or _all_finite(job)
    for index, (start, stop) in enumerate(segments if finite else ()):
        key = mix_key(job.key, index) if job.key is not None and len(segments) > 1 else job.key
        residual = None if job.residual is None else job.residual[start:stop]
        stage = Stage(
            operation, job.tensor[start:stop], residual, first, job.plan.second, job.owner_residuals[index], key,
            job.weight, clock,
        )  # fmt: skip
        algorithm = _ALGORITHMS[job.plan.algorithm]
        if inside:
            granule = first.layout(job.tensor.numel(), residual_dtype(job.tensor.dtype)).granule
            outcome = hierarchical(stage, inside[0], algorithm, granule)
        else:
            outcome = algorithm(stage)
        finite = outcome.finite
        if not finite:
            break
        outcome.commit()
        outcome.write(stage.tensor)
    if not finite:
        job.tensor.fill_(torch.nan)
    job.report.finite = finite
    job.report.bytes_sent = sum(each.bytes_sent for each in job.operations)
    job.report.bytes_received = sum(each.bytes_received for each in job.operations)
    job.report.bytes_between_nodes = operation.bytes_sent
    job.report.messages = sum(each.messages for each in job.operations)


def _all_finite(job: Job) -> bool:
    """Whether no rank's sum of tensor and residual can overflow, or holds NaN."""
    bound = sum(
        float(torch.maximum(*(extreme.abs() for extreme in torch.aminmax(part))))
        for part in (job.tensor, job.residual)
        if part is not None
    )
    fine = bound <= torch.finfo(residual_dtype(job.tensor.dtype)).max  # False for NaN
    for operation in job.operations:
        channel = operation.channel
        flags = torch.full((channel.size, 1), int(fine), dtype=torch.uint8, device=job.tensor.device)
        others = [rank for rank in range(channel.size) if rank != channel.rank]
        operation.exchange(dict.fromkeys(others, flags[channel.rank]), {rank: flags[rank] for rank in others})
        fine = bool(flags.all())
    return fine


def _pass_on(job: Job, op: dist.ReduceOp.RedOpType) -> Handle:
    """torch's own all-reduce, issued here and now: in the order of the program's other collectives."""
    operation, size = job.operations[0], job.operations[0].channel.size
    operation.start()
    report, tensor = job.report, job.tensor
    report.memory = 0
    report.bytes_sent = report.bytes_received = report.bytes_between_nodes = 2 * tensor.nbytes * (size - 1) // size
    summed = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
    work = dist.all_reduce(tensor, summed, group=operation.channel.group, async_op=True)
    assert work is not None
    future = new_future(tensor.device)

    def finish(done: "Future[list[Tensor]]") -> None:
        try:
            done.value()  # raises what the all-reduce raised
        except Exception as error:
            settle(future, operation.unwatch(error) or error)
            return
        operation.unwatch()
        if job.weight != 1.0:
            tensor.mul_(job.weight)
        settle(future, [tensor])

    operation.watch(lambda error: settle(future, error))
    work.get_future().add_done_callback(finish)
    return Handle(future, report)


def _groups(group: object) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup]:
    """(inside a node, between nodes); the first is None if there is one stage."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    if group is None:
        assert dist.group.WORLD is not None
        return None, dist.group.WORLD
    if isinstance(group, tuple):
        if len(group) != 2:
            raise ValueError(f"a tuple of {len(group)} groups, expected two: (inside a node, between nodes)")
        inside, between = map(_member, group)
        shared = set(dist.get_process_group_ranks(inside)) & set(dist.get_process_group_ranks(between))
        if shared != {dist.get_rank()}:
            raise ValueError(
                f"the two groups share the ranks {sorted(shared)}, expected this rank, {dist.get_rank()}, alone: "
                "(ranks of this node, my peers in the other nodes)"
            )
        return inside, between
    if isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return None, _member(group)
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 2:
            raise ValueError(f"a mesh of {group.ndim} dimensions, expected two: (nodes, ranks of a node)")
        return _member(group.get_group(1)), _member(group.get_group(0))
    raise ValueError(f"group {group!r}, expected a process group, a pair of them, a DeviceMesh or None")


def _member(group: object) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only its members may call")
    return group


def _channel(group: dist.ProcessGroup, device: torch.device) -> Channel:
    return channel_of(group, backend_of(group, device), device)


def _op_name(op: object, passes_on: bool) -> str:
    name = str(op).rpartition(".")[2]
    if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) or (passes_on and name in _WHY_NOT):
        return name
    why = _WHY_NOT.get(name, "compressed tensors can only be added")
    raise ValueError(f"op {name}, expected SUM or AVG: {why}; for {name} use the compressor 'none' without a residual")


def _seconds(timeout: float | timedelta | None) -> float | None:
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < float("inf"):
        raise ValueError(f"timeout {timeout!r}, expected seconds above 0")
    return seconds
