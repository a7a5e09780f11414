"""The ranks that a synchronizer exchanges with, and small exchanges between them beside those of a step."""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import Handle, all_reduce_compressed
from ..collectives.groups import Group, channels, check_kind, compressing_ranks, is_ready, place
from ..collectives.transport.channel import Channel
from ..collectives.transport.operation import Operation, check_timeout
from ..compressors import Compressor
from .consolidate import Saves


class Peers:
    """The ranks of a group, found on first use, and once for each default process group of torch.

    timeout   seconds or a timedelta for one exchange; by default that of the group.
    """

    def __init__(self, group: Group, timeout: float | timedelta | None) -> None:
        check_kind(group)
        self.group, self.timeout = group, timeout
        self._saves = Saves()
        self.timeout_seconds = check_timeout(timeout)
        self._channels: dict[torch.device, tuple[object, list[Channel]]] = {}
        self._place: tuple[object, int, int, int] | None = None

    @property
    def rank(self) -> int:
        return self._placed()[1]

    @property
    def world_size(self) -> int:
        return self._placed()[2]

    @property
    def nodes(self) -> int:
        """Return the number of compressed payloads in a sum: one for each rank, or with two groups for each node."""
        return self._placed()[3]

    @property
    def are_known(self) -> bool:
        return is_ready(self.group)

    def _placed(self) -> tuple[object, int, int, int]:
        world = _default_group()
        if self._place is None or self._place[0] is not world:
            self._place = world, *place(self.group), compressing_ranks(self.group)
        return self._place

    def channels(self, device: torch.device) -> list[Channel]:
        world, found = _default_group(), self._channels.get(device)
        if found is None or found[0] is not world:
            found = self._channels[device] = world, channels(self.group, device)
            self._saves.number(found[1])
        return found[1]

    def note_save(self, steps: int) -> None:
        """Note on the board of the group that this rank has saved its state."""
        if self._channels:
            self._saves.note(next(iter(self._channels.values()))[1], steps)

    def check_saves(self) -> None:
        """Warn at the end of a step if rank 0 alone has saved its state in the step before."""
        if self._saves.are_noted:
            self._saves.check()

    def operations(self, device: torch.device) -> list[Operation]:
        """Number the next operation on each channel; all ranks do so in the same order."""
        made = [Operation(channel) for channel in self.channels(device)]
        for operation in made:
            operation.limit(self.timeout_seconds)
        return made

    def average(self, tensors: Iterable[Tensor], compressor: Compressor) -> list[Handle]:
        """Average tensors over ranks, in place and without residuals; sums have the same compressor."""
        handles = [
            all_reduce_compressed(
                each, compressor, op=dist.ReduceOp.AVG, group=self.group, async_op=True, timeout=self.timeout,
                shard_compressor=compressor,
            )
            for each in tensors
        ]  # fmt: skip
        for handle in handles:
            handle.wait()
        return handles

    def mean_of(self, tensor: Tensor) -> Tensor:
        """Return the average of a tensor over ranks, sent dense; its bytes are not counted."""
        mean = tensor.clone()
        all_reduce_compressed(mean, "none", op=dist.ReduceOp.AVG, group=self.group, timeout=self.timeout)
        return mean


def _default_group() -> object:
    return dist.group.WORLD if dist.is_initialized() else None
