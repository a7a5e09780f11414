"""One step of training, from its first bucket to its last: encode, exchange, and apply or drop.

Encoding only reads. Gradients, residuals and moments change once every bucket is exchanged and finite on every rank.
"""

import time
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from ..collectives.algorithms.leg import Report
from ..collectives.cost import ring
from ..collectives.plan import ENVIRONMENT_VARIABLE
from ..collectives.transport.operation import Operation, refusing
from ..compressors import Compressor, NoCompression
from ..compressors.spec import mix_key
from ..kernels.joined import Flat, Joined, addresses_of, tensors_of
from ..kernels.layout import RandomKLayout, residual_dtype
from ..kernels.reference.randomk import positions_and_widths
from ..kernels.updates import Update
from .buckets import Bucket, Packed, PackedGradients, Slice
from .policy import Way
from .recorded import Recorder, is_recordable
from .residuals import NamedVectors
from .shards import ShardGroup
from .slots import SliceFlight, Slot, Slots

Maker = Callable[[Slice, Sequence[Tensor], float], Update]
"""Makes the update of a slice, from its moments and the factor of its gradient."""


@dataclass(frozen=True)
class Updates:
    """The settings of an optimizer for one step.

    warms_up   gradients are sent instead of updates; only packed parameters have a residual then.
    rules      one rule for each family of parameters, which makes an update from `moments` and the gradient.
    scale      the factor by which GradScaler has multiplied the loss.
    max_norm   the norm to which this rank's gradient is clipped.
    sampled    names of parameters whose gradients are sampled.
    numbers    a row for each rule in GPU memory, where a recording reads them; it begins with two factors of the
               gradient.
    together_bytes   buckets wait until their gradients have this many bytes in total, and are then sent together.
    """

    warms_up: bool
    rules: Sequence[Maker]
    moments: Sequence[NamedVectors]
    scale: float = 1.0
    max_norm: float | None = None
    sampled: frozenset[str] = frozenset()
    numbers: Tensor | None = None
    together_bytes: int = 0


PACKED_BYTES = 1 << 20
"""Packed parameters of several buckets wait until they have this many bytes in total: each operation has a cost."""
_SAMPLED_SHARE, _FEWEST_SAMPLES = 128, 256
"""One element in `_SAMPLED_SHARE` is sampled, but at least `_FEWEST_SAMPLES` of a tensor."""


class Step:
    """A step that is under way: its flights, and what it has done so far.

    number         of steps taken before this one, without skipped steps.
    updates        the settings of an optimizer; None if gradients are averaged.
    way            how parameters are sent.
    wanted_layout  the buckets to use, as parameter names, if possible; empty for those that come.
    is_sent_by_torch   nothing is compressed, and DDP's hook sends the buckets by itself.
    """

    def __init__(
        self,
        number: int,
        updates: Updates | None,
        *,
        way: Way,
        slots: Slots,
        recorder: Recorder | None,
        shards: ShardGroup | None,
        wanted_layout: list[tuple[str, ...]],
        is_sent_by_torch: bool,
    ) -> None:
        self.number, self.updates, self.is_sent_by_torch = number, updates, is_sent_by_torch
        self.warms_up = updates is not None and updates.warms_up
        self._sends_updates = updates is not None and not updates.warms_up
        self._sampled = frozenset[str]() if updates is None else updates.sampled
        self.closed = False  # after the last bucket
        self.finite: bool | None = None  # every rank's gradient; None until it is known, or if it is not checked
        self.flights: list[SliceFlight] = []
        self.reports: list[Report] = []
        self.layout: list[tuple[str, ...]] = []  # names in each bucket, as they came
        self.numels: dict[str, int] = {}
        self.bytes_dense = self.bytes_dense_between_nodes = 0
        self.closed_at = self.waited = 0.0  # of `time.perf_counter`; seconds for which the caller waited
        self.slots_used: list[Slot] = []
        self.carried: set[str] = set()  # parameters whose residuals were sent with their dense gradients
        self.samples: dict[str, Tensor] = {}
        self.way, self._slots, self._recorder, self._shards = way, slots, recorder, shards
        self._wanted_layout = wanted_layout
        self._world_size, self._nodes = slots.peers.world_size, slots.peers.nodes
        self._encodes_here = False  # a slice was encoded in backward, and not by a replay that the wire starts
        self._held = 0  # bytes of payloads until the step ends
        self._buckets: list[Bucket] = []
        self._regrouped: list[Bucket] = []
        self._waiting: list[Bucket] = []  # to be sent together
        self._packed: list[PackedGradients] = []  # to be sent together
        self._clip: float | Tensor = 1.0  # factor of the gradients; on a GPU it stays there
        clips = updates is not None and updates.max_norm is not None
        self._collects = clips or bool(wanted_layout)  # all buckets before the first is sent

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
            sent, report = ring(bucket.tensor.nbytes, self._world_size), Report("dense", "nothing is compressed")
            report.bytes_sent = report.bytes_received = report.bytes_between_nodes = sent
            report.messages = 2 * (self._world_size - 1)
            self.reports.append(report)
        elif last or not self._collects:
            buckets = self._collected() if self._collects else [bucket]
            for one in buckets:
                self._wait_or_send(one, last and one is buckets[-1])
        self.closed = last

    def _collected(self) -> list[Bucket]:
        """Compute the clipping factor, and return all buckets: as they came, or regrouped by `wanted_layout`."""
        parts = {name: part for bucket in self._buckets for name, part in bucket.parts().items()}
        if self.updates is not None and self.updates.max_norm is not None:
            self._clip = _clip_to(self.updates, [part for _, part in sorted(parts.items())], self._shards)
            if self.updates.numbers is not None:
                self.updates.numbers[:, :2].mul_(self._clip)
        layout = self._wanted_layout
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
        enough = self.updates.together_bytes if self.updates is not None and self._sends_updates else 0
        if last or sum(one.tensor.nbytes for one in self._waiting) >= enough:
            self._send_waiting(last)

    def _stream(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context that uses the side stream, so that the backward pass continues meanwhile."""
        side = self._slots.side_stream(device)
        if side is None:
            return nullcontext()
        side.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(side)

    @torch.no_grad()
    def _send_waiting(self, last: bool) -> None:
        waiting, self._waiting = self._waiting, []
        names = tuple(name for bucket in waiting for name in bucket.names)
        plan = self.way.plan(names, [size for bucket in waiting for size in bucket.sizes])
        tensor: Flat = waiting[0].tensor if len(waiting) == 1 else Joined([bucket.tensor for bucket in waiting])
        for compressor, parts in plan.packed.items():
            copied = None
            if self.updates is None and isinstance(tensor, Tensor):  # an optimizer's gradients are not overwritten
                with self._stream(tensor.device):
                    if isinstance(compressor, NoCompression):
                        self._add_residuals(tensor, parts)
                    copied = torch.cat([tensor[part.start : part.stop] for part in parts])
            self._packed.append(PackedGradients(tensor, parts, compressor, copied))
        if last or sum(packed.nbytes for packed in self._packed) >= PACKED_BYTES:
            with self._stream(tensor.device):
                self._send_packed()  # first, because encoding them takes little time
        for slice_ in plan.slices:
            gradient = tensor[slice_.start : slice_.stop]
            if self._is_sent_again(slice_, gradient):
                continue
            # Encoding takes several kernels and memory that all slices share: no replay may come between them.
            self._encodes_here = True
            if self._recorder is not None:
                self._recorder.wait_for(self.flights)
            with self._stream(tensor.device):
                self._send_slice(slice_, gradient)

    def _add_residuals(self, gradient: Tensor, parts: Sequence[Packed]) -> None:
        """Add the residuals of parameters that are sent dense, so that nothing is left behind."""
        unsent = self._slots.residuals
        names = {part.name for part in parts if part.name in unsent}
        unsent.fold(names)
        for part in (part for part in parts if part.name in names):
            gradient[part.start : part.stop].add_(unsent[part.name])
        self.carried |= names

    def _is_sent_again(self, slice_: Slice, gradient: Flat, origin: Hashable = None) -> bool:
        """Send a slice as in the last step, if it was recorded, and its tensors have not moved."""
        if self._recorder is None or not self._sends_updates or self._encodes_here or self._sampled:
            return False
        known = self._recorder.known(slice_, gradient, origin)
        if known is None:
            return False
        if not (operations := self._operations(gradient.device)):
            return True
        with refusing(operations):
            self._hold(known.slot)
        flight = self._recorder.again(known, operations)
        self._submit(flight, flight.depart_on_wire)
        return True

    def _send_slice(self, slice_: Slice, gradient: Flat) -> None:
        update, source = None, gradient
        if self.updates is not None:
            if self._sends_updates:
                moments = [self._slots.vector_of(slice_, vectors, gradient)[0] for vectors in self.updates.moments]
                clip = 1.0 if isinstance(self._clip, Tensor) else self._clip
                make: Maker = self.updates.rules[slice_.family]  # type: ignore[call-overload]
                update = make(slice_, moments, clip / self.updates.scale)
            dtype = residual_dtype(gradient.dtype) if update is not None else gradient.dtype
            source = self._slots.scratch(gradient, dtype)
        assert isinstance(source, Tensor)
        self._send(slice_, gradient, source, update=update)

    def _send_packed(self) -> None:
        """Send all packed parameters that wait, in one operation for each dtype, device and compressor."""
        kinds: dict[tuple[torch.dtype, torch.device, Compressor], list[PackedGradients]] = {}
        for waiting in self._packed:
            kinds.setdefault((waiting.flat.dtype, waiting.flat.device, waiting.compressor), []).append(waiting)
        self._packed = []
        for group in kinds.values():
            slice_, packed = self._slots.packed(group)
            origin: Hashable = None
            if self.updates is not None and self._sends_updates and not isinstance(self._clip, Tensor):
                origin = *(addresses_of(waiting.flat) for waiting in group), self._clip, self.updates.scale
            if not self._is_sent_again(slice_, packed, origin):
                self._send(slice_, packed, packed, places=group, origin=origin)

    def _send(
        self,
        slice_: Slice,
        gradient: Flat,
        source: Tensor,
        *,
        update: Update | None = None,
        places: Sequence[PackedGradients] = (),
        origin: Hashable = None,
    ) -> None:
        """Write and send `source`; do nothing if an operation of this step has failed."""
        keeps = not isinstance(slice_.compressor, NoCompression) and (bool(places) or not self.warms_up)
        if not (operations := self._operations(source.device)):
            return
        with refusing(operations):
            slots, channels = self._slots, [operation.channel for operation in operations]
            has_residual = keeps and slots.error_feedback
            residual, state = slots.vector_of(slice_, slots.residuals, source) if has_residual else (None, None)
            slot = slots.of(slice_, source, channels, state=state, keeps=keeps, packs=bool(places))
            self._hold(slot)
            key = mix_key(self.number, slice_.seed) if slot.request.draws else None
            flight = SliceFlight(
                slot, operations, gradient, source, residual, state=state, key=key, update=update, places=places
            )

        def encode() -> None:
            self._write(flight)
            flight.depart()

        recorder = self._recorder
        if recorder is None:
            self._submit(flight, encode)
            return
        if origin is not None if places else not self.warms_up and is_recordable(update):
            flight.recorded_by, flight.origin = (*recorder.addresses(flight), origin), origin
        replays, keeps = not self._sampled, self._sends_updates
        self._submit(flight, lambda: recorder.depart(flight, encode, replays=replays, keeps=keeps))

    def _write(self, flight: SliceFlight) -> None:
        source, gradient, slice_ = flight.tensor, flight.gradient, flight.slot.slice
        if flight.places:
            pieces = [packed.pieces() if packed.copied is None else [packed.copied] for packed in flight.places]
            torch.cat([piece for some in pieces for piece in some], out=source)
        self._sample(slice_, gradient)
        if flight.update is not None:
            with flight.report.clock("update"):
                flight.update.write(self._clipped(flight), source)
        elif self.updates is not None:
            if not flight.places:
                assert isinstance(gradient, Tensor)
                source.copy_(gradient)
            self._as_gradient(source)
        if slice_.gaps:  # packed parameters, which are sent separately
            torch._foreach_zero_([source[begin:end] for begin, end in slice_.gaps])

    def _submit(self, flight: SliceFlight, depart: Callable[[], None]) -> None:
        self.flights.append(flight)
        self.reports.append(flight.report)
        try:
            depart()
            flight.submit()
        except BaseException as error:
            flight.give_up(error)  # otherwise a caller would wait for it forever
            raise

    def _hold(self, slot: Slot) -> None:
        self.slots_used.append(slot)
        self._held += slot.request.plan.cost.memory
        most = self._slots.max_bytes
        if most is not None and self._held > most:
            raise ValueError(
                f"max_bytes {most:,}, but the payloads of one step, which are held until it ends, need {self._held:,} "
                f"and more: raise max_bytes or {ENVIRONMENT_VARIABLE}, or compress more"
            )

    def _operations(self, device: torch.device) -> list[Operation]:
        """Number the next operations, as elsewhere; if one of this step has failed, refuse them and return none."""
        made = self._slots.peers.operations(device)
        failure = next((found for flight in self.flights if (found := flight.failure) is not None), None)
        for operation in made if failure is not None else ():
            operation.refuse(str(failure))
        return made if failure is None else []

    # Updates of an optimizer.

    def _clipped(self, flight: SliceFlight) -> Flat:
        """Return the gradient, clipped here if the factor is on the GPU and not part of the update's numbers."""
        if not isinstance(self._clip, Tensor) or is_recordable(flight.update):
            return flight.gradient
        clipped = [tensor.to(self._clip.dtype) * self._clip for tensor in tensors_of(flight.gradient)]
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
        if self.updates is None or not self._sampled:
            return
        for name, part in slice_.parts(gradient):
            if name in self._sampled and isinstance(part, Tensor) and part.numel():
                count = min(part.numel(), max(_FEWEST_SAMPLES, ceil(part.numel() / _SAMPLED_SHARE)))
                key = mix_key(self.number, zlib.crc32(name.encode()))
                positions, _ = positions_and_widths(RandomKLayout(part.numel(), part.dtype, count, key), part.device)
                sample = part[positions].to(residual_dtype(part.dtype))
                self.samples[name] = sample * (self._clip / self.updates.scale)

    # The end of a step.

    def wait(self) -> None:
        """Wait until everything is exchanged, and set `finite`, the same on all ranks; raise any error."""
        started = time.perf_counter()
        for flight in self.flights:
            flight.wait()
        self.waited = time.perf_counter() - started
        if not self.is_sent_by_torch:
            self.finite = all(report.finite for report in self.reports)
        self._join_streams()

    def _join_streams(self) -> None:
        """Make the current stream of each device wait for everything that was encoded and exchanged."""
        for device in {bucket.tensor.device for bucket in self._buckets}:
            side = self._slots.side_stream(device)
            if side is not None:
                torch.cuda.current_stream(device).wait_stream(side)
        for flight in self.flights:
            flight.join_streams()

    def addresses(self) -> tuple[Hashable, ...] | None:
        """Return everything that applying this step depends on, besides parameters; None if it cannot be recorded."""
        if self._recorder is None or not self._sends_updates or self._regrouped:
            return None
        return self._recorder.key_of_landing(self.flights)

    @torch.no_grad()
    def write(self) -> None:
        """Write the averages into the gradients; write NaN if a rank's gradient was not finite."""
        if self.finite is False:
            for bucket in self._buckets:
                bucket.tensor.fill_(torch.nan)
            return
        for flight in self.flights:
            flight.land(flight.tensor, flight.tensor)
        for flight in self.flights:  # after all slices, because packed parameters lie in their gaps
            if flight.places:
                averages = flight.tensor.split(list(flight.slot.slice.sizes))
                torch._foreach_copy_([piece for packed in flight.places for piece in packed.pieces()], list(averages))
        if self._regrouped:
            parts = {name: part for bucket in self._buckets for name, part in bucket.parts().items()}
            for bucket in self._regrouped:
                for name, part in bucket.parts().items():
                    parts[name].copy_(part)

    @torch.no_grad()
    def averages(self) -> Iterator[tuple[bool, list[tuple[str, Tensor]]]]:
        """Update residuals and moments, and yield averages by slice, in shared memory, and if they are updates."""
        for flight in self.flights:
            if flight.places:
                out = flight.tensor
                flight.land(out, out)
            elif self.warms_up:
                out = self._slots.scratch(flight.gradient, flight.gradient.dtype)
                flight.land(out)
            else:
                out = self._slots.scratch(flight.gradient, residual_dtype(flight.gradient.dtype))
                flight.land(out, self._clipped(flight), flight.update)
                if flight.residual is not None and flight.slot.slice.gaps:  # gaps have no residual
                    torch._foreach_zero_([flight.residual[begin:end] for begin, end in flight.slot.slice.gaps])
            yield flight.update is not None, flight.slot.slice.parts(out)

    def release(self) -> None:
        for flight in self.flights:
            flight.abandon()  # unless it has landed, nothing has changed
        self.flights, self._buckets, self._regrouped = [], [], []
        self._waiting, self._packed = [], []

    def abandon(self) -> None:
        """Drop a step that is not applied, after waiting until the wire no longer uses its memory."""
        for flight in self.flights:
            flight.wait_quietly()
        self._join_streams()
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


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite. They are checked one by one only if their sum, read once, is not."""
    total = tensor.sum(dtype=torch.float32 if tensor.dtype.itemsize < 4 else None)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())
