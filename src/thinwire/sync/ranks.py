"""The ranks that take part in training, and what this rank keeps from step to step to exchange with them."""

import time
import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta
from math import sqrt
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import ShardState, all_reduce_compressed
from ..collectives.all_reduce import check_timeout
from ..collectives.collective import Collective
from ..collectives.groups import Group, channels, check_kind, place
from ..collectives.transport.channel import Channel
from ..collectives.transport.operation import Operation
from ..compressors import Compressor
from .buckets import Slice
from .residuals import Residuals
from .shards import ShardGroup
from .statistics import SyncStats
from .workspace import Workspace


class Ranks:
    """The part of `Synchronizer` that steps and assignments use: group, options, residuals and prepared objects."""

    group: Group
    collective: Collective
    error_feedback: bool
    max_bytes: int | None
    timeout: float | timedelta | None
    shards: ShardGroup | None
    unsent: Residuals
    stats: SyncStats
    layout: list[tuple[str, ...]]  # the buckets of the last step that was not skipped, as parameter names

    def __init__(self) -> None:
        self._timeout_seconds = check_timeout(self.timeout)
        check_kind(self.group)
        if self.shards is not None:
            self.shards.timeout = self.timeout
        self.wanted_layout: list[tuple[str, ...]] = []
        """The buckets that the next step uses, if possible, as parameter names: other buckets give other bits.

        DDP rebuilds them after its first step, also in a run that resumes. So a run begins with those of the saved one,
        and any run keeps those of its first step for the second.
        """
        self.workspace = Workspace(self.group)
        self._channels: dict[torch.device, tuple[object, list[Channel]]] = {}
        self._saves = Saves()

    @property
    def steps(self) -> int:
        return self.stats.steps

    @property
    def residuals(self) -> dict[str, Tensor]:
        """Return what this rank has not sent so far, by parameter, as flat views."""
        return self.unsent.named()

    def residual_norm(self) -> float:
        """Return the norm of this rank's residuals. If it keeps growing, too little is sent."""
        return sqrt(sum(float(part.double().square().sum()) for part in self.residuals.values()))

    def average(self, tensors: Iterable[Tensor], compressor: Compressor) -> None:
        """Average tensors over ranks, in place and without residuals; sums have the same compressor. Count bytes."""
        started, mean, group, timeout = time.perf_counter(), dist.ReduceOp.AVG, self.group, self.timeout
        handles = [
            all_reduce_compressed(
                each, compressor, op=mean, group=group, async_op=True, timeout=timeout, shard_compressor=compressor
            )
            for each in tensors
        ]
        for handle in handles:
            handle.wait()
        self.stats.add_averages(handles, started)

    def mean_of(self, tensor: Tensor) -> Tensor:
        """Return the average of a tensor over ranks, sent dense; its bytes are not counted."""
        mean = tensor.clone()
        all_reduce_compressed(mean, "none", op=dist.ReduceOp.AVG, group=self.group, timeout=self.timeout)
        return mean

    @property
    def rank(self) -> int:
        return place(self.group)[0]

    @property
    def world_size(self) -> int:
        return place(self.group)[1]

    def residual_of(self, slice_: Slice, tensor: Tensor) -> tuple[Tensor | None, ShardState | None]:
        """Return the residual of a slice and the state of the shards that this rank owns; None if they are not kept."""
        if not self.error_feedback:
            return None, None
        state = self.unsent.state(slice_)
        return self.unsent.slice(slice_.names, sizes=slice_.sizes, dtype=tensor.dtype, device=tensor.device), state

    def number_operations(self, device: torch.device) -> list[Operation]:
        operations = [Operation(channel) for channel in self.channels_of(device)]
        for operation in operations:
            operation.limit(self._timeout_seconds)
        return operations

    def channels_of(self, device: torch.device) -> list[Channel]:
        """Return the channels of the group, which are looked up once for each default process group of torch."""
        world = dist.group.WORLD if dist.is_initialized() else None
        found = self._channels.get(device)
        if found is None or found[0] is not world:
            found = self._channels[device] = world, channels(self.group, device)
            self._saves.number(found[1])
        return found[1]


class Saves:
    """Warns if rank 0 alone calls `state_dict()`, by the notice board of the group, though states differ between ranks.

    At the end of the step after a call, rank 0 sees whether its neighbour has called too: it would have by then.
    """

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Channel, int] = WeakKeyDictionary()  # of this among a channel's synchronizers
        self._noted: tuple[Channel, str, int] | None = None  # by the last call: a key on the channel's board, and steps
        self._is_checked = self._has_warned = False

    def number(self, channels: Sequence[Channel]) -> None:
        """Number this synchronizer among those of its channels. All ranks call this in the same order."""
        for channel in channels:
            if channel not in self._numbers:
                self._numbers[channel] = next(channel.users)

    def note(self, channels: Sequence[Channel], steps: int) -> None:
        channel = next((each for each in channels if each.size > 1), None)
        if channel is None or self._has_warned or (self._noted is not None and self._noted[2] == steps):
            return
        self._noted = channel, f"saved/{self._numbers[channel]}", steps
        self._is_checked = False
        channel.board.write(f"{self._noted[1]}/{channel.rank}", str(steps))

    def check(self) -> None:
        """Warn on rank 0, at the end of the step after a call, if its neighbour has not called; once."""
        if self._noted is None or self._is_checked or self._noted[0].rank != 0:
            return
        (channel, key, steps), self._is_checked = self._noted, True
        theirs = channel.board.read(f"{key}/1")
        if channel.board.lost is None and (theirs is None or int(theirs) < steps):  # it may have called once more since
            self._has_warned = True
            warnings.warn(
                f"rank {channel.ranks[0]} called state_dict(), and rank {channel.ranks[1]} did not. Residuals and "
                "momentum differ between ranks: what one rank saves alone cannot be loaded by the others. Call "
                "consolidate_state_dict() on all ranks before, or save the state_dict() of every rank",
                stacklevel=4,
            )
