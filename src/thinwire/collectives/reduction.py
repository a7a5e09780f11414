"""An all-reduce under way: encoded by its caller or by the wire, exchanged by the wire, applied by whoever has to.

all_reduce_compressed    the wire does everything, segment after segment
a step of training       the caller encodes in backward, and applies in `optimizer.step()`, every slice or none
"""

import threading
import time
from collections.abc import Callable, Generator, Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compressors.spec import mix_key
from ..kernels.layout import residual_dtype
from ..kernels.recording import Recording
from ..kernels.updates import Update
from .algorithms.gather import gather
from .algorithms.hierarchical import hierarchical
from .algorithms.sharded import sharded
from .algorithms.stage import Buffers, Exchange, Outcome, Run, Stage, all_gather
from .algorithms.values import values
from .cost import ring
from .handle import Handle, Report, Span
from .request import Request
from .state import ShardState
from .transport.link import Seen, Wait
from .transport.operation import Operation

_ALGORITHMS: dict[str, Callable[[Stage], Run]] = {
    "gather": gather,
    "sharded": sharded,
    "dense": sharded,
    "values": values,
}


class Reduction:
    """A request at work.

    `handle` is done when everything is exchanged; in training, nothing has changed by then, and `apply` does the rest.
    """

    def __init__(
        self,
        request: Request,
        operations: list[Operation],
        tensor: Tensor,
        residual: Tensor | None,
        state: ShardState | None,
        key: int | None,
        *,
        buffers: Buffers | None = None,
        has_future: bool = False,
    ) -> None:
        self.request, self._operations = request, operations
        report = Report(request.algorithm, request.plan.reason, len(request.plan.segments), request.plan.cost.memory)
        self.handle = Handle(report, tensor.device if has_future else None)
        self.encoded = False
        self.failure: BaseException | None = None
        """What ended it; known before other ranks can learn of it."""
        self._tensor, self._residual, self._buffers = tensor, residual, buffers
        self._owner_residuals = request.owner_residuals(state, tensor.dtype, tensor.device)
        self._key = request.key_of(key, operations[-1].number)
        for operation in operations:  # positions are drawn alike by those who sum them: the ranks of the last group
            draws_alike = request.positions_drawn and operation is operations[-1]
            operation.describe(request.described, request.text, self._key if draws_alike else None)
        self._run: Generator[Exchange, Seen, Any] | None = None
        self._asked: Exchange | None = None
        self._posted: tuple[Wait, float] | None = None
        self._outcome: Outcome | None = None
        self._result: Tensor | None = None
        """The caller's tensor, if the wire does everything."""
        self._ended_with: Outcome | bool | None = None
        self._at: int | None = None
        """The segment that is under way."""
        self._wire = operations[-1].channel.wire
        self._through_host = buffers is not None and tensor.is_cuda and request.goes_through_host
        self._stream = None if self._wire is None or self._through_host else self._wire.stream(tensor.device)
        self._begun: torch.cuda.Event | None = None
        """Recorded behind what the caller had queued."""
        self._ready: torch.cuda.Event | None = None
        """Recorded behind what makes the payload."""
        self._to_replay: tuple[Recording, Hashable, torch.cuda.Stream] | None = None
        self._replayed: threading.Event | None = None

    # By the caller.

    def encode(self, *, is_replayed: bool = False) -> None:
        """Make the payload here and now; the tensor is not needed any more when this returns, or on a GPU is not read
        by anything that is queued later.

        is_replayed   a recording has made it, in the same memory.
        """
        assert self._buffers is not None
        self._buffers.rewind(is_replayed=is_replayed)
        self._run = self._segment(0, self._tensor)
        with torch.no_grad():
            self._asked = next(self._run)
        self._buffers.is_replayed = False  # what follows is the wire's
        self.encoded = True

    def encode_on_wire(self, recording: Recording, key: Hashable, side: torch.cuda.Stream) -> None:
        """Let the wire start the recording that makes the payload, on a stream beside that of the caller."""
        self._begun = torch.cuda.Event()
        self._begun.record(torch.cuda.current_stream(self._tensor.device))
        self._to_replay, self._replayed = (recording, key, side), threading.Event()
        self.encoded = True

    def wait_until_replayed(self) -> None:
        """Until the wire has started what it was to start."""
        if self._replayed is not None:
            self._replayed.wait()

    def submit(self) -> None:
        """Hand it to the wire; or, where ranks take turns, exchange now."""
        if self._to_replay is None and (self._stream is not None or self._through_host):
            # The wire waits for what the caller has queued so far, and frees nothing that the caller's stream uses.
            self._ready = torch.cuda.Event(blocking=self._through_host)
            self._ready.record(torch.cuda.current_stream(self._tensor.device))
        if self._wire is not None:
            self._wire.submit(self)
        else:
            under_way = self.post()
            while under_way:
                under_way = self.collect()

    def run_all(self, result: Tensor) -> None:
        """Let the wire do everything; the result is in the tensor, which is `result` flattened."""
        self._result = result
        if self._stream is not None:
            for used in (self._tensor, self._residual, *self._owner_residuals):
                if used is not None:
                    used.record_stream(self._stream)
        try:
            self.submit()
        except BaseException as error:
            self.fail(error)
            raise

    def apply(self, gradient: Tensor | None, update: Update | None, out: Tensor) -> None:
        """Update the residuals and moments, and write the result: see `Outcome.apply`."""
        assert self._outcome is not None
        self._outcome.apply(gradient, update, out)
        self.drop()

    def join_streams(self) -> None:
        """Let what is queued from now on come after what the wire has queued."""
        if self._stream is not None:
            torch.cuda.current_stream(self._tensor.device).wait_stream(self._stream)

    def drop(self) -> None:
        """Let go of the memory."""
        self._outcome = self._run = self._asked = self._posted = None

    # By the wire.

    @property
    def meets(self) -> bool:
        return any(operation.meets for operation in self._operations)

    @property
    def has_two_rounds(self) -> bool:
        return len(self._operations) == 1 and len(self.request.plan.segments) == 1

    def post(self) -> bool:
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                if self._to_replay is not None:
                    self._replay(*self._to_replay)
                if self._ready is not None:
                    self._ready.synchronize() if self._through_host else self._ready.wait()
                for operation in self._operations:
                    operation.start()
                return self._post() if self.encoded else self._begin_part()
        except BaseException as error:
            return self.fail(error)

    def _replay(self, recording: Recording, key: Hashable, side: torch.cuda.Stream) -> None:
        assert self._begun is not None
        assert self._replayed is not None
        try:
            with torch.cuda.stream(side):
                self._begun.wait()
                if not recording.replay(key):
                    raise RuntimeError("a recording is not what it was: a bug in thinwire")
                self._ready = torch.cuda.Event(blocking=self._through_host)
                self._ready.record()
        finally:
            self._replayed.set()
        self.encode(is_replayed=True)

    def collect(self) -> bool:
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                return self._post() if self._resume() else self._end_part()
        except BaseException as error:
            return self.fail(error)

    def _resume(self) -> bool:
        """Wait for what was posted, and let the algorithm go on; False if it has ended."""
        assert self._asked is not None
        assert self._posted is not None
        assert self._run is not None
        asked, (wait, since), self._asked, self._posted = self._asked, self._posted, None, None
        seen = asked.operation.collect(wait)
        self.handle.report.spans.append(Span("exchange", since, time.perf_counter()))
        try:
            self._asked = self._run.send(seen)
        except StopIteration as end:
            self._ended_with = end.value
            return False
        return True

    def _begin_part(self) -> bool:
        """The look at all numbers that comes first if there are several segments; or the next segment."""
        segments, self._run = self.request.plan.segments, None
        if self._at is None and len(segments) > 1:
            # The first segment's residual must not change if the last one turns out to hold NaN, on any rank.
            self._run = self._all_finite()
        else:
            self._at = 0 if self._at is None else self._at
            start, stop = segments[self._at]
            self._run = self._segment(self._at, self._tensor[start:stop])
        self._asked = next(self._run)
        return self._post()

    def _end_part(self) -> bool:
        """Let it take effect, and begin the next one; in training, leave the outcome to the caller."""
        value, self._ended_with = self._ended_with, None
        if self._result is None:
            assert isinstance(value, Outcome)
            self._outcome = value
            self._finish(value.finite)
            self.handle.complete([])
            return False
        assert value is not None
        finite = value if isinstance(value, bool) else value.finite
        if isinstance(value, bool):
            self._at = 0
        else:
            assert self._at is not None
            start, stop = self.request.plan.segments[self._at]
            if finite:
                value.apply(self._tensor[start:stop], None, self._tensor[start:stop])
            self._at += 1
        del value  # its buffers go before those of the next are made
        if finite and self._at < len(self.request.plan.segments):
            return self._begin_part()
        if not finite:
            self._tensor.fill_(torch.nan)
        self._finish(finite)
        self.handle.complete([self._result])
        self.drop()
        return False

    def _post(self) -> bool:
        assert self._asked is not None
        since = time.perf_counter()
        self._posted = self._asked.operation.post(self._asked.sends, self._asked.receives), since
        return True

    def _finish(self, finite: bool) -> None:
        report, operations = self.handle.report, self._operations
        report.finite = finite
        report.bytes_sent = sum(operation.bytes_sent for operation in operations)
        report.bytes_received = sum(operation.bytes_received for operation in operations)
        report.bytes_between_nodes = operations[-1].bytes_sent
        report.messages = sum(operation.messages for operation in operations)
        for operation in operations:
            operation.finish()

    def fail(self, error: BaseException) -> bool:
        """This rank cannot go on; let the others know."""
        self.failure = error
        if self._replayed is not None:
            self._replayed.set()
        self.drop()
        try:
            for operation in self._operations:
                operation.give_up(error)
        finally:
            self.handle.fail(error)
        return False

    # The algorithm.

    def _segment(self, index: int, tensor: Tensor) -> Run:
        request, (start, stop) = self.request, self.request.plan.segments[index]
        *inside, operation = self._operations
        key, count = self._key, len(request.plan.segments)
        stage = Stage(
            operation,
            tensor,
            None if self._residual is None else self._residual[start:stop],
            request.plan.first,
            request.plan.second,
            self._owner_residuals[index],
            mix_key(key, index) if key is not None and count > 1 else key,
            request.weight,
            self.handle.report,
            self._buffers or Buffers(),
            self._through_host,
        )
        algorithm = _ALGORITHMS[request.plan.algorithm]
        return hierarchical(stage, inside[0], algorithm, request.plan.granule) if inside else algorithm(stage)

    def _all_finite(self) -> Generator[Exchange, Seen, bool]:
        """Whether no rank's tensor holds NaN, and no sum over ranks can overflow: each tells the others its largest."""
        bound = sum(
            float(torch.maximum(*(extreme.abs() for extreme in torch.aminmax(part))))
            for part in (self._tensor, self._residual)
            if part is not None
        )
        for operation in self._operations:
            size = operation.channel.size
            bounds = torch.full((size, 1), bound, dtype=torch.float64, device=self._tensor.device)
            yield from all_gather(operation, list(bounds.view(torch.uint8)))
            bound = float(bounds.sum())
        return bound <= torch.finfo(residual_dtype(self._tensor.dtype)).max  # False for NaN


def pass_on(request: Request, operation: Operation, tensor: Tensor) -> Handle:
    """torch's own all-reduce, issued here and now: in the order of the program's other collectives."""
    size, flat = operation.channel.size, tensor.detach().view(-1)
    report = Report(request.algorithm, request.plan.reason)
    report.bytes_sent = report.bytes_received = report.bytes_between_nodes = ring(tensor.nbytes, size)
    report.messages = 2 * (size - 1)
    handle = Handle(report, tensor.device)
    operation.describe(request.described, request.text, None)
    summed = dist.ReduceOp.SUM if request.op == dist.ReduceOp.AVG else request.op
    try:
        operation.start(on_failure=handle.fail)
        work = dist.all_reduce(flat, summed, group=operation.channel.group, async_op=True)
        assert work is not None
    except BaseException as error:
        operation.give_up(error)
        raise

    def finish(done: "torch.futures.Future[list[Tensor]]") -> None:
        try:
            done.value()  # raises what the all-reduce raised
        except Exception as error:
            caught = error  # explained in another thread, since it may take a while
            threading.Thread(target=lambda: handle.fail(operation.explain(caught)), daemon=True).start()
            return
        operation.finish()
        if request.weight != 1.0:
            flat.div_(size)
        handle.complete([tensor])

    work.get_future().add_done_callback(finish)
    return handle
