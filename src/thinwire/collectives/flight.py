"""A flight: one all-reduce under way. An algorithm tells the story (algorithms/leg.py), and a flight carries it out.

    depart          the caller encodes: the story runs to its first exchange     in training: in backward
    post, collect   the wire sends and receives, until every payload is checked
    land            the caller changes moments and residual, and writes the sum  in training: in `step()`, all or none
    abandon         nothing is changed

`all_reduce_compressed` lets the wire do all of it, one segment of the tensor after the other.
"""

import copy
import threading
import time
import traceback
from collections.abc import Generator, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.futures import Future

from ..kernels.joined import Flat
from ..kernels.layout import residual_dtype
from ..kernels.updates import Update
from .algorithms.gather import gather
from .algorithms.hierarchical import hierarchical
from .algorithms.leg import Exchange, Landing, Leg, Report, Span, Story, exchange_parts, land, until_known
from .algorithms.sharded import sharded, values
from .request import Request, ShardState
from .transport.errors import CollectiveError
from .transport.link import Seen, Wait
from .transport.operation import Operation

_ALGORITHMS = {"gather": gather, "sharded": sharded, "dense": sharded, "values": values}


class Handle:
    """A running all-reduce, with the methods of torch's `Work`. Only the first result or error counts."""

    def __init__(self, report: Report, device: torch.device | None = None) -> None:
        self.report = report
        self.error: BaseException | None = None
        self.ended: float | None = None  # of `time.perf_counter`
        self._done = threading.Event()
        self._ending = threading.Lock()  # taken once
        self._future: Future[list[Tensor]] | None = None
        if device is not None:
            self._future = Future(devices=[device] if device.type == "cuda" else None)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the result is in the tensor. Return True, or raise the error of the operation.

        On a GPU, the current stream waits for the result. After a `TimeoutError`, the operation continues.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not self._done.wait(seconds):  # can be interrupted by Ctrl-C, unlike a wait in torch
            raise TimeoutError(f"the all-reduce has not ended after {timeout}; it continues")
        if self.error is not None:
            raise self.error
        if self._future is not None:
            self._future.wait()
        return True

    def wait_quietly(self) -> None:
        self._done.wait()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def get_future(self) -> "Future[list[Tensor]]":
        assert self._future is not None
        return self._future

    def complete(self, result: list[Tensor]) -> None:
        """End the operation with a result. On a GPU, the result is queued on the current stream."""
        if not self._is_first():
            return
        self.ended = time.perf_counter()
        if self._future is not None:
            self._future.set_result(result)
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """End the operation with an error. Remove its frames, because the future would keep their tensors alive."""
        if not self._is_first():
            return
        self.ended = time.perf_counter()
        if error.__traceback__ is not None:
            error.add_note("In a thread of thinwire:\n" + "".join(traceback.format_tb(error.__traceback__)))
        self.error = error
        link: BaseException | None = error
        while link is not None:
            link.__traceback__ = None
            link = link.__cause__ or link.__context__
        if self._future is not None:
            self._future.set_exception(_copied(error))  # type: ignore[arg-type]
        self._done.set()

    def _is_first(self) -> bool:
        """Return whether nobody has ended this operation: after Ctrl-C, caller and wire may do so at once."""
        return self._ending.acquire(blocking=False)


def _copied(error: BaseException) -> BaseException:
    try:
        return copy.copy(error)
    except Exception:  # this error cannot be copied
        return RuntimeError(repr(error))


class Flight(Handle):
    """One execution of a request, and the handle of it: completed when all is exchanged, or all is done.

    leg   the memory that is used, in training that of the step before; None for memory of its own.
    """

    def __init__(
        self,
        request: Request,
        operations: list[Operation],
        tensor: Tensor,
        residual: Tensor | None,
        *,
        state: ShardState | None = None,
        key: int | None = None,
        leg: Leg | None = None,
        has_future: bool = False,
    ) -> None:
        plan, segments = request.plan, len(request.plan.segments)
        report = Report(request.algorithm, plan.reason, segments=segments, memory=plan.cost.memory)
        super().__init__(report, tensor.device if has_future else None)
        self.request, self.operations = request, operations
        self.tensor, self.residual, self._leg = tensor, residual, leg
        self._owner_residuals: Sequence[Tensor | None] = [None] * segments
        if state is not None and plan.algorithm == "sharded":
            self._owner_residuals = request.owner_residuals(state, tensor.dtype, tensor.device)
        self._key = operations[-1].number if key is None and request.draws else key
        for operation in operations:  # ranks of the last group must draw the same positions
            draws_alike = request.positions_drawn and operation is operations[-1]
            operation.describe(request.text, self._key if draws_alike else None)
        self.encoded, self.has_two_rounds = False, len(operations) == segments == 1
        self._story: Story = None  # type: ignore[assignment]
        self._asked: Exchange | None = None  # by the caller's part of the story
        self._posted: tuple[Operation, Wait, float] | None = None
        self._result: list[Tensor] = []  # the caller's tensor, if the wire does everything
        self._wire = operations[-1].channel.wire
        self.through_host = leg is not None and leg.through_host
        self.stream = None if self._wire is None or self.through_host else self._wire.stream(tensor.device)
        """Stream for the work that the wire queues. If payloads go through the host, it is the one that encodes."""
        self.ready: torch.cuda.Event | None = None  # after the work that makes the payload

    # Called by the caller.

    def depart(self) -> None:
        """Encode the payload in this thread. Then the tensor's memory may be reused."""
        self._story = self._told(0, self.tensor)
        with torch.no_grad():
            self._asked = next(self._story)
        self.encoded = True

    def submit(self) -> None:
        """Submit this flight to the wire. Without a wire, where ranks take turns, carry it out now."""
        self.mark_ready()
        if self._wire is not None:
            self._wire.submit(self)
        else:
            under_way = self.post()
            while under_way:
                under_way = self.collect()

    def mark_ready(self) -> None:
        """Let the wire wait for what the caller has queued so far, and free nothing that the caller's stream uses."""
        if self.stream is not None or self.through_host:
            current = torch.cuda.current_stream(self.tensor.device)
            self.ready = torch.cuda.Event(blocking=self.through_host)
            self.ready.record(current)
            self.stream = current if self.through_host else self.stream

    def do_all(self, result: Tensor) -> None:
        """Let the wire do everything. The result is written into `result`, of which this flight has a flat view."""
        self._result, self._story = [result], self._all_told()
        if self.stream is not None:
            for used in (self.tensor, self.residual, *self._owner_residuals):
                if used is not None:
                    used.record_stream(self.stream)
        try:
            self.submit()
        except BaseException as error:
            self.give_up(error)
            raise

    def land(self, out: Tensor, source: Flat | None = None, update: Update | None = None) -> None:
        """Change moments and residual by what was encoded, and write the weighted sum into `out`."""
        land(self._story, Landing(out, source, update))
        self.abandon()

    def abandon(self) -> None:
        """Forget the story; what it has not changed stays as it is."""
        self._story = self._asked = self._posted = None  # type: ignore[assignment]
        if self._leg is not None:
            self._leg.release()

    @property
    def failure(self) -> CollectiveError | None:
        """Return the error that has ended the connections, even if the wire has not reported it yet."""
        return next((error for operation in self.operations if (error := operation.failure) is not None), None)

    def join_streams(self) -> None:
        if self.stream is not None and not self.through_host:
            torch.cuda.current_stream(self.tensor.device).wait_stream(self.stream)

    # Called by the wire.

    @property
    def waits_for_all(self) -> bool:
        return any(operation.waits_for_all for operation in self.operations)

    def post(self) -> bool:
        try:
            with torch.no_grad(), torch.cuda.stream(self.stream):
                if self.ready is not None:
                    self.ready.synchronize() if self.through_host else self.ready.wait()
                for operation in self.operations:
                    operation.start()
                return self._post(self._asked or next(self._story))
        except BaseException as error:
            return self.give_up(error)

    def collect(self) -> bool:
        try:
            with torch.no_grad(), torch.cuda.stream(self.stream):
                yielded = self._resume()
                if yielded is None:  # only now is nothing of the last segment held
                    yielded = next(self._story)
                return self._post(yielded) if isinstance(yielded, Exchange) else self._end(yielded)
        except BaseException as error:
            return self.give_up(error)

    def _resume(self) -> Exchange | bool | None:
        """Wait for the posted exchange and go on with the story, to its next exchange or to its end."""
        assert self._posted is not None
        (operation, wait, since), self._asked, self._posted = self._posted, None, None
        seen = operation.collect(wait)
        self.report.spans.append(Span("exchange", since, time.perf_counter()))
        yielded: Exchange | bool | None = self._story.send(seen)
        return yielded

    def _post(self, asked: Exchange) -> bool:
        since = time.perf_counter()
        self._posted = asked.operation, asked.operation.post(asked.sends, asked.receives), since
        return True

    def _end(self, finite: bool) -> bool:
        report = self.report
        report.finite = finite
        for operation in self.operations:
            report.bytes_sent += operation.bytes_sent
            report.bytes_received += operation.bytes_received
            report.messages += operation.messages
            report.bytes_between_nodes = operation.bytes_sent  # of the last group
        self.complete(self._result)
        if self._result:
            self.abandon()
        return False

    def give_up(self, error: BaseException) -> bool:
        """End this flight with an error, and notify the other ranks. Return False."""
        self.abandon()
        try:
            for operation in self.operations:
                operation.give_up(error)
        finally:
            self.fail(error)
        return False

    # The stories.

    def _told(self, index: int, tensor: Tensor) -> Story:
        """Return the story of one segment; nothing of it has run yet."""
        request, (start, stop) = self.request, self.request.plan.segments[index]
        leg = self._leg or Leg(request.plan.first, request.plan.second, request.weight)
        leg.release()
        leg.operation, leg.tensor, leg.key, leg.report = self.operations[-1], tensor, self._key, self.report
        leg.residual = None if self.residual is None else self.residual[start:stop]
        leg.owner_residual = self._owner_residuals[index]
        algorithm = _ALGORITHMS[request.plan.algorithm]
        if len(self.operations) == 1:
            return algorithm(leg)
        return hierarchical(leg, self.operations[0], algorithm, request.plan.granule)

    def _all_told(self) -> Story:
        """Tell and land the stories of all segments, each in memory of its own. Yield None after each of them."""
        segments = self.request.plan.segments
        # The residual of the first segment must not change if the last one holds NaN on any rank.
        finite = len(segments) == 1 or (yield from self._all_finite())
        for index, (start, stop) in enumerate(segments):
            if finite:
                segment = self.tensor[start:stop]
                story = self._told(index, segment)
                finite = yield from until_known(story)
                if finite:
                    land(story, Landing(segment, source=segment))
                yield None
        if not finite:
            self.tensor.fill_(torch.nan)
        yield finite

    def _all_finite(self) -> Generator[Exchange, Seen, bool]:
        """Return whether all tensors are finite and no sum can overflow. Ranks exchange a bound on magnitudes."""
        parts = [self.tensor] if self.residual is None else [self.tensor, self.residual]
        bound = sum(float(torch.maximum(*(extreme.abs() for extreme in torch.aminmax(part)))) for part in parts)
        for operation in self.operations:
            size = operation.channel.size
            bounds = torch.full((size, 1), bound, dtype=torch.float64, device=self.tensor.device)
            yield from exchange_parts(operation, list(bounds.view(torch.uint8)))
            bound = float(bounds.sum())
        return bound <= torch.finfo(residual_dtype(self.tensor.dtype)).max  # False for NaN
