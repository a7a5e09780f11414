"""One step of training, from its first bucket to its last: encoded, exchanged by the wire, and applied or dropped.

    backward (per bucket)                              optimizer.step(), or the last bucket of `attach`
    hook -> encode -> payload -> wire: one thread -> wait: was every rank finite? -> apply -> weights, or gradients

Encoding only reads: gradient, residual and moments stay as they are until every bucket of the step is exchanged and
known to be finite on every rank. A step that is not is simply not applied.
"""

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from .buckets import Bucket, Packed, Run
from .collectives import ShardState
from .collectives.all_reduce import all_reduce_compressed, refusing
from .collectives.cost import ring
from .collectives.handle import Handle, Span, copied
from .collectives.operation import Operation
from .collectives.plan import ENVIRONMENT_VARIABLE
from .collectives.reduction import Reduction
from .collectives.request import Request
from .collectives.stage import Buffers
from .compressors import Compressor, NoCompression
from .compressors.spec import mix_key
from .kernels.layout import RandomKLayout, residual_dtype
from .kernels.reference.randomk import positions_and_widths
from .kernels.updates import Update
from .policy import DENSE
from .residuals import NamedVectors

if TYPE_CHECKING:
    from .sync import Synchronizer

PACKED_BYTES = 1 << 20
"""Packed parts of buckets wait for each other until they are so many: each operation costs, however small."""


class Mode(Enum):
    """How the gradients of a step are sent."""

    TORCH = "by torch's own all-reduce, since nothing is compressed"
    GRADIENTS = "compressed"
    WARMUP = "compressed, of an optimizer that takes them as they are: nothing is kept for later"
    UPDATES = "as the updates that an optimizer makes of them"


class Rule(Protocol):
    """How an optimizer makes updates of gradients at one step: the numbers of one parameter group."""

    def update(self, run: Run, moments: Sequence[Tensor], factor: float) -> Update:
        """Return the update of a run, whose gradient is to be multiplied by `factor` first."""


@dataclass(frozen=True)
class Updates:
    """What an optimizer sends at one step. Its synchronizer gets this before the first bucket, and asks nothing more.

    warms_up   gradients are sent as they are, without a residual.
    rules      one for each parameter group.
    moments    the vectors that an update is made of, besides the gradient.
    scale      what GradScaler has multiplied the loss by.
    max_norm   of this rank's gradient; it is clipped to it.
    sampled    names of parameters of whose gradient samples are wanted.
    """

    warms_up: bool
    rules: Sequence[Rule]
    moments: Sequence[NamedVectors]
    scale: float = 1.0
    max_norm: float | None = None
    sampled: frozenset[str] = frozenset()


class Average(NamedTuple):
    """The result of a step for some parameters. The memory is used again for the next one."""

    run: Run
    flat: Tensor
    """Averages of what all ranks sent, one parameter behind the other as in `run`."""
    is_update: bool

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        for name, part in zip(self.run.names, self.flat.split(list(self.run.sizes)), strict=True):
            if name is not None:
                yield name, part


@dataclass(frozen=True)
class Slot:
    """What a run is sent by, prepared once and used at every step."""

    request: Request
    buffers: Buffers


@dataclass
class Sent:
    """A run under way."""

    run: Run
    gradient: Tensor
    """A slice of its bucket; of packed parameters, a copy of theirs."""
    reduction: Reduction
    residual: Tensor | None
    update: Update | None = None
    places: Sequence[tuple[Tensor, Packed]] = ()
    """Where packed parameters are: in which bucket, and at which elements."""


@dataclass
class Step:
    """A step under way."""

    sync: "Synchronizer"
    number: int
    """How many steps counted before this one."""
    mode: Mode
    updates: Updates | None
    collects: bool
    """Whether all buckets are waited for before the first is sent."""
    flushes: bool
    """Whether all that is owed is sent, dense."""
    rank: int
    world_size: int
    closed: bool = False
    """Whether the last bucket has come."""
    finite: bool | None = None
    """Whether every rank's gradient was finite; None until it is known, or if nobody looks."""
    handles: list[Handle] = field(default_factory=list)
    layout: list[tuple[str, ...]] = field(default_factory=list)
    """The buckets as they came."""
    entries: dict[str, int] = field(default_factory=dict)
    bytes_dense: int = 0
    whole_at: float = 0.0
    """When the last bucket had come, by `time.perf_counter`."""
    waited: float = 0.0
    """Seconds in which the caller waited for the wire."""
    marks: list[tuple[tuple[str, ...], float, int, int]] = field(default_factory=list)
    """Of each bucket: its names, when it was issued, and its operations, from the first up to the last of `handles`."""
    labels: list[str] = field(default_factory=list)
    """What each of `handles` carries."""
    slots: list[Slot] = field(default_factory=list)
    """Those that this step has used."""
    samples: dict[str, Tensor] = field(default_factory=dict)
    """Of this rank's gradient, by parameter, if an optimizer wants them."""
    _sent: list[Sent] = field(default_factory=list)
    _buckets: list[Bucket] = field(default_factory=list)
    _regrouped: list[Bucket] = field(default_factory=list)
    _summed: list[tuple[Bucket, Handle]] = field(default_factory=list)
    """What torch's own all-reduce sums."""
    _packed: list[tuple[Bucket, Sequence[Packed], Compressor, Tensor]] = field(default_factory=list)
    """Small parameters that wait to be sent together: where they are, by what they are sent, and a copy."""
    _clip: float | Tensor = 1.0
    """What gradients are multiplied by; on a GPU it stays there, so that nobody waits for it."""

    @property
    def passes_on(self) -> bool:
        return self.mode is Mode.TORCH

    @property
    def warms_up(self) -> bool:
        """Whether an optimizer takes gradients as they are, in this step."""
        return self.updates is not None and self.updates.warms_up

    # Backward: encode, and hand over to the wire.

    def add(self, bucket: Bucket, *, last: bool) -> None:
        """Send one bucket."""
        if last:
            self.whole_at = time.perf_counter()
        self._buckets.append(bucket)
        self.layout.append(bucket.names)
        self.entries.update(zip(bucket.names, bucket.sizes, strict=True))
        self.bytes_dense += ring(bucket.tensor.nbytes, self.world_size)
        if not self.collects:
            self._send(bucket, last)
        elif last:
            buckets = self._collected()
            for one in buckets:
                self._send(one, one is buckets[-1])
        self.closed = last

    def _collected(self) -> list[Bucket]:
        """All buckets have come: they go as they are, or regrouped as `sync.wanted_layout` says."""
        parts = {name: part for bucket in self._buckets for name, part in bucket.parts().items()}
        if self.updates is not None and self.updates.max_norm is not None:
            self._clip = _clip_to(self.updates, [part for _, part in sorted(parts.items())])
        layout = self.sync.wanted_layout
        regroup = layout != self.layout and {name for names in layout for name in names} == parts.keys()
        if regroup:
            self._regrouped = [
                Bucket(torch.cat([parts[name] for name in names]), names, tuple(parts[name].numel() for name in names))
                for names in layout
            ]
        return self._regrouped if regroup else self._buckets

    def _send(self, bucket: Bucket, last: bool) -> None:
        issued, first = time.perf_counter(), len(self.handles)
        if self.mode is Mode.TORCH:
            self._pass_on(bucket)
        else:
            with self._stream(bucket.tensor.device):
                self._encode(bucket, last)
        self.marks.append((bucket.names, issued, first, len(self.handles)))

    def _stream(self, device: torch.device) -> AbstractContextManager[object]:
        """Beside the stream of the caller, so that backward goes on meanwhile."""
        side = self.sync.side_stream(device)
        if side is None:
            return nullcontext()
        side.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(side)

    def _pass_on(self, bucket: Bucket) -> None:
        tensor, size = bucket.tensor, self.world_size
        if self.updates is not None:  # whose gradients stay as they are
            tensor = self._as_gradient(tensor.clone())
        tensor.mul_(1.0 / size)  # before the sum, and not divided, as DDP itself does: so bits are the same
        handle = all_reduce_compressed(tensor, DENSE, group=self.sync.group, async_op=True, timeout=self.sync.timeout)
        self._summed.append((Bucket(tensor, bucket.names, bucket.sizes), handle))
        self.handles.append(handle)
        self.labels.append("torch's all-reduce")

    @torch.no_grad()
    def _encode(self, bucket: Bucket, last: bool) -> None:
        tensor, plan = bucket.tensor, self.sync.plan(bucket, self)
        for compressor in dict.fromkeys(part.compressor for part in plan.packed):
            parts = [part for part in plan.packed if part.compressor == compressor]
            copies = torch.cat([tensor[part.start : part.stop] for part in parts])
            self._packed.append((bucket, parts, compressor, copies))
        if last or sum(copies.nbytes for *_, copies in self._packed) >= PACKED_BYTES:
            self._send_packed()  # first: what is compressed little can be on its way at once
        for run in plan.runs:
            self._send_run(run, tensor[run.start : run.stop])

    def _send_run(self, run: Run, gradient: Tensor) -> None:
        self._sample(run, gradient)
        update, source = None, gradient
        written: list[Span] = []
        if self.mode is Mode.UPDATES:
            update = self._update(run, gradient)
            source = self.sync.scratch(gradient, residual_dtype(gradient.dtype))
            started = time.perf_counter()
            update.write(self._clipped(gradient), source)
            written.append(Span("update", started, time.perf_counter()))
        elif self.mode is Mode.WARMUP:
            source = self._as_gradient(self.sync.scratch(gradient, gradient.dtype).copy_(gradient))
        if run.gaps():  # copies of these are sent with the other small ones
            torch._foreach_zero_([source[begin:end] for begin, end in run.gaps()])
        residual, state = (None, None) if self.mode is Mode.WARMUP else self.sync.keep(run, source)
        label = f"bucket {len(self.marks) + 1}, {run.stop - run.start:,} elements"
        reduction = self._start(run, source, residual, state, label)
        reduction.handle.report.spans += written
        self._sent.append(Sent(run, gradient, reduction, residual, update))

    def _send_packed(self) -> None:
        """Send those that wait, in one operation for each kind of tensor and compressor."""
        kinds: dict[tuple[torch.dtype, torch.device, Compressor], list[tuple[Bucket, Sequence[Packed], Tensor]]] = {}
        for bucket, parts, compressor, copies in self._packed:
            kinds.setdefault((copies.dtype, copies.device, compressor), []).append((bucket, parts, copies))
        self._packed = []
        for (_, _, compressor), group in kinds.items():
            packed = torch.cat([copies for *_, copies in group])
            places = [(bucket.tensor, part) for bucket, parts, _ in group for part in parts]
            names, sizes = tuple(part.name for _, part in places), tuple(part.numel for _, part in places)
            run = Run(0, packed.numel(), compressor, None, names, sizes)
            self._sample(run, packed)
            if self.updates is not None:
                self._as_gradient(packed)
            residual, state = (None, None) if isinstance(compressor, NoCompression) else self.sync.keep(run, packed)
            reduction = self._start(run, packed, residual, state, "small tensors", packs=True)
            self._sent.append(Sent(run, packed, reduction, residual, places=places))

    def _start(
        self,
        run: Run,
        source: Tensor,
        residual: Tensor | None,
        state: ShardState | None,
        label: str,
        *,
        packs: bool = False,
    ) -> Reduction:
        """Encode what is in `source`, and hand it to the wire."""
        sync, dense = self.sync, self.flushes or isinstance(run.compressor, NoCompression)
        key = mix_key(self.number, zlib.crc32(str(run.names[0]).encode()))
        if not isinstance(run.compressor.layout(source.numel(), source.dtype), RandomKLayout):
            key = mix_key(key, self.rank)  # each rank rounds by draws of its own
        state = None if dense else state
        operations = sync.number_operations(source.device)
        self._check_no_failure(operations)
        with refusing(operations):
            slot = sync.slot(
                run,
                source,
                operations,
                has_residual=residual is not None,
                state=state,
                algorithm=self._algorithm(run.compressor, source, packs),
                second=None if dense or packs else sync.second,
            )
            self._hold(slot)
            reduction = Reduction(slot.request, operations, source, residual, state, key, buffers=slot.buffers)
        self.handles.append(reduction.handle)
        self.labels.append(label)
        try:
            reduction.encode()
            reduction.submit()
        except BaseException as error:
            reduction.fail(error)  # else who waits for it would wait for ever
            raise
        return reduction

    def _algorithm(self, compressor: Compressor, tensor: Tensor, packs: bool) -> str:
        if not isinstance(compressor, NoCompression):
            if self.flushes or self.sync.algorithm == "dense":
                return "dense"
            return "auto" if packs else self.sync.algorithm
        # Between two ranks as many bytes go either way, and these in one message; but 16-bit sums would be rounded.
        return "gather" if self.world_size == 2 and tensor.dtype.itemsize >= 4 else "dense"

    def _hold(self, slot: Slot) -> None:
        self.slots.append(slot)
        held, most = sum(one.request.plan.cost.memory for one in self.slots), self.sync.max_bytes
        if most is not None and held > most:
            raise ValueError(
                f"max_bytes {most:,}, but the payloads of one step, which are held until it ends, need {held:,} and "
                f"more: raise max_bytes or {ENVIRONMENT_VARIABLE}, or compress more"
            )

    def _check_no_failure(self, operations: Sequence[Operation]) -> None:
        """If an operation of this step has failed, the others have left: its error, in place of waiting for them."""
        for sent in self._sent:
            if sent.reduction.failure is not None:
                for operation in operations:
                    operation.refuse(str(sent.reduction.failure))
                raise copied(sent.reduction.failure) from sent.reduction.failure

    # What an optimizer makes of gradients.

    def _update(self, run: Run, gradient: Tensor) -> Update:
        assert self.updates is not None
        moments = [
            vectors.slice(run.names, run.sizes, gradient.dtype, gradient.device) for vectors in self.updates.moments
        ]
        clip = 1.0 if isinstance(self._clip, Tensor) else self._clip
        return self.updates.rules[run.family].update(run, moments, clip / self.updates.scale)  # type: ignore[call-overload,no-any-return]

    def _clipped(self, gradient: Tensor) -> Tensor:
        """The gradient, times what only the GPU knows."""
        return gradient.to(self._clip.dtype) * self._clip if isinstance(self._clip, Tensor) else gradient

    def _as_gradient(self, copy: Tensor) -> Tensor:
        """Clip a copy of a gradient; if its square would overflow the second moment, make it NaN: the step is void."""
        assert self.updates is not None
        if isinstance(self._clip, Tensor) and copy.dtype.itemsize < self._clip.dtype.itemsize:
            copy.copy_(copy.to(self._clip.dtype).mul_(self._clip))  # else the factor would be rounded to 16 bits
        elif isinstance(self._clip, Tensor) or self._clip != 1.0:
            copy.mul_(self._clip)
        limit = self.updates.scale * torch.finfo(residual_dtype(copy.dtype)).max ** 0.5
        if copy.numel() and limit < torch.finfo(copy.dtype).max:
            copy.masked_fill_(torch.linalg.vector_norm(copy, float("inf")) > limit, torch.nan)
        return copy

    def _sample(self, run: Run, gradient: Tensor) -> None:
        """Keep samples of the gradients of a run, where the optimizer measures by them."""
        if self.updates is None or not self.updates.sampled:
            return
        for name, part in zip(run.names, gradient.split(list(run.sizes)), strict=True):
            if name in self.updates.sampled and part.numel():
                factor = self._clip / self.updates.scale
                self.samples[str(name)] = _sample(part, self.number, str(name), factor)

    # The end of a step.

    def wait(self) -> None:
        """Until everything is exchanged; raises what went wrong. Sets `finite`, the same on all ranks."""
        started = time.perf_counter()
        for handle in self.handles:
            handle.wait()
        self.waited = time.perf_counter() - started
        if self.mode is not Mode.TORCH:
            self.finite = all(handle.report.finite for handle in self.handles)
        elif self.updates is not None:
            self.finite = all(_is_finite(bucket.tensor) for bucket, _ in self._summed)
        self._join_streams()

    def _join_streams(self) -> None:
        """What is queued from now on comes after what was encoded."""
        for device in {bucket.tensor.device for bucket in self._buckets}:
            side = self.sync.side_stream(device)
            if side is not None:
                torch.cuda.current_stream(device).wait_stream(side)

    @torch.no_grad()
    def write(self) -> None:
        """Write the averages over the gradients; or NaN, if a rank's gradient was not finite."""
        if self.finite is False:
            for bucket in self._buckets:
                bucket.tensor.fill_(torch.nan)
            return
        for sent in self._sent:
            sent.reduction.apply(sent.gradient, None, sent.gradient)
        for sent in self._sent:  # not before all runs are applied, in whose gaps they lie
            if sent.places:
                averages = sent.gradient.split(list(sent.run.sizes))
                torch._foreach_copy_([bucket[part.start : part.stop] for bucket, part in sent.places], list(averages))
        if self._regrouped:
            parts = {name: part for bucket in self._buckets for name, part in bucket.parts().items()}
            for bucket in self._regrouped:
                for name, part in bucket.parts().items():
                    parts[name].copy_(part)

    @torch.no_grad()
    def averages(self) -> Iterator[Average]:
        """Bring residuals and moments up to date, and return the averages, one run after the other."""
        for bucket, _ in self._summed:
            run = Run(0, bucket.tensor.numel(), DENSE, None, bucket.names, bucket.sizes)
            yield Average(run, bucket.tensor, False)
        for sent in self._sent:
            if sent.places or self.mode is Mode.WARMUP:
                out = sent.gradient if sent.places else self.sync.scratch(sent.gradient, sent.gradient.dtype)
                sent.reduction.apply(sent.gradient if sent.places else None, None, out)
            else:
                out = self.sync.scratch(sent.gradient, residual_dtype(sent.gradient.dtype))
                sent.reduction.apply(self._clipped(sent.gradient), sent.update, out)
                if sent.residual is not None and sent.run.gaps():  # which belong to others: nothing is owed to them
                    torch._foreach_zero_([sent.residual[begin:end] for begin, end in sent.run.gaps()])
            yield Average(sent.run, out, sent.update is not None)

    def release(self) -> None:
        """The step is over: let go of gradients, payloads and copies."""
        self._sent, self._buckets, self._regrouped, self._summed, self._packed = [], [], [], [], []

    def abandon(self) -> None:
        """The step will not be applied: wait until the wire has done with its memory."""
        for handle in self.handles:
            handle.wait_quietly()
        self._join_streams()
        for sent in self._sent:
            sent.reduction.drop()
        self.release()


def _clip_to(updates: Updates, parts: Sequence[Tensor]) -> float | Tensor:
    """What a gradient is multiplied by so that its norm is `max_norm` at most; 1 if it is not finite."""
    assert updates.max_norm is not None
    # In float64, since the square of a large float32 overflows.
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    if {norm.device for norm in norms} == {norms[0].device} and norms[0].is_cuda:
        total = torch.linalg.vector_norm(torch.stack(norms)) / updates.scale
        return torch.where(total.isfinite(), (updates.max_norm / (total + 1e-6)).clamp(max=1.0), 1.0).float()
    norm = float(torch.linalg.vector_norm(torch.stack([each.cpu() for each in norms]))) / updates.scale
    return min(1.0, updates.max_norm / (norm + 1e-6)) if norm < float("inf") else 1.0  # the same in whatever buckets


_SAMPLED_SHARE, _FEWEST_SAMPLES = 128, 256
"""One element in so many is sampled, but at least so many of a tensor."""


def _sample(gradient: Tensor, step: int, name: str, factor: float | Tensor) -> Tensor:
    """Return some elements of a flat gradient, times `factor`: those that all ranks draw for this step and name."""
    numel = gradient.numel()
    count = min(numel, max(_FEWEST_SAMPLES, ceil(numel / _SAMPLED_SHARE)))
    layout = RandomKLayout(numel, gradient.dtype, count)
    positions, _ = positions_and_widths(layout, mix_key(step, zlib.crc32(name.encode())), gradient.device)
    return gradient[positions].to(residual_dtype(gradient.dtype)) * factor


def _is_finite(tensor: Tensor) -> bool:
    """By its sum, which costs one look at the tensor; a sum that overflows says nothing, so then element by element."""
    total = tensor.sum(dtype=torch.float32 if tensor.dtype.itemsize < 4 else None)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())
