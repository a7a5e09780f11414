"""Runs a job: in a thread of its group, on a stream of its own, segment after segment."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..compressors.spec import mix_key
from ..kernels.layout import residual_dtype
from ..kernels.updates import Update
from .cost import ring
from .gather import gather
from .handle import Handle, Promise
from .hierarchical import hierarchical
from .job import Job
from .plan import AT_ONCE
from .sharded import sharded
from .stage import Outcome, Stage, computing
from .step import Received, Step
from .values import values

_ALGORITHMS: dict[str, Callable[[Stage], Outcome]] = {
    "gather": gather,
    "sharded": sharded,
    "dense": sharded,
    "values": values,
}


@dataclass(frozen=True)
class Part:
    """What makes an operation a part of a step."""

    step: Step
    before: Callable[[], Update | None] = lambda: None
    """Called in the operation's thread, before the tensor is read: it writes what is to be sent into it, or says how,
    and what is to be committed if the step counts."""


def submit(job: Job, part: Part | None = None) -> Handle:
    """Run the job in a thread. As a part of a step, which it has joined, its result is taken when that is settled."""
    promise, stream, queued = Promise(job.tensor.device), None, None
    pool = job.operations[-1].channel.pool
    if job.tensor.device.type == "cuda" and pool is not None:
        # The work waits for what the caller has queued so far, and frees nothing that the caller's stream still uses.
        stream, queued = _side_stream(job.tensor.device), torch.cuda.Event()
        queued.record(torch.cuda.current_stream(job.tensor.device))
        for used in (job.tensor, job.residual, *job.owner_residuals):
            if used is not None:
                used.record_stream(stream)

    def settle(outcome: Outcome, update: Update | None, finite: bool) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                _take(outcome, job, job.tensor, update, finite)
                job.report.finite = finite
                promise.keep([job.result])
        except BaseException as error:
            promise.fail(error)

    def work() -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                if queued is not None:  # only now: an operation before it on the same stream need not wait for this
                    queued.wait()
                if part is None:
                    _run(job)
                    promise.keep([job.result])
                else:
                    with computing(job.tensor), job.report.clock("update"):
                        update = part.before()
                    outcome = _exchange(job, update)
                    part.step.deposit(Received(outcome.finite, partial(settle, outcome, update), promise.fail))
        except BaseException as error:
            if part is not None:
                part.step.fail(error)  # before anyone can know of it and issue the next one
            for operation in job.operations:
                operation.give_up(error)
            promise.fail(error)

    if pool is None:
        work()
    else:
        pool.submit(work)
    return Handle(promise, job.report)


_LOCK = threading.Lock()
_streams: dict[torch.device, Iterator[torch.cuda.Stream]] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One of a few, in turn. Memory that was freed on a stream is used again on that stream alone."""
    with _LOCK:
        if device not in _streams:
            _streams[device] = cycle([torch.cuda.Stream(device) for _ in range(AT_ONCE)])
        return next(_streams[device])


def pass_on(job: Job, op: dist.ReduceOp.RedOpType) -> Handle:
    """torch's own all-reduce, issued here and now: in the order of the program's other collectives."""
    operation, size = job.operations[0], job.operations[0].channel.size
    report, tensor, promise = job.report, job.tensor, Promise(job.tensor.device)
    report.memory = 0
    report.bytes_sent = report.bytes_received = report.bytes_between_nodes = ring(tensor.nbytes, size)
    report.messages = 2 * (size - 1)
    summed = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
    try:
        operation.start(on_failure=lambda error: promise.fail(error))
        work = dist.all_reduce(tensor, summed, group=operation.channel.group, async_op=True)
        assert work is not None
    except BaseException as error:
        operation.give_up(error)
        raise

    def finish(done: "Future[list[Tensor]]") -> None:
        try:
            done.value()  # raises what the all-reduce raised
        except Exception as error:
            caught = error  # explained in another thread, since it may take a while
            assert operation.channel.pool is not None  # torch's own all-reduce is between processes
            operation.channel.pool.submit(lambda: promise.fail(operation.explain(caught)))
            return
        operation.finish()
        if job.weight != 1.0:
            tensor.div_(size)
        promise.keep([job.result])

    work.get_future().add_done_callback(finish)
    return Handle(promise, report)


def _run(job: Job) -> None:
    """All segments, each of which takes effect before the next begins."""
    _start(job)
    # The first segment's residual must not change if the last one turns out to hold NaN, on any rank.
    finite = len(job.plan.segments) == 1 or _all_finite(job)
    for index, (start, stop) in enumerate(job.plan.segments):
        if finite:
            outcome = _run_segment(job, index, None)
            finite = outcome.finite
            _take(outcome, job, job.tensor[start:stop], None, finite)
            del outcome  # its buffers go before those of the next are made
    if not finite:
        job.tensor.fill_(torch.nan)
    job.report.finite = finite
    _finish(job)


def _exchange(job: Job, update: Update | None) -> Outcome:
    """All in one segment, without effect so far."""
    _start(job)
    assert len(job.plan.segments) == 1
    outcome = _run_segment(job, 0, update)
    _finish(job)
    return outcome


def _take(outcome: Outcome, job: Job, tensor: Tensor, update: Update | None, finite: bool) -> None:
    """`tensor` still holds what was sent; the result takes its place, and everything that is kept changes."""
    if not finite:
        tensor.fill_(torch.nan)
    elif outcome.settle is not None:
        outcome.settle(update)
    else:
        if update is not None:
            with computing(tensor), job.report.clock("update"):
                update.commit(tensor)
        outcome.commit()
        outcome.write(tensor)


def _start(job: Job) -> None:
    for operation in job.operations:
        operation.start()


def _finish(job: Job) -> None:
    job.report.bytes_sent = sum(operation.bytes_sent for operation in job.operations)
    job.report.bytes_received = sum(operation.bytes_received for operation in job.operations)
    job.report.bytes_between_nodes = job.operations[-1].bytes_sent
    job.report.messages = sum(operation.messages for operation in job.operations)
    for operation in job.operations:
        operation.finish()


def _run_segment(job: Job, index: int, update: Update | None) -> Outcome:
    *inside, operation = job.operations
    start, stop = job.plan.segments[index]
    if update is not None and (inside or job.plan.algorithm == "values"):  # which do not begin with `first`
        with computing(job.tensor), job.report.clock("update"):
            update.apply(job.tensor)
        update = None
    key = mix_key(job.key, index) if job.key is not None and len(job.plan.segments) > 1 else job.key
    residual = None if job.residual is None else job.residual[start:stop]
    stage = Stage(
        operation, job.tensor[start:stop], residual, job.plan.first, job.plan.second, job.owner_residuals[index], key,
        job.weight, job.report, update,
    )  # fmt: skip
    algorithm = _ALGORITHMS[job.plan.algorithm]
    return hierarchical(stage, inside[0], algorithm, job.plan.granule) if inside else algorithm(stage)


def _all_finite(job: Job) -> bool:
    """Whether no rank's tensor holds NaN, and no sum over ranks can overflow: each tells the others its largest."""
    bound = sum(
        float(torch.maximum(*(extreme.abs() for extreme in torch.aminmax(part))))
        for part in (job.tensor, job.residual)
        if part is not None
    )
    for operation in job.operations:
        bounds = torch.full((operation.channel.size, 1), bound, dtype=torch.float64, device=job.tensor.device)
        operation.all_gather(list(bounds.view(torch.uint8)))
        bound = float(bounds.sum())
    return bound <= torch.finfo(residual_dtype(job.tensor.dtype)).max  # False for NaN
