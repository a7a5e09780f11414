"""One step of a synchronizer: its buckets are issued in the order they come, and settled together.

A bucket becomes operations in threads of the collectives, so its exchange overlaps with whatever the caller does next,
such as the rest of the backward pass. A bucket's future is done when all operations of the step are.
"""

import time
import zlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .buckets import Bucket, Packed, Run
from .collectives import Handle, ShardState
from .collectives.all_reduce import all_reduce_compressed, start
from .collectives.cost import ring
from .collectives.job import Call
from .collectives.run import Part
from .collectives.step import Received, Step
from .compressors import Compressor, NoCompression
from .compressors.spec import mix_key
from .futures import fail, future_on, pass_result, when_all
from .kernels.layout import RandomKLayout
from .kernels.updates import Update
from .policy import DENSE

if TYPE_CHECKING:
    from .sync import Synchronizer

_NO_LIMIT = 1 << 62
"""For one operation: all are held until the step is settled, so cutting one into segments would save nothing."""


PACKED_BYTES = 1 << 20
"""Packed parts of buckets wait for each other until they are so many: each operation costs, however small."""


def _nothing() -> None:
    return None


@dataclass
class PackedParts:
    """The parameters of one bucket that are sent by one compressor, together with those of other buckets."""

    tensor: Tensor
    compressor: Compressor
    parts: list[Packed]
    taken_out: Tensor
    """The elements, packed: a copy, since zeros take their place in the bucket; then their average."""
    future: "Future[Tensor]"

    def put_back(self) -> None:
        averages = self.taken_out.split([part.numel for part in self.parts])
        torch._foreach_copy_([self.tensor[part.start : part.stop] for part in self.parts], list(averages))


class Transform(Protocol):
    """What an optimizer makes of gradients before they are sent."""

    whole: bool
    """Whether it must have seen the whole gradient before any of it is sent."""

    def begin(self) -> bool:
        """A step begins. Whether gradients are to be sent as they are, without a residual."""

    def look(self, buckets: Sequence[Bucket]) -> None:
        """The whole gradient, if `whole`."""

    def family(self, name: str) -> Hashable:
        """Parameters of different families are never in the same run."""

    def sample(self, run: Run, tensor: Tensor) -> None:
        """The gradient of a run, as it is."""

    def gradient(self, tensor: Tensor) -> None:
        """Prepare what is sent as a gradient, in place."""

    def prepare(self, run: Run, tensor: Tensor) -> None:
        """A run is about to be issued: make what `before` needs, where the caller's stream has it in order."""

    def before(self, run: Run, tensor: Tensor) -> Update:
        """How gradients are turned into what is to be sent, and what changes if the step counts; no effect so far."""


@dataclass
class Exchange:
    """A step from its first bucket to its last."""

    sync: "Synchronizer"
    number: int
    """How many steps counted before this one."""
    passes_on: bool
    """Nothing is compressed: torch's own all-reduce does it."""
    as_gradients: bool
    """Whether a transform leaves gradients as they are in this step."""
    collects: bool
    """Whether all buckets are waited for before the first is sent."""
    flushes: bool = False
    """Whether all that is owed is sent, dense."""
    step: Step = field(default_factory=Step)
    handles: list[Handle] = field(default_factory=list)
    layout: list[tuple[str, ...]] = field(default_factory=list)
    entries: dict[str, int] = field(default_factory=dict)
    bytes_dense: int = 0
    whole_at: float = 0.0
    """When the last bucket had come, by `time.perf_counter`: what happens from then on is waited for."""
    shown: list[tuple[str, ...]] = field(default_factory=list)
    """The buckets as they came, if they were put together otherwise."""
    marks: list[tuple[tuple[str, ...], float, int, int]] = field(default_factory=list)
    """Of each bucket: its names, when it was issued, and its operations, from the first up to the last of `handles`."""
    _passed_on: list[Tensor] = field(default_factory=list)
    """Of an optimizer's step, which nobody has looked at so far."""
    _waiting: list[tuple[Bucket, "Future[Tensor]"]] = field(default_factory=list)
    is_packing: bool = False
    """Whether packed parts are being issued."""
    _packed: list[PackedParts] = field(default_factory=list)
    """Not issued yet."""

    def reduce(self, bucket: Bucket, *, last: bool) -> "Future[Tensor]":
        """Average one bucket, in place; the future is that of its tensor."""
        if last:
            self.whole_at = time.perf_counter()
        if self.collects:
            future = future_on(bucket.tensor.device)
            self._waiting.append((bucket, future))
            if last:
                self._issue_collected()
        else:
            future = self._issue(bucket, last)
        if last:
            self._close()
        return future

    def look(self) -> None:
        """Whether what torch's own all-reduce has summed is finite, once it is there: if not, an optimizer skips the
        step.

        Every rank has the same sums, so all find the same. It is the caller's thread that looks: in one of torch's, a
        sum would start as many threads as there are cores.
        """
        if self._passed_on and all(handle.get_future().done() for handle in self.handles):
            passed_on, self._passed_on = self._passed_on, []
            for handle, tensor in zip(self.handles, passed_on, strict=True):
                try:
                    handle.wait()
                    self.step.deposit(Received(_is_finite(tensor), _ignore, _ignore))
                except Exception as error:
                    self.step.fail(error)

    def abandon(self, reason: str) -> None:
        """The step will not be finished, as after an error in the middle of a backward pass."""
        if self.step.abandon(reason):
            for future in [*(parts.future for parts in self._packed), *(future for _, future in self._waiting)]:
                fail(future, RuntimeError(reason))

    def _close(self) -> None:
        self.shown = self.shown or self.layout
        self.step.close()

    def _issue_collected(self) -> None:
        """All buckets have come: they go as they are, or regrouped as `sync.wanted_layout` says."""
        buckets = [bucket for bucket, _ in self._waiting]
        if self.sync.transform is not None:
            self.sync.transform.look(buckets)
        parts = {name: part for bucket in buckets for name, part in bucket.parts().items()}
        layout, self.shown = self.sync.wanted_layout, [bucket.names for bucket in buckets]
        if layout == self.shown or {name for names in layout for name in names} != parts.keys():
            for bucket, future in self._waiting:
                pass_result(self._issue(bucket, bucket is buckets[-1]), future, bucket.tensor)
            return
        regrouped = [
            Bucket(torch.cat([parts[name] for name in names]), names, tuple(parts[name].numel() for name in names))
            for names in layout
        ]

        def put_back() -> None:
            for bucket in regrouped:
                for name, part in bucket.parts().items():
                    parts[name].copy_(part)

        issued = [self._issue(bucket, bucket is regrouped[-1]) for bucket in regrouped]
        whole = when_all(issued, regrouped[0].tensor, put_back)
        for bucket, future in self._waiting:
            pass_result(whole, future, bucket.tensor)

    def _issue(self, bucket: Bucket, last: bool) -> "Future[Tensor]":
        issued, first = time.perf_counter(), len(self.handles)
        future = self._issue_parts(bucket, last)
        self.marks.append((bucket.names, issued, first, len(self.handles)))
        return future

    def _issue_parts(self, bucket: Bucket, last: bool) -> "Future[Tensor]":
        tensor, size = bucket.tensor, self.sync.world_size
        self.layout.append(bucket.names)
        self.entries.update(zip(bucket.names, bucket.sizes, strict=True))
        self.bytes_dense += ring(tensor.nbytes, size)
        if self.passes_on:
            if self.sync.transform is not None:
                self.sync.transform.gradient(tensor)
                self.step.join()
                self._passed_on.append(tensor)
            tensor.mul_(1.0 / size)  # before the sum, and not divided, as DDP itself does: so bits are the same
            handle = all_reduce_compressed(
                tensor, DENSE, group=self.sync.group, async_op=True, timeout=self.sync.timeout
            )
            self.handles.append(handle)
            return handle.get_future().then(lambda done: done.value()[0])

        plan = self.sync.plan(bucket, self)
        mine = []
        for compressor in dict.fromkeys(part.compressor for part in plan.packed):
            parts = [part for part in plan.packed if part.compressor == compressor]
            taken_out = torch.cat([tensor[part.start : part.stop] for part in parts])
            mine.append(PackedParts(tensor, compressor, parts, taken_out, future_on(tensor.device)))
        self._packed += mine
        if last or sum(parts.taken_out.nbytes for parts in self._packed) >= PACKED_BYTES:
            self._issue_packed()  # first: what is compressed little can be on its way at once
        futures: list[Future[Any]] = [self._start_run(tensor[run.start : run.stop], run) for run in plan.runs]

        def put_back() -> None:
            for parts in mine:
                parts.put_back()

        return when_all([*futures, *(parts.future for parts in mine)], tensor, put_back if mine else _nothing)

    def _issue_packed(self) -> None:
        """Issue those that wait, in one operation for each kind of tensor and compressor."""
        kinds: dict[tuple[torch.dtype, torch.device, Compressor], list[PackedParts]] = {}
        for parts in self._packed:
            kinds.setdefault((parts.tensor.dtype, parts.tensor.device, parts.compressor), []).append(parts)
        self.is_packing = True
        for (_, _, compressor), group in kinds.items():
            packed = torch.cat([parts.taken_out for parts in group])
            shares = packed.split([parts.taken_out.numel() for parts in group])
            for parts, share in zip(group, shares, strict=True):
                parts.taken_out = share
            members = [part for parts in group for part in parts.parts]
            names, sizes = tuple(part.name for part in members), tuple(part.numel for part in members)
            run = Run(0, packed.numel(), compressor, None, names, sizes)
            residual, state = (None, None) if isinstance(compressor, NoCompression) else self.sync.keep(run, packed)
            salt = zlib.crc32(members[0].name.encode())
            done = self._start(
                packed, compressor, salt, residual, state, partial(self._prepare, run, packed), packs=True
            )
            for parts in group:
                pass_result(done, parts.future, parts.tensor)
        self._packed, self.is_packing = [], False

    def _prepare(self, run: Run, packed: Tensor) -> None:
        transform = self.sync.transform
        if transform is not None:
            transform.sample(run, packed)
            transform.gradient(packed)

    def _start_run(self, tensor: Tensor, run: Run) -> "Future[list[Tensor]]":
        transform, gaps = self.sync.transform, [tensor[begin:end] for begin, end in run.gaps()]
        residual, state = (None, None) if self.as_gradients else self.sync.keep(run, tensor)
        if transform is not None and not self.as_gradients:
            transform.prepare(run, tensor)

        def before() -> Update | None:
            if gaps:
                torch._foreach_zero_(gaps)
            if transform is None:
                return None
            transform.sample(run, tensor)
            if not self.as_gradients:
                return transform.before(run, tensor)
            transform.gradient(tensor)
            return None

        salt = zlib.crc32(str(run.names[0]).encode())
        return self._start(tensor, run.compressor, salt, residual, state, before)

    def _start(
        self,
        tensor: Tensor,
        compressor: Compressor,
        salt: int,
        residual: Tensor | None = None,
        state: ShardState | None = None,
        before: Callable[[], Update | None] = _nothing,
        *,
        packs: bool = False,
    ) -> "Future[list[Tensor]]":
        sync, dense = self.sync, self.flushes or isinstance(compressor, NoCompression)
        key = mix_key(self.number, salt)
        if not isinstance(compressor.layout(tensor.numel(), tensor.dtype), RandomKLayout):
            key = mix_key(key, sync.rank)  # each rank rounds by draws of its own
        handle = start(
            lambda: Call(
                tensor, compressor, residual, dist.ReduceOp.AVG, self._algorithm(compressor, tensor, packs), key,
                None if dense or packs else sync.second, None if dense else state, _NO_LIMIT,
            ),
            sync.group, tensor.device, sync.timeout, Part(self.step, before),
        )  # fmt: skip
        self.handles.append(handle)
        if sync.max_bytes is not None:
            self._check_held(sync.max_bytes)
        return handle.get_future()

    def _algorithm(self, compressor: Compressor, tensor: Tensor, packs: bool) -> str:
        if not isinstance(compressor, NoCompression):
            if self.flushes or self.sync.algorithm == "dense":
                return "dense"
            return "auto" if packs else self.sync.algorithm
        # Between two ranks as many bytes go either way, and these in one message; but 16-bit sums would be rounded.
        return "gather" if self.sync.world_size == 2 and tensor.dtype.itemsize >= 4 else "dense"

    def _check_held(self, max_bytes: int) -> None:
        held = sum(handle.report.memory for handle in self.handles)
        if held > max_bytes:
            raise ValueError(
                f"max_bytes {max_bytes:,}, but the payloads of one step, which are held until it ends, need "
                f"{held:,} and more: raise max_bytes, or compress more"
            )


def _ignore(_: object) -> None:
    return None


def _is_finite(tensor: Tensor) -> bool:
    """By its sum, which costs one look at the tensor; a sum that overflows says nothing, so then entry by entry."""
    total = tensor.sum(dtype=torch.float32 if tensor.dtype.itemsize < 4 else None)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


def refuse(sync: "Synchronizer", error: Exception, device: torch.device) -> None:
    """This rank cannot begin a step: the others, who wait for it, get to know why."""

    def give_reason() -> Call:
        raise error

    with suppress(type(error)):
        start(give_reason, sync.group, device, sync.timeout)
