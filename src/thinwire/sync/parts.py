"""The nouns of a step: what an optimizer sends, what is under way, and what came of it."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from torch import Tensor

from ..collectives.algorithms.stage import Buffers
from ..collectives.handle import Handle
from ..collectives.reduction import Reduction
from ..collectives.request import Request
from ..compressors import Compressor
from ..kernels.recording import Recording
from ..kernels.updates import Update
from .buckets import Bucket, Packed, Run
from .residuals import NamedVectors


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
    numbers    those of the rules, in the memory of a GPU, a row for each: there a recording finds them. The first two
               of a row are what a gradient is multiplied by.
    """

    warms_up: bool
    rules: Sequence[Rule]
    moments: Sequence[NamedVectors]
    scale: float = 1.0
    max_norm: float | None = None
    sampled: frozenset[str] = frozenset()
    numbers: Tensor | None = None


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
    """What a run is sent by."""

    run: Run
    request: Request
    buffers: Buffers
    recording: Recording | None
    """Of what makes the payload, on a GPU."""


@dataclass
class Sent:
    """A run under way."""

    run: Run
    gradient: Tensor
    """A slice of its bucket; of packed parameters, a copy of theirs."""
    source: Tensor
    """What is encoded: the gradient, or in other memory the update that is made of it."""
    slot: Slot
    reduction: Reduction
    residual: Tensor | None
    update: Update | None = None
    places: Sequence[tuple[Tensor, Packed]] = ()
    """Where packed parameters are: in which bucket, and at which elements."""
    key: Hashable = None
    """What encoding it depends on; None if that cannot be recorded."""


class Waiting(NamedTuple):
    """Small parameters of one bucket that are to be sent together with those of others."""

    bucket: Bucket
    parts: Sequence[Packed]
    compressor: Compressor
    copied: Tensor | None
    """Them, one behind the other; None if the bucket still has them when they are sent."""

    @property
    def nbytes(self) -> int:
        return sum(part.stop - part.start for part in self.parts) * self.bucket.tensor.itemsize

    def pieces(self) -> list[Tensor]:
        """Return them, in their order."""
        if self.copied is not None:
            return [self.copied]
        return [self.bucket.tensor[part.start : part.stop] for part in self.parts]


@dataclass(kw_only=True)
class StepRecord:
    """What a step was to do, and what it has done so far."""

    number: int
    """How many steps counted before this one."""
    mode: Mode
    updates: Updates | None
    flushes: bool
    """Whether all that is owed is sent, dense."""
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
    packs: set[tuple[str | None, ...]] = field(default_factory=set)
    """Which small parameters were sent together."""
    samples: dict[str, Tensor] = field(default_factory=dict)
    """Of this rank's gradient, by parameter, if an optimizer wants them."""

    @property
    def passes_on(self) -> bool:
        """Whether torch's own all-reduce does it."""
        return self.mode is Mode.TORCH

    @property
    def warms_up(self) -> bool:
        """Whether an optimizer takes gradients as they are, in this step."""
        return self.updates is not None and self.updates.warms_up
