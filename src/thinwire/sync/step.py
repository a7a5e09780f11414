"""One step of training, from its first bucket to its last: encode, exchange, and apply or drop.

    backward (per bucket)                              optimizer.step(), or the last bucket of `attach`
    hook -> encode -> payload -> wire: one thread -> wait: was every rank finite? -> apply -> weights, or gradients

Encoding only reads. Gradients, residuals and moments change once every bucket is exchanged and finite on every rank.
"""

import time
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import ceil

import torch
from torch import Tensor

from ..collectives.all_reduce import refusing
from ..collectives.cost import ring
from ..collectives.groups import compressing_ranks, place
from ..collectives.handle import Handle, Report
from ..collectives.plan import ENVIRONMENT_VARIABLE
from ..collectives.reduction import Reduction
from ..collectives.transport.operation import Operation
from ..compressors import Compressor, NoCompression
from ..compressors.spec import mix_key
from ..kernels.joined import Flat, Joined, addresses_of, tensors_of
from ..kernels.layout import RandomKLayout, residual_dtype
from ..kernels.reference.randomk import positions_and_widths
from ..kernels.updates import AdamUpdate, Update
from .assignment import Assignment
from .buckets import Bucket, Packed, Slice, Together, together
from .parts import Mode, PackedGradients, Sent, Slot, StepRecord, Updates
from .ranks import Ranks
from .shards import ShardGroup

PACKED_BYTES = 1 << 20
"""Packed parameters of several buckets wait until they have this many bytes in total: each operation has a cost."""
_SAMPLED_SHARE, _FEWEST_SAMPLES = 128, 256
"""One element in `_SAMPLED_SHARE` is sampled, but at least `_FEWEST_SAMPLES` of a tensor."""


@dataclass(kw_only=True)
class Step(StepRecord):
    """A step that is under way."""

    sync: Ranks
    assignment: Assignment
    _encodes_here: bool = False  # a slice was encoded in backward, and not by a replay that the wire starts
    _held: int = 0  # bytes of payloads until the step ends
    _sent: list[Sent] = field(default_factory=list)
    _buckets: list[Bucket] = field(default_factory=list)
    _regrouped: list[Bucket] = field(default_factory=list)
    _waiting: list[Bucket] = field(default_factory=list)  # to be sent together
    _packed: list[PackedGradients] = field(default_factory=list)  # to be sent together
    _clip: float | Tensor = 1.0  # factor of the gradients; on a GPU it stays there

    def __post_init__(self) -> None:
        _, self._world_size = place(self.sync.group)
        self._nodes = compressing_ranks(self.sync.group)
        clips = self.updates is not None and self.updates.max_norm is not None
        self._collects = clips or bool(self.sync.wanted_layout)  # all buckets before the first is sent

    # Backward: encode, and hand over to the wire.

    def add(self, bucket: Bucket, *, last: bool) -> None:
        """Add one bucket, and send it, alone or with others; if buckets are collected, the last one sends them all."""
        if last:
            self.closed_at = time.perf_counter()
        self._buckets.append(bucket)
        self.layout.append(bucket.names)
        self.numels.update(zip(bucket.names, bucket.sizes, strict=True))
        self.bytes_dense += ring(bucket.tensor.nbytes, self._world_size)
        self.bytes_dense_between_nodes += ring(bucket.tensor.nbytes * self._nodes // self._world_size, self._nodes)
        if self.is_sent_by_torch:
            self._count_as_sent(bucket)
        elif not self._collects:
            self._wait_or_send(bucket, last)
        elif last:
            buckets = self._collected()
            for one in buckets:
                self._wait_or_send(one, one is buckets[-1])
        self.closed = last

    def _count_as_sent(self, bucket: Bucket) -> None:
        sent, report = ring(bucket.tensor.nbytes, self._world_size), Report("dense", "nothing is compressed")
        report.bytes_sent = report.bytes_received = report.bytes_between_nodes = sent
        report.messages = 2 * (self._world_size - 1)
        self.handles.append(Handle(report))
        self.handles[-1].complete([])

    def _collected(self) -> list[Bucket]:
        """Compute the clipping factor, and return all buckets: as they came, or regrouped by `sync.wanted_layout`."""
        parts = {name: part for bucket in self._buckets for name, part in bucket.parts().items()}
        if self.updates is not None and self.updates.max_norm is not None:
            self._clip = _clip_to(self.updates, [part for _, part in sorted(parts.items())], self.sync.shards)
            if self.updates.numbers is not None:
                self.updates.numbers[:, :2].mul_(self._clip)
        layout = self.sync.wanted_layout
        if layout != self.layout and {name for names in layout for name in names} == parts.keys():
            self._regrouped = [
                Bucket(torch.cat([parts[name] for name in names]), names, tuple(parts[name].numel() for name in names))
                for names in layout
            ]
        return self._regrouped or self._buckets

    def _wait_or_send(self, bucket: Bucket, last: bool) -> None:
        """Let a bucket wait, or send it with those that wait. All ranks decide alike, by the sizes alone."""
        kind = bucket.tensor.dtype, bucket.tensor.device
        if any((one.tensor.dtype, one.tensor.device) != kind for one in self._waiting):
            self._send_waiting(last=False)
        self._waiting.append(bucket)
        enough = 0 if self.mode is not Mode.UPDATES or self.updates is None else self.updates.together_bytes
        if last or sum(one.tensor.nbytes for one in self._waiting) >= enough:
            self._send_waiting(last)

    def _send_waiting(self, last: bool) -> None:
        waiting, self._waiting = self._waiting, []
        self._encode(together(waiting), last)

    def _stream(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context that uses the side stream, so that the backward pass continues meanwhile."""
        side = self.sync.workspace.side_stream(device)
        if side is None:
            return nullcontext()
        side.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(side)

    @torch.no_grad()
    def _encode(self, bucket: Together, last: bool) -> None:
        tensor, plan = bucket.flat, self.assignment.plan(bucket, self)
        for compressor, parts in plan.packed.items():
            copied = None
            if self.updates is None and isinstance(tensor, Tensor):  # an optimizer's gradients are not overwritten
                with self._stream(tensor.device):
                    if isinstance(compressor, NoCompression):
                        self._add_residuals(tensor, parts)
                    copied = torch.cat([tensor[part.start : part.stop] for part in parts])
            self._packed.append(PackedGradients(bucket, parts, compressor, copied))
        if last or sum(waiting.nbytes for waiting in self._packed) >= PACKED_BYTES:
            with self._stream(tensor.device):
                self._send_packed()  # first, because encoding them takes little time
        for slice_ in plan.slices:
            known = self._sent_before(slice_, tensor)
            if known is not None:
                self._send_again(known)
                continue
            # Encoding takes several kernels and memory that all slices share: no replay may come between them.
            self._encodes_here = True
            for sent in self._sent:
                sent.reduction.wait_until_replayed()
            with self._stream(tensor.device):
                self._send_slice(slice_, tensor[slice_.start : slice_.stop])

    def _add_residuals(self, gradient: Tensor, parts: Sequence[Packed]) -> None:
        """Add the residuals of parameters that are sent dense, so that nothing is left behind."""
        unsent, names = self.sync.unsent, {part.name for part in parts if part.name in self.sync.unsent}
        unsent.fold(names)
        for part in (part for part in parts if part.name in names):
            gradient[part.start : part.stop].add_(unsent[part.name])
        self.carried |= names

    @property
    def _samples(self) -> bool:
        return self.updates is not None and bool(self.updates.sampled)

    def _sent_before(self, slice_: Slice, bucket: Flat) -> Sent | None:
        """Return how a slice was sent in the last step; None if it cannot be sent in the same way again."""
        if self.mode is not Mode.UPDATES or self._encodes_here or self._samples:
            return None
        return self.sync.workspace.prepared(slice_, bucket, self.sync.channels_of(bucket.device))

    def _send_again(self, known: Sent) -> None:
        """Send a slice as in the last step: its tensors have not moved, and encoding is a replay."""
        slot, operations = known.slot, self.sync.number_operations(known.gradient.device)
        if self._refuses(operations):
            return
        with refusing(operations):
            self._hold(slot)
        reduction = Reduction(slot.request, operations, known.source, known.residual, None, None, buffers=slot.buffers)
        side = self.sync.workspace.side_stream(known.gradient.device)

        def encode() -> None:
            assert slot.recording is not None
            if side is not None:
                reduction.encode_on_wire(slot.recording, known.key, side)  # so that backward does not wait for Python
                return
            is_replayed = slot.recording.replay(known.key)
            assert is_replayed
            reduction.encode(is_replayed=True)

        self._submit(replace(known, reduction=reduction), encode)

    def _send_slice(self, slice_: Slice, gradient: Flat) -> None:
        self._sample(slice_, gradient)
        update = self._update(slice_, gradient) if self.mode is Mode.UPDATES else None
        if self.mode is Mode.GRADIENTS:
            assert isinstance(gradient, Tensor)
            source = gradient
        else:
            dtype = residual_dtype(gradient.dtype) if update is not None else gradient.dtype
            source = self.sync.workspace.scratch(gradient, dtype)
        sent = self._begin(slice_, gradient, source=source, update=update)
        if sent is None:
            return
        if self.mode is not Mode.WARMUP and _is_recordable(update):
            sent.key = self.sync.workspace.addresses(sent)

        def encode() -> None:
            if update is not None:
                with sent.reduction.handle.report.clock("update"):
                    update.write(self._clipped(sent), source)
            elif self.mode is Mode.WARMUP:
                assert isinstance(gradient, Tensor)
                self._as_gradient(source.copy_(gradient))
            if slice_.gaps:  # packed parameters, which are sent separately
                torch._foreach_zero_([source[begin:end] for begin, end in slice_.gaps])
            sent.reduction.encode()

        self._encode_and_submit(sent, encode)

    def _send_packed(self) -> None:
        """Send all packed parameters that wait, in one operation for each dtype, device and compressor."""
        kinds: dict[tuple[torch.dtype, torch.device, Compressor], list[PackedGradients]] = {}
        for waiting in self._packed:
            tensor = waiting.bucket.flat
            kinds.setdefault((tensor.dtype, tensor.device, waiting.compressor), []).append(waiting)
        self._packed = []
        for group in kinds.values():
            self._send_group(group)

    def _send_group(self, group: Sequence[PackedGradients]) -> None:
        slice_, packed = self.sync.workspace.packed(group)
        self.packs.add(id(slice_))
        origin: tuple[Hashable, ...] | None = None
        if self.mode is Mode.UPDATES and self.updates is not None and not isinstance(self._clip, Tensor):
            origin = *(addresses_of(waiting.bucket.flat) for waiting in group), self._clip, self.updates.scale
        known = self._sent_before(slice_, packed)
        if known is not None and known.origin == origin:
            self._send_again(known)
            return
        places = [(waiting.bucket.flat, part) for waiting in group for part in waiting.parts]
        sent = self._begin(slice_, packed, source=packed, places=places)
        if sent is None:
            return
        if origin is not None:
            sent.key, sent.origin = (*self.sync.workspace.addresses(sent), *origin), origin

        def encode() -> None:
            torch.cat([piece for waiting in group for piece in waiting.pieces()], out=packed)
            self._sample(slice_, packed)
            if self.updates is not None:
                self._as_gradient(packed)
            sent.reduction.encode()

        self._encode_and_submit(sent, encode)

    def _begin(
        self,
        slice_: Slice,
        gradient: Flat,
        *,
        source: Tensor,
        update: Update | None = None,
        places: Sequence[tuple[Flat, Packed]] = (),
    ) -> Sent | None:
        """Begin the operation that sends `source`, which is written later; return None if another has failed."""
        sync, is_dense = self.sync, isinstance(slice_.compressor, NoCompression)
        keeps = not is_dense and (bool(places) or self.mode is not Mode.WARMUP)
        residual, state = sync.residual_of(slice_, source) if keeps else (None, None)
        operations = sync.number_operations(source.device)
        if self._refuses(operations):
            return None
        with refusing(operations):
            slot = sync.workspace.slot(
                slice_,
                source,
                [operation.channel for operation in operations],
                state=state,
                algorithm=self._algorithm(slice_.compressor, source, bool(places)),
                # In the warm-up owners keep nothing: what a sparse compressor does not send of a sum would be lost.
                shard_compressor=sync.collective.shard_compressor if keeps and not places else None,
            )
            self._hold(slot)
            key = None
            if slot.request.draws:
                key = mix_key(self.number, slice_.seed)
            reduction = Reduction(slot.request, operations, source, residual, state, key, buffers=slot.buffers)
        return Sent(slice_, gradient, source, slot, reduction, residual, update=update, places=places)

    def _encode_and_submit(self, sent: Sent, encode: Callable[[], None]) -> None:
        """Encode a slice or replay the recording of it, submit it, and keep how, if the next step can do the same."""
        recording = sent.slot.recording

        def encode_or_replay() -> None:
            if recording is None or sent.key is None or self._samples:
                encode()
            elif recording.run(sent.key, encode):
                sent.reduction.encode(is_replayed=True)

        self._submit(sent, encode_or_replay)
        if self.mode is Mode.UPDATES and sent.key is not None:
            self.sync.workspace.prepare(sent)

    def _submit(self, sent: Sent, encode: Callable[[], None]) -> None:
        reduction = sent.reduction
        self.handles.append(reduction.handle)
        self._sent.append(sent)
        try:
            encode()
            reduction.submit()
        except BaseException as error:
            reduction.fail(error)  # otherwise a caller would wait for it forever
            raise

    def _algorithm(self, compressor: Compressor, tensor: Tensor, packs: bool) -> str:
        if not isinstance(compressor, NoCompression):
            if self.sync.collective.algorithm == "dense":
                return "dense"
            return "auto" if packs else self.sync.collective.algorithm
        # Between two ranks, gather sends as many bytes as dense, in one message; but 16-bit sums would be rounded.
        return "gather" if self._world_size == 2 and tensor.dtype.itemsize >= 4 else "dense"

    def _hold(self, slot: Slot) -> None:
        self.slots.append(slot)
        self._held += slot.request.plan.cost.memory
        most = self.sync.max_bytes
        if most is not None and self._held > most:
            raise ValueError(
                f"max_bytes {most:,}, but the payloads of one step, which are held until it ends, need {self._held:,} "
                f"and more: raise max_bytes or {ENVIRONMENT_VARIABLE}, or compress more"
            )

    def _refuses(self, operations: Sequence[Operation]) -> bool:
        """Return whether an operation of this step has failed; then refuse these, which are numbered as elsewhere."""
        failures = (sent.reduction.failure for sent in self._sent)
        failure = next((found for found in failures if found is not None), None)
        if failure is not None:
            for operation in operations:
                operation.refuse(str(failure))
        return failure is not None

    # Updates of an optimizer.

    def _update(self, slice_: Slice, gradient: Flat) -> Update:
        assert self.updates is not None
        moments = [
            vectors.slice(slice_.names, sizes=slice_.sizes, dtype=gradient.dtype, device=gradient.device)
            for vectors in self.updates.moments
        ]
        clip = 1.0 if isinstance(self._clip, Tensor) else self._clip
        return self.updates.rules[slice_.family](slice_, moments, clip / self.updates.scale)  # type: ignore[call-overload,no-any-return]

    def _clipped(self, sent: Sent) -> Flat:
        """Return the gradient, clipped here if the factor is on the GPU and not part of the update's numbers."""
        if not isinstance(self._clip, Tensor) or _is_recordable(sent.update):
            return sent.gradient
        clipped = [tensor.to(self._clip.dtype) * self._clip for tensor in tensors_of(sent.gradient)]
        return clipped[0] if len(clipped) == 1 else Joined(clipped)

    def _as_gradient(self, copy: Tensor) -> Tensor:
        """Clip a copy of a gradient; fill it with NaN, which voids the step, if its square would overflow."""
        assert self.updates is not None
        if isinstance(self._clip, Tensor) and copy.dtype.itemsize < self._clip.dtype.itemsize:
            copy.copy_(copy.to(self._clip.dtype).mul_(self._clip))  # otherwise the factor would be rounded to 16 bits
        elif isinstance(self._clip, Tensor) or self._clip != 1.0:
            copy.mul_(self._clip)
        limit = self.updates.scale * torch.finfo(residual_dtype(copy.dtype)).max ** 0.5
        if copy.numel() and limit < torch.finfo(copy.dtype).max:
            copy.masked_fill_(torch.linalg.vector_norm(copy, float("inf")) > limit, torch.nan)
        return copy

    def _sample(self, slice_: Slice, gradient: Flat) -> None:
        """Keep samples of gradients, if the optimizer has requested them, at positions that all ranks draw alike."""
        if self.updates is None or not self.updates.sampled:
            return
        for name, part in slice_.parts(gradient):
            if name in self.updates.sampled and isinstance(part, Tensor) and part.numel():
                count = min(part.numel(), max(_FEWEST_SAMPLES, ceil(part.numel() / _SAMPLED_SHARE)))
                key = mix_key(self.number, zlib.crc32(name.encode()))
                positions, _ = positions_and_widths(RandomKLayout(part.numel(), part.dtype, count, key), part.device)
                sample = part[positions].to(residual_dtype(part.dtype))
                self.samples[name] = sample * (self._clip / self.updates.scale)

    # The end of a step.

    def wait(self) -> None:
        """Wait until everything is exchanged, and set `finite`, the same on all ranks; raise any error."""
        started = time.perf_counter()
        for handle in self.handles:
            handle.wait()
        self.waited = time.perf_counter() - started
        if not self.is_sent_by_torch:
            self.finite = all(handle.report.finite for handle in self.handles)
        self._join_streams()

    def _join_streams(self) -> None:
        """Make the current stream of each device wait for everything that was encoded and exchanged."""
        for device in {bucket.tensor.device for bucket in self._buckets}:
            side = self.sync.workspace.side_stream(device)
            if side is not None:
                torch.cuda.current_stream(device).wait_stream(side)
        for sent in self._sent:
            sent.reduction.join_streams()

    def addresses(self) -> tuple[Hashable, ...] | None:
        """Return everything that applying this step depends on, besides parameters; None if it cannot be recorded."""
        if self.mode is not Mode.UPDATES or self._regrouped:
            return None
        for sent in self._sent:
            if sent.slot.recording is None or not sent.slot.request.is_exchanged_at_once:
                return None
            if not sent.places and not _is_recordable(sent.update):
                return None
        # The key of packed parameters also has the clipping factor, by which applying them does not depend.
        return tuple(self.sync.workspace.addresses(sent) if sent.places else sent.key for sent in self._sent)

    @torch.no_grad()
    def write(self) -> None:
        """Write the averages into the gradients; write NaN if a rank's gradient was not finite."""
        if self.finite is False:
            for bucket in self._buckets:
                bucket.tensor.fill_(torch.nan)
            return
        for sent in self._sent:
            sent.reduction.apply(sent.source, None, sent.source)
        for sent in self._sent:  # after all slices, because packed parameters lie in their gaps
            if sent.places:
                averages = sent.source.split(list(sent.slice.sizes))
                places = [piece for flat, part in sent.places for piece in tensors_of(flat[part.start : part.stop])]
                torch._foreach_copy_(places, list(averages))
        if self._regrouped:
            parts = {name: part for bucket in self._buckets for name, part in bucket.parts().items()}
            for bucket in self._regrouped:
                for name, part in bucket.parts().items():
                    parts[name].copy_(part)

    @torch.no_grad()
    def averages(self) -> Iterator[tuple[bool, list[tuple[str, Tensor]]]]:
        """Update residuals and moments, and yield averages by slice, in shared memory, and if they are updates."""
        for sent in self._sent:
            if sent.places or self.mode is Mode.WARMUP:
                out = sent.source if sent.places else self.sync.workspace.scratch(sent.gradient, sent.gradient.dtype)
                sent.reduction.apply(sent.source if sent.places else None, None, out)
            else:
                out = self.sync.workspace.scratch(sent.gradient, residual_dtype(sent.gradient.dtype))
                sent.reduction.apply(self._clipped(sent), sent.update, out)
                if sent.residual is not None and sent.slice.gaps:  # gaps have no residual
                    torch._foreach_zero_([sent.residual[begin:end] for begin, end in sent.slice.gaps])
            yield sent.update is not None, sent.slice.parts(out)

    def release(self) -> None:
        self._sent, self._buckets, self._regrouped = [], [], []
        self._waiting, self._packed = [], []

    def abandon(self) -> None:
        """Drop a step that is not applied, after waiting until the wire no longer uses its memory."""
        for handle in self.handles:
            handle.wait_quietly()
        self._join_streams()
        for sent in self._sent:
            sent.reduction.drop()
        self.release()


def _clip_to(updates: Updates, parts: Sequence[Tensor], shards: ShardGroup | None) -> float | Tensor:
    """Return the factor that clips the gradient, of all shards, to `max_norm`; 1 if it is not finite."""
    assert updates.max_norm is not None
    # In float64, since the square of a large float32 overflows.
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    if shards is not None and shards.size > 1:
        norms = [shards.add(torch.linalg.vector_norm(torch.stack(norms)).square()).sqrt()]
    if {norm.device for norm in norms} == {norms[0].device} and norms[0].is_cuda:
        total = torch.linalg.vector_norm(torch.stack(norms)) / updates.scale
        return torch.where(total.isfinite(), (updates.max_norm / (total + 1e-6)).clamp(max=1.0), 1.0).float()
    norm = float(torch.linalg.vector_norm(torch.stack([each.cpu() for each in norms]))) / updates.scale
    return min(1.0, updates.max_norm / (norm + 1e-6)) if norm < float("inf") else 1.0  # the same for any buckets


def _is_recordable(update: Update | None) -> bool:
    """Return whether GPU memory holds all numbers of an update that change from step to step."""
    return update is None or (isinstance(update, AdamUpdate) and update.on_device is not None)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite. They are checked one by one only if their sum, read once, is not."""
    total = tensor.sum(dtype=torch.float32 if tensor.dtype.itemsize < 4 else None)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())
