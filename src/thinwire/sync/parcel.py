"""A parcel: the flight of one slice of a step, with the gradients that it carries."""

from collections.abc import Hashable, Sequence

from torch import Tensor

from ..collectives import ShardState
from ..collectives.flight import Flight
from ..collectives.transport.operation import Operation
from ..kernels.joined import Flat
from ..kernels.updates import Update
from .buckets import Packed
from .slots import Slot


class Parcel(Flight):
    """A slice that is being sent.

    gradient  a slice of the bucket; for packed parameters, a copy of their gradients.
    source    what is encoded: the gradient itself, or its copy or update in other memory.
    places    of packed parameters, in the bucket's gradient.
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
        places: Sequence[tuple[Flat, Packed]] = (),
    ) -> None:
        super().__init__(slot.request, operations, source, residual, state=state, key=key, leg=slot.leg)
        self.slot, self.gradient, self.update, self.places = slot, gradient, update, places
        # For recordings (recorded.py): everything that encoding depends on, and where packed gradients come from.
        self.recorded_by: Hashable = None
        self.origin: Hashable = None
