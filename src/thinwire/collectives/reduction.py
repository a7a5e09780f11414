"""The execution of an all-reduce: encode, exchange, apply. The exchange runs in a thread called the wire.

all_reduce_compressed    the wire does everything, one segment after the other
a training step          the caller encodes in backward, and applies all slices or none in `optimizer.step()`
"""

import threading
import time
from collections import deque
from collections.abc import Generator, Hashable

import torch
from torch import Tensor

from ..kernels.joined import Flat
from ..kernels.layout import residual_dtype
from ..kernels.recording import Recording
from ..kernels.updates import Update
from .algorithms.gather import gather
from .algorithms.hierarchical import hierarchical
from .algorithms.sharded import sharded, values
from .algorithms.stage import Buffers, Exchange, Exchanges, Outcome, Stage, exchange_parts
from .handle import Handle, Report, Span
from .request import Request
from .state import ShardState
from .transport.errors import CollectiveError
from .transport.link import Seen, Wait
from .transport.operation import Operation

_ALGORITHMS = {"gather": gather, "sharded": sharded, "dense": sharded, "values": values}


class Reduction:
    """One execution of a request; `handle` is completed when all is exchanged. In training, `apply` does the rest."""

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
        plan = request.plan
        report = Report(request.algorithm, plan.reason, segments=len(plan.segments), memory=plan.cost.memory)
        self.handle = Handle(report, tensor.device if has_future else None)
        self.encoded = False
        self._tensor, self._residual, self._buffers = tensor, residual, buffers
        self._owner_residuals = request.owner_residuals(state, tensor.dtype, tensor.device)
        self._key = request.key_of(key, operations[-1].number)
        for operation in operations:  # ranks of the last group must draw the same positions
            draws_alike = request.positions_drawn and operation is operations[-1]
            operation.describe(request.described, request.text, self._key if draws_alike else None)
        self._parts: deque[Generator[Exchange, Seen, bool]] = deque()  # what the wire has to do, if it does everything
        self._exchanges: Generator[Exchange, Seen, Outcome | bool] | None = None
        self._asked: Exchange | None = None
        self._posted: tuple[Wait, float] | None = None
        self._outcome: Outcome | None = None
        self._result: list[Tensor] = []  # the caller's tensor, if the wire does everything
        self._wire = operations[-1].channel.wire
        self._through_host = buffers is not None and tensor.is_cuda and request.goes_through_host
        self._stream = None if self._wire is None or self._through_host else self._wire.stream(tensor.device)
        """Stream for the work that the wire queues. If payloads go through the host, it is the one that encodes."""
        self._begun: torch.cuda.Event | None = None  # after the work that the caller has queued
        self._ready: torch.cuda.Event | None = None  # after the work that makes the payload
        self._to_replay: tuple[Recording, Hashable, torch.cuda.Stream] | None = None
        self._replayed: threading.Event | None = None

    # Called by the caller.

    def encode(self, *, is_replayed: bool = False) -> None:
        """Encode the payload in this thread, unless a recording has. Then the tensor's memory may be reused."""
        assert self._buffers is not None
        self._buffers.rewind(is_replayed=is_replayed)
        self._exchanges = self._segment(0, self._tensor)
        with torch.no_grad():
            self._asked = next(self._exchanges)
        self._buffers.is_replayed = False  # a recording holds only this first encoding
        self.encoded = True

    def encode_on_wire(self, recording: Recording, key: Hashable, side: torch.cuda.Stream) -> None:
        """Let the wire start the recording that makes the payload, on the stream `side`."""
        self._begun = torch.cuda.Event()
        self._begun.record(torch.cuda.current_stream(self._tensor.device))
        self._to_replay, self._replayed = (recording, key, side), threading.Event()
        self._stream = side if self._through_host else self._stream
        self.encoded = True

    def wait_until_replayed(self) -> None:
        if self._replayed is not None:
            self._replayed.wait()

    def submit(self) -> None:
        """Submit this reduction to the wire. Without a wire, where ranks take turns, run it now."""
        if self._to_replay is None and (self._stream is not None or self._through_host):
            # The wire waits for what the caller has queued so far, and frees nothing that the caller's stream uses.
            current = torch.cuda.current_stream(self._tensor.device)
            self._ready = torch.cuda.Event(blocking=self._through_host)
            self._ready.record(current)
            self._stream = current if self._through_host else self._stream
        if self._wire is not None:
            self._wire.submit(self)
        else:
            under_way = self.post()
            while under_way:
                under_way = self.collect()

    def run_all(self, result: Tensor) -> None:
        """Let the wire do everything. The result is written into `result`, of which this reduction has a flat view."""
        self._result, count = [result], len(self.request.plan.segments)
        # The residual of the first segment must not change if the last segment holds NaN on any rank.
        self._parts.extend([self._all_finite()] if count > 1 else [])
        self._parts.extend(self._reduce_segment(index) for index in range(count))
        if self._stream is not None:
            for used in (self._tensor, self._residual, *self._owner_residuals):
                if used is not None:
                    used.record_stream(self._stream)
        try:
            self.submit()
        except BaseException as error:
            self.fail(error)
            raise

    def apply(self, gradient: Flat | None, update: Update | None, out: Tensor) -> None:
        assert self._outcome is not None
        self._outcome.apply(gradient, update, out)
        self.drop()

    @property
    def failure(self) -> CollectiveError | None:
        """Return the error that has ended the connections, even if the wire has not reported it yet."""
        return next((error for operation in self._operations if (error := operation.failure) is not None), None)

    def join_streams(self) -> None:
        if self._stream is not None and not self._through_host:
            torch.cuda.current_stream(self._tensor.device).wait_stream(self._stream)

    def drop(self) -> None:
        self._outcome = self._exchanges = self._asked = self._posted = None
        self._parts.clear()

    # Called by the wire.

    @property
    def waits_for_all(self) -> bool:
        return any(operation.waits_for_all for operation in self._operations)

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
                if not self.encoded:
                    self._begin_part()
                return self._post()
        except BaseException as error:
            return self.fail(error)

    def _replay(self, recording: Recording, key: Hashable, side: torch.cuda.Stream) -> None:
        assert self._begun is not None
        assert self._replayed is not None
        try:
            with torch.cuda.stream(side):
                self._begun.wait()
                if not recording.replay(key):
                    raise RuntimeError("the recording has another key than when it was prepared: a bug in thinwire")
                self._ready = torch.cuda.Event(blocking=self._through_host)
                self._ready.record()
        finally:
            self._replayed.set()
        self.encode(is_replayed=True)

    def collect(self) -> bool:
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                return self._post() if self._resume() or self._begin_part() else self._end()
        except BaseException as error:
            return self.fail(error)

    def _resume(self) -> bool:
        """Wait for the posted exchange and continue after it. Return False if it was the last one of its part."""
        assert self._asked is not None
        assert self._posted is not None
        assert self._exchanges is not None
        asked, (wait, since), self._asked, self._posted = self._asked, self._posted, None, None
        seen = asked.operation.collect(wait)
        self.handle.report.spans.append(Span("exchange", since, time.perf_counter()))
        try:
            self._asked = self._exchanges.send(seen)
        except StopIteration as end:
            finite: Outcome | bool = end.value
            if isinstance(finite, Outcome):  # in training, where the caller applies it
                self._outcome, finite = finite, finite.finite
            self.handle.report.finite = finite
            return False
        return True

    def _begin_part(self) -> bool:
        """Begin the next part, whose buffers take the place of those before. Return False if none is left to do."""
        if not self.handle.report.finite or not self._parts:
            return False
        self._exchanges = part = self._parts.popleft()
        self._asked = next(part)
        return True

    def _post(self) -> bool:
        assert self._asked is not None
        since = time.perf_counter()
        self._posted = self._asked.operation.post(self._asked.sends, self._asked.receives), since
        return True

    def _end(self) -> bool:
        report, operations = self.handle.report, self._operations
        if self._result and not report.finite:
            self._tensor.fill_(torch.nan)
        report.bytes_sent = sum(operation.bytes_sent for operation in operations)
        report.bytes_received = sum(operation.bytes_received for operation in operations)
        report.bytes_between_nodes = operations[-1].bytes_sent
        report.messages = sum(operation.messages for operation in operations)
        self.handle.complete(self._result)
        if self._result:
            self.drop()
        return False

    def fail(self, error: BaseException) -> bool:
        """End this reduction with an error, and notify the other ranks. Return False."""
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

    def _reduce_segment(self, index: int) -> Generator[Exchange, Seen, bool]:
        """Reduce a segment of the caller's tensor, unless a rank is not finite. Return whether all are."""
        start, stop = self.request.plan.segments[index]
        tensor = self._tensor[start:stop]
        outcome = yield from self._segment(index, tensor)
        if outcome.finite:
            outcome.apply(tensor, None, tensor)
        return outcome.finite

    def _segment(self, index: int, tensor: Tensor) -> Exchanges:
        request, (start, stop) = self.request, self.request.plan.segments[index]
        *inside, operation = self._operations
        stage = Stage(
            operation=operation,
            tensor=tensor,
            residual=None if self._residual is None else self._residual[start:stop],
            first=request.plan.first,
            second=request.plan.second,
            owner_residual=self._owner_residuals[index],
            key=self._key,
            weight=request.weight,
            report=self.handle.report,
            buffers=self._buffers or Buffers(),
            through_host=self._through_host,
        )
        algorithm = _ALGORITHMS[request.plan.algorithm]
        if not inside:
            return algorithm(stage)
        return hierarchical(stage, inside=inside[0], algorithm=algorithm, granule=request.plan.granule)

    def _all_finite(self) -> Generator[Exchange, Seen, bool]:
        """Return whether all tensors are finite and no sum can overflow. Ranks exchange a bound on their magnitudes."""
        parts = [self._tensor] if self._residual is None else [self._tensor, self._residual]
        bound = sum(float(torch.maximum(*(extreme.abs() for extreme in torch.aminmax(part)))) for part in parts)
        for operation in self._operations:
            size = operation.channel.size
            bounds = torch.full((size, 1), bound, dtype=torch.float64, device=self._tensor.device)
            yield from exchange_parts(operation, list(bounds.view(torch.uint8)))
            bound = float(bounds.sum())
        return bound <= torch.finfo(residual_dtype(self._tensor.dtype)).max  # False for NaN
