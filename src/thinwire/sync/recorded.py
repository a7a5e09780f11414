"""CUDA graphs of a step: on a GPU, slices whose memory has not moved are encoded by a replay.

A step launches hundreds of kernels, and each takes Python far longer than the GPU (kernels/recording.py). So the work
that makes a payload is recorded once it has been the same for a few steps. Then the wire starts the recording, and the
backward pass does not wait for Python. On a CPU there is no `Recorder`, and nothing else in this package knows of it.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .. import kernels
from ..collectives.algorithms.leg import Encoded, Leg
from ..collectives.transport.operation import Operation
from ..compressors import CompressedTensor, Compressor
from ..kernels.joined import Flat, addresses_of
from ..kernels.recording import Recording, RecordingMemory
from ..kernels.updates import AdamUpdate, Update
from .buckets import Slice
from .slots import SliceFlight, Slot, Slots


def is_recordable(update: Update | None) -> bool:
    """Return whether GPU memory holds all numbers of an update that change from step to step."""
    return update is None or (isinstance(update, AdamUpdate) and update.on_device is not None)


@dataclass
class RecordedLeg(Leg):
    """A leg whose first encoding may have been a replay, which leaves the payload where it was."""

    is_replayed: bool = False

    def encode(self, compressor: Compressor, tensor: Tensor, residual: Tensor | None, out: Tensor) -> CompressedTensor:
        if not self.is_replayed:
            return super().encode(compressor, tensor, residual, out)
        ct = self.known[0]
        compressor.stats.add(tensor.nbytes, ct.nbytes, seconds=0.0, finite=True, kernels=ct.kernels)
        self.made.append(Encoded(ct, tensor, residual))
        return ct

    def copy_to_host(self, payload: Tensor, host: Tensor) -> None:
        if not self.is_replayed:
            super().copy_to_host(payload, host)


class Replayed(SliceFlight):
    """A flight like that of the step before: the wire starts the recording that makes its payload."""

    def __init__(
        self, like: SliceFlight, operations: list[Operation], recording: Recording, side: torch.cuda.Stream
    ) -> None:
        super().__init__(
            like.slot, operations, like.gradient, like.tensor, like.residual, update=like.update, places=like.places
        )
        self.recorded_by, self.origin, self._recording, self._side = like.recorded_by, like.origin, recording, side
        self._begun = torch.cuda.Event()  # after the work that the caller has queued
        self.replayed = threading.Event()

    def depart_on_wire(self) -> None:
        self._begun.record(torch.cuda.current_stream(self.tensor.device))
        self.stream = self._side if self.through_host else self.stream
        self.encoded = True

    def mark_ready(self) -> None:
        """Leave it to the wire, which knows when the payload is ready."""

    def post(self) -> bool:
        try:
            with torch.no_grad(), torch.cuda.stream(self._side):
                self._begun.wait()
                if not self._recording.replay(self.recorded_by):
                    raise RuntimeError("the recording has another key than when it was prepared: a bug in thinwire")
                depart_replayed(self)
                self.ready = torch.cuda.Event(blocking=self.through_host)
                self.ready.record()
        except BaseException as error:
            return self.give_up(error)
        finally:
            self.replayed.set()
        return super().post()

    def give_up(self, error: BaseException) -> bool:
        self.replayed.set()
        return super().give_up(error)


def depart_replayed(flight: SliceFlight) -> None:
    """Tell the story of a flight whose payload a replay has made."""
    leg = flight.slot.leg
    assert isinstance(leg, RecordedLeg)
    leg.is_replayed = True
    try:
        flight.depart()
    finally:
        leg.is_replayed = False  # a recording holds only the first encoding


class Recorder:
    """The recordings of one synchronizer's slices, and how each was sent in the last step."""

    def __init__(self, slots: Slots) -> None:
        self._slots, self._memory = slots, RecordingMemory()
        slots.leg_kind = RecordedLeg
        self._recordings: WeakKeyDictionary[Slot, Recording | None] = WeakKeyDictionary()
        self._known: dict[int, SliceFlight] = {}  # as sent in the last step, by the `id` of the slice
        self._known_for: Hashable = None  # generations and addresses of its tensors

    def new_recording(self) -> Recording:
        return Recording(self._memory)

    def begin(self, where: Sequence[Hashable]) -> None:
        """Forget how slices were sent if a residual, a moment, a number of a rule or shared memory has moved."""
        known_for = (*where, self._slots.moves)
        if known_for != self._known_for:
            self._known, self._known_for = {}, known_for

    def keep(self, used: Sequence[Slot]) -> None:
        self._known = {key: flight for key, flight in self._known.items() if flight.slot in used}

    def known(self, slice_: Slice, gradient: Flat, origin: Hashable = None) -> SliceFlight | None:
        """Return how a slice was sent in the last step; None if it was not recorded, or if its gradient has moved.

        Ranks that take turns on a GPU have no side stream for the wire: they replay as they encode, in `depart`.
        """
        flight = self._known.get(id(slice_))
        recording = None if flight is None else self._recordings.get(flight.slot)
        if flight is None or recording is None or not recording.has(flight.recorded_by) or flight.origin != origin:
            return None
        if self._slots.side_stream(gradient.device) is None:
            return None
        is_same = addresses_of(flight.gradient) == addresses_of(gradient)
        return (
            flight if is_same and flight.slot.request.channels == self._slots.peers.channels(gradient.device) else None
        )

    def again(self, flight: SliceFlight, operations: list[Operation]) -> Replayed:
        recording, side = self._recordings[flight.slot], self._slots.side_stream(flight.tensor.device)
        assert recording is not None
        assert side is not None
        return Replayed(flight, operations, recording, side)

    def wait_for(self, flights: Sequence[SliceFlight]) -> None:
        for flight in flights:
            if isinstance(flight, Replayed):
                flight.replayed.wait()

    def depart(self, flight: SliceFlight, encode: Callable[[], None], *, replays: bool, keeps: bool) -> None:
        """Encode, or replay the recording of it if allowed; keep how, if the next step can do the same."""
        recording = self._recording_of(flight)
        if recording is None or flight.recorded_by is None or not replays:
            encode()
        elif recording.run(flight.recorded_by, encode):
            depart_replayed(flight)
        if keeps and recording is not None and flight.recorded_by is not None and flight.request.is_exchanged_at_once:
            self._known[id(flight.slot.slice)] = flight  # keeps the slice alive, so that no other slice gets its id

    def _recording_of(self, flight: SliceFlight) -> Recording | None:
        """Return the recording; None if a draw has a new key at each step, or ranks of a node are waited for."""
        if flight.slot not in self._recordings:
            compressor, source = flight.slot.slice.compressor, flight.tensor
            made = None
            if source.is_cuda and not compressor.draws and len(flight.operations) == 1:
                backend, _ = kernels.select(compressor.layout(source.numel(), source.dtype), source.device)
                made = self.new_recording() if backend == "cuda" else None  # only these kernels never wait
            self._recordings[flight.slot] = made
        return self._recordings[flight.slot]

    def addresses(self, flight: SliceFlight) -> tuple[Hashable, ...]:
        """Return the addresses of all that is read or written when a slice is sent; payloads are the slot's."""
        update, residual = flight.update, flight.residual
        made: list[Hashable] = [flight.slot.number, addresses_of(flight.gradient)]
        made.append(0 if residual is None else residual.data_ptr())
        if isinstance(update, AdamUpdate) and update.on_device is not None:
            made += [update.m.data_ptr(), update.v.data_ptr(), update.beta2 < 1, update.on_device.data_ptr()]
            made.append(self._slots.scratch(flight.gradient, update.m.dtype).data_ptr())
        return tuple(made)

    def key_of_landing(self, flights: Sequence[SliceFlight]) -> tuple[Hashable, ...] | None:
        """Return everything that applying a step depends on, besides parameters; None if it cannot be recorded."""
        for flight in flights:
            if self._recordings.get(flight.slot) is None or not flight.request.is_exchanged_at_once:
                return None
            if not flight.places and not is_recordable(flight.update):
                return None
        # The key of packed parameters also has the clipping factor, by which applying them does not depend.
        return tuple(self.addresses(flight) if flight.places else flight.recorded_by for flight in flights)
