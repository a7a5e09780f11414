"""Data types of a step: the updates of an optimizer, slices that are being sent, and their results."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from ..collectives.algorithms.stage import Buffers
from ..collectives.handle import Handle
from ..collectives.reduction import Reduction
from ..collectives.request import Request
from ..compressors import Compressor
from ..kernels.joined import Flat, tensors_of
from ..kernels.recording import Recording
from ..kernels.updates import Update
from .buckets import Packed, Slice, Together
from .residuals import NamedVectors


class Mode(Enum):
    """How the gradients of a step are sent."""

    GRADIENTS = "compressed"
    WARMUP = "compressed, for an optimizer that takes them as they are; only small tensors keep a residual"
    UPDATES = "as the updates that an optimizer makes of them"


Rule = Callable[[Slice, Sequence[Tensor], float], Update]
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
    rules: Sequence[Rule]
    moments: Sequence[NamedVectors]
    scale: float = 1.0
    max_norm: float | None = None
    sampled: frozenset[str] = frozenset()
    numbers: Tensor | None = None
    together_bytes: int = 0


@dataclass(frozen=True)
class Slot:
    """The objects that are prepared once for sending a slice: its request, its buffers and a recording."""

    slice: Slice
    request: Request
    buffers: Buffers
    recording: Recording | None  # recording of the GPU work that makes the payload; None if it cannot be recorded
    number: int = field(default_factory=itertools.count().__next__)  # of no other slot, for keys of recordings


@dataclass
class Sent:
    """A slice that is being sent in the current step."""

    slice: Slice
    gradient: Flat  # a slice of the bucket; for packed parameters, a copy of their gradients
    source: Tensor  # the tensor that is encoded: the gradient itself, or its copy or update in other memory
    slot: Slot
    reduction: Reduction
    residual: Tensor | None
    update: Update | None = None
    places: Sequence[tuple[Flat, Packed]] = ()  # of packed parameters, in the bucket's gradient
    key: Hashable = None  # everything that encoding depends on; None if it cannot be recorded
    origin: Hashable = None  # addresses of the buckets that packed parameters are copied from, and factors


class PackedGradients(NamedTuple):
    """Packed parameters of one bucket that wait to be sent together with those of other buckets."""

    bucket: Together
    parts: Sequence[Packed]
    compressor: Compressor
    copied: Tensor | None  # the gradients, one after the other; None if the bucket still holds them when they are sent

    @property
    def nbytes(self) -> int:
        return sum(part.stop - part.start for part in self.parts) * self.bucket.flat.dtype.itemsize

    def pieces(self) -> list[Tensor]:
        if self.copied is not None:
            return [self.copied]
        return [piece for part in self.parts for piece in tensors_of(self.bucket.flat[part.start : part.stop])]


@dataclass(kw_only=True)
class StepRecord:
    """The settings of a step, and what it has done so far."""

    number: int  # number of steps taken before this one, without skipped steps
    mode: Mode
    updates: Updates | None
    is_sent_by_torch: bool = False  # nothing is compressed, and DDP's hook sends the buckets by itself
    closed: bool = False  # after the last bucket
    finite: bool | None = None  # every rank's gradient; None until it is known, or if it is not checked
    handles: list[Handle] = field(default_factory=list)
    layout: list[tuple[str, ...]] = field(default_factory=list)  # names in each bucket, as they came
    numels: dict[str, int] = field(default_factory=dict)
    bytes_dense: int = 0
    bytes_dense_between_nodes: int = 0
    closed_at: float = 0.0  # of `time.perf_counter`
    waited: float = 0.0  # seconds for which the caller waited for the exchange
    slots: list[Slot] = field(default_factory=list)
    packs: set[int] = field(default_factory=set)  # the `id` of each slice of packed parameters
    carried: set[str] = field(default_factory=set)  # parameters whose residuals were sent with their dense gradients
    samples: dict[str, Tensor] = field(default_factory=dict)

    @property
    def warms_up(self) -> bool:
        return self.updates is not None and self.updates.warms_up
