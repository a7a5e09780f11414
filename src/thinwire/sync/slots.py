"""What is made once and used at every step: the ranks of the group, and for each slice its plan and memory.

Checkpoints contain none of it. It can be dropped at any time, and is then made again.
"""

import itertools
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import ShardState, all_reduce_compressed
from ..collectives.algorithms.leg import Leg
from ..collectives.collective import Collective
from ..collectives.flight import Flight
from ..collectives.groups import Group, channels, check_kind, compressing_ranks, place
from ..collectives.local import LocalGroup
from ..collectives.plan import given_max_bytes
from ..collectives.request import Request, make_request
from ..collectives.transport.channel import Channel
from ..collectives.transport.operation import Operation, check_timeout
from ..compressors import NoCompression
from ..kernels.joined import Flat
from ..kernels.updates import Update
from .buckets import PackedGradients, Slice
from .consolidate import Saves
from .residuals import NamedVectors, Residuals

_NO_LIMIT = 1 << 62
"""Memory of one operation: all payloads are held until the step ends, so segments would save nothing."""


class Peers:
    """The ranks of a group, looked up on first use, and again if torch has another default process group.

    timeout   seconds or a timedelta for one exchange; by default that of the group.
    """

    def __init__(self, group: Group, timeout: float | timedelta | None) -> None:
        check_kind(group)
        self.group, self.timeout = group, timeout
        self.timeout_seconds = check_timeout(timeout)
        self.saves = Saves()
        self._world: object = None
        self._place: tuple[int, int, int] | None = None  # in `_world`
        self._channels: dict[torch.device, list[Channel]] = {}

    @property
    def rank(self) -> int:
        return self._placed()[0]

    @property
    def world_size(self) -> int:
        return self._placed()[1]

    @property
    def nodes(self) -> int:
        """Return the number of compressed payloads in a sum: one for each rank, or with two groups for each node."""
        return self._placed()[2]

    def _placed(self) -> tuple[int, int, int]:
        world = dist.group.WORLD if dist.is_initialized() else None
        if self._place is None or self._world is not world:
            self._world, self._channels, self.saves = world, {}, Saves()
            self._place = *place(self.group), compressing_ranks(self.group)
        return self._place

    def channels(self, device: torch.device) -> list[Channel]:
        self._placed()
        if device not in self._channels:
            self._channels[device] = channels(self.group, device)
            self.saves.number(self._channels[device])
        return self._channels[device]

    def operations(self, device: torch.device) -> list[Operation]:
        """Number the next operation on each channel; all ranks do so in the same order."""
        made = [Operation(channel) for channel in self.channels(device)]
        for operation in made:
            operation.limit(self.timeout_seconds)
        return made

    def mean_of(self, tensor: Tensor) -> Tensor:
        """Return the average of a tensor over ranks, sent dense; its bytes are not counted."""
        mean = tensor.clone()
        all_reduce_compressed(mean, "none", op=dist.ReduceOp.AVG, group=self.group, timeout=self.timeout)
        return mean


@dataclass(frozen=True, eq=False)
class Slot:
    """The checked and planned exchange of a slice, and the memory of its payloads."""

    slice: Slice
    request: Request
    leg: Leg
    number: int = field(default_factory=itertools.count().__next__)  # of no other slot, for keys of recordings


class SliceFlight(Flight):
    """A slice that is being sent.

    gradient  a slice of the bucket; for packed parameters, a copy of their gradients.
    source    what is encoded: the gradient itself, or its copy or update in other memory.
    places    where packed parameters lie in their buckets.
    """

    def __init__(
        self,
        slot: Slot,
        operations: list[Operation],
        gradient: Flat,
        source: Tensor,
        residual: Tensor | None,
        *,
        state: ShardState | None = None,
        key: int | None = None,
        update: Update | None = None,
        places: Sequence[PackedGradients] = (),
    ) -> None:
        super().__init__(slot.request, operations, source, residual, state=state, key=key, leg=slot.leg)
        self.slot, self.gradient, self.update, self.places = slot, gradient, update, places
        # For recordings (recorded.py): everything that encoding depends on, and where packed gradients come from.
        self.recorded_by: Hashable = None
        self.origin: Hashable = None


class Slots:
    """The slots of one synchronizer, memory that they share, and the residuals of what they send.

    max_bytes   limit on the memory for the payloads of one step; None for none.
    """

    leg_kind = Leg  # on a GPU one that can be replayed (recorded.py)

    def __init__(self, peers: Peers, collective: Collective, residuals: Residuals, *, error_feedback: bool) -> None:
        self.peers, self.collective, self.residuals, self.error_feedback = peers, collective, residuals, error_feedback
        self.max_bytes = given_max_bytes(collective.max_bytes)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.clear()

    def clear(self) -> None:
        self._slots: dict[Hashable, Slot] = {}
        self._scratch: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}  # views by numel
        self._packs: dict[Hashable, tuple[Slice, Tensor]] = {}  # and memory for their gradients
        self._vectors: dict[tuple[int, int, torch.dtype], tuple[int, Tensor, ShardState | None]] = {}
        """By the `id` of a slice and of what has a vector for it; with the generation of the latter."""
        self.moves = 0  # how often `scratch` has taken other memory

    def keep(self, used: Collection[Slot]) -> None:
        """Drop what a step has not used, as after DDP has rebuilt its buckets."""
        slices = {id(slot.slice) for slot in used}
        self._slots = {key: slot for key, slot in self._slots.items() if slot in used}
        self._packs = {key: kept for key, kept in self._packs.items() if id(kept[0]) in slices}
        self._vectors = {key: known for key, known in self._vectors.items() if key[0] in slices}

    def of(
        self,
        slice_: Slice,
        source: Tensor,
        channels: Sequence[Channel],
        *,
        state: ShardState | None,
        keeps: bool,
        packs: bool,
    ) -> Slot:
        """Return the slot of a slice, of packed parameters or not, which is made when the slice is first seen."""
        key = id(slice_), source.dtype, keeps
        slot = self._slots.get(key)
        if slot is None or slot.request.channels != channels:
            algorithm = self.collective.algorithm
            if isinstance(slice_.compressor, NoCompression):
                # Between two ranks, gather sends as much as dense, in one message; but 16-bit sums would be rounded.
                is_wide = source.dtype.itemsize >= 4
                algorithm = "gather" if self.peers.world_size == 2 and is_wide else "dense"
            elif packs and algorithm != "dense":
                algorithm = "auto"
            request = make_request(
                channels,
                source,
                slice_.compressor,
                op=dist.ReduceOp.AVG,
                algorithm=algorithm,
                # In the warm-up owners keep nothing: what a sparse compressor does not send of a sum would be lost.
                shard_compressor=self.collective.shard_compressor if keeps and not packs else None,
                has_residual=state is not None,
                state=state,
                max_bytes=_NO_LIMIT,
            )
            # On a GPU, gloo sends from pinned memory, to which a payload is copied once for all ranks.
            pins = source.is_cuda and request.is_exchanged_at_once and request.channels[0].backend == "gloo"
            leg = self.leg_kind(request.plan.first, request.plan.second, request.weight, through_host=pins)
            slot = self._slots[key] = Slot(slice_, request, leg)
        return slot

    def vector_of(self, slice_: Slice, vectors: NamedVectors, like: Flat) -> tuple[Tensor, ShardState | None]:
        """Return the residual of a slice and the state of the shards that this rank owns, or a moment and None.

        They are looked up again only if one has moved.
        """
        key = id(slice_), id(vectors), like.dtype
        known = self._vectors.get(key)
        if known is None or known[0] != vectors.generation:
            state = vectors.state(slice_) if isinstance(vectors, Residuals) else None
            made = vectors.slice(slice_.names, sizes=slice_.sizes, dtype=like.dtype, device=like.device)
            known = self._vectors[key] = vectors.generation, made, state
        return known[1:]

    def side_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream that encodes in backward; None on a CPU, and for ranks that are threads."""
        if device.type != "cuda" or isinstance(self.peers.group, LocalGroup):
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def packed(self, group: Sequence[PackedGradients]) -> tuple[Slice, Tensor]:
        """Return the slice of parameters that are packed together, and memory for them; both are kept."""
        places = tuple(part for waiting in group for part in waiting.parts)
        like, compressor = group[0].flat, group[0].compressor
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
                self.moves += 1
                whole = torch.empty(numel, dtype=dtype, device=device)
            views[numel] = whole[:numel]
        return views[numel]
