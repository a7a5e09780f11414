"""Objects that are prepared once and used at every step: plans of exchanges, memory, streams and recordings.

Checkpoints contain none of them. They can be dropped at any time, and are then made again.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..collectives import ShardState
from ..collectives.algorithms.stage import Buffers
from ..collectives.groups import Group
from ..collectives.local import LocalGroup
from ..collectives.request import make_request
from ..collectives.transport.channel import Channel
from ..compressors import Compressor
from ..kernels.joined import Flat, addresses_of
from ..kernels.recording import Recording, RecordingMemory
from ..kernels.updates import AdamUpdate
from .buckets import Slice
from .parts import PackedGradients, Sent, Slot, StepRecord, Updates
from .residuals import NamedVectors

_NO_LIMIT = 1 << 62
"""Memory of one operation: all payloads are held until the step ends, so segments would save nothing."""


class Workspace:
    """The prepared objects of one synchronizer."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._memory = RecordingMemory()
        self.clear()

    def clear(self) -> None:
        self._slots: dict[tuple[Any, ...], Slot] = {}
        self._scratch: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}  # views by numel
        self._packs: dict[Hashable, tuple[Slice, Tensor]] = {}  # and memory for their gradients
        self._prepared: dict[int, Sent] = {}  # as sent in the last step, by the `id` of the slice
        self._prepared_for: tuple[Hashable, ...] = ()  # generations and addresses of its tensors

    def keep_used(self, step: StepRecord) -> None:
        """Drop everything that this step has not used, for example after DDP has rebuilt its buckets."""
        used = {id(slot) for slot in step.slots}
        self._slots = {key: slot for key, slot in self._slots.items() if id(slot) in used}
        self._prepared = {key: sent for key, sent in self._prepared.items() if id(sent.slot) in used}
        self._packs = {key: kept for key, kept in self._packs.items() if id(kept[0]) in step.packs}

    def prepare(self, sent: Sent) -> None:
        if sent.slot.recording is not None and sent.slot.request.is_exchanged_at_once:
            self._prepared[id(sent.slice)] = sent  # keeps the slice alive, so that no other slice gets its id

    def prepared(self, slice_: Slice, bucket: Flat, channels: Sequence[Channel]) -> Sent | None:
        """Return how a slice was sent in the last step; None if it was not recorded, or if its gradient has moved."""
        sent = self._prepared.get(id(slice_))
        if sent is None or sent.slot.recording is None or not sent.slot.recording.has(sent.key):
            return None
        if addresses_of(sent.gradient) != addresses_of(bucket[slice_.start : slice_.stop]):
            return None
        return sent if sent.slot.request.channels == channels else None

    def drop_moved(self, residuals: NamedVectors, updates: Updates | None) -> None:
        """Drop all prepared slices if a residual, a moment or a number of a rule has moved."""
        where: list[Hashable] = [residuals.generation]
        if updates is not None:
            where += [moment.generation for moment in updates.moments]
            where.append(None if updates.numbers is None else updates.numbers.data_ptr())
        if tuple(where) != self._prepared_for:
            self._prepared, self._prepared_for = {}, tuple(where)

    def slot(
        self,
        slice_: Slice,
        source: Tensor,
        channels: Sequence[Channel],
        *,
        state: ShardState | None,
        algorithm: str,
        shard_compressor: Compressor | str | None,
    ) -> Slot:
        """Return the slot by which a slice is sent; it is made when the slice is first seen."""
        key = (id(slice_), source.dtype, state is not None, algorithm)
        slot = self._slots.get(key)
        if slot is None or slot.request.channels != channels:
            request = make_request(
                channels,
                source,
                slice_.compressor,
                op=dist.ReduceOp.AVG,
                algorithm=algorithm,
                shard_compressor=shard_compressor,
                has_residual=state is not None,
                state=state,
                max_bytes=_NO_LIMIT,
            )
            recording = self._recording(slice_.compressor, source, channels)
            slot = self._slots[key] = Slot(slice_, request, Buffers(), recording)
        return slot

    def _recording(self, compressor: Compressor, source: Tensor, channels: Sequence[Channel]) -> Recording | None:
        """Return a new recording; None if a draw has a new key at each step, or ranks of a node are waited for."""
        if not source.is_cuda or compressor.draws or len(channels) > 1:
            return None
        layout = compressor.layout(source.numel(), source.dtype)
        backend, _ = kernels.select(layout, source.device)  # only the kernels of `cuda` never wait for the device
        return self.new_recording() if backend == "cuda" else None

    def new_recording(self) -> Recording:
        return Recording(self._memory)

    def addresses(self, sent: Sent) -> tuple[Hashable, ...]:
        """Return the addresses of all that is read or written when a slice is sent; payloads are the slot's."""
        update, residual = sent.update, sent.residual
        made: list[Hashable] = [sent.slot.number, addresses_of(sent.gradient)]
        made.append(0 if residual is None else residual.data_ptr())
        if isinstance(update, AdamUpdate) and update.on_device is not None:
            made += [update.m.data_ptr(), update.v.data_ptr(), update.beta2 < 1, update.on_device.data_ptr()]
            made.append(self.scratch(sent.gradient, update.m.dtype).data_ptr())
        return tuple(made)

    def packed(self, group: Sequence[PackedGradients]) -> tuple[Slice, Tensor]:
        """Return the slice of parameters that are packed together, and memory for them; both are kept."""
        places = tuple(part for waiting in group for part in waiting.parts)
        like, compressor = group[0].bucket.flat, group[0].compressor
        names, sizes = tuple(part.name for part in places), tuple(part.stop - part.start for part in places)
        key = names, sizes, compressor, like.dtype
        if key not in self._packs:
            slice_ = Slice(0, sum(sizes), compressor, family=None, names=names, sizes=sizes)
            self._packs[key] = slice_, torch.empty(slice_.stop, dtype=like.dtype, device=like.device)
        return self._packs[key]

    def scratch(self, like: Flat, dtype: torch.dtype) -> Tensor:
        """Return memory with the numel and device of `like`; the next call may return the same memory."""
        numel, device = like.numel(), like.device
        views = self._scratch.setdefault((dtype, device), {})
        if numel not in views:
            whole = views[max(views)] if views else None
            if whole is None or whole.numel() < numel:
                views.clear()
                self._prepared = {}
                whole = torch.empty(numel, dtype=dtype, device=device)
            views[numel] = whole[:numel]
        return views[numel]

    def side_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream that encodes in backward; None on a CPU, and for ranks that take turns on a GPU."""
        if device.type != "cuda" or isinstance(self._group, LocalGroup):
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
