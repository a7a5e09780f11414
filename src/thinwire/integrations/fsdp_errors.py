"""Names the rank that was lost when a collective of FSDP itself fails.

gloo's own error does not say whose connection was closed. So the all-gathers and reduce-scatters of a sharded model are
called through `NamedCollective`, which after an error looks for the rank whose connection to thinwire was closed, too.
"""

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from ..sync.synchronizer import Synchronizer

_COLLECTIVES = ("_all_gather_comm", "_reduce_scatter_comm")
"""Attributes of a parameter group of FSDP that `set_custom_all_gather` sets. Older torch has none: its errors stay."""


class NamedCollective:
    """A collective of FSDP, whose errors name the rank that was lost."""

    def __init__(self, collective: Any, sync: Synchronizer) -> None:
        self.collective, self.sync = collective, weakref.ref(sync)

    def allocate(self, *args: Any, **options: Any) -> Tensor:
        """Allocate memory for the collective, as FSDP asks for it."""
        tensor: Tensor = self.collective.allocate(*args, **options)
        return tensor

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run the collective. If it fails, report the lost rank to all ranks that this one exchanges with."""
        try:
            return self.collective(*args, **options)
        except RuntimeError as error:
            sync = self.sync()
            if sync is None or sync.shards is None:
                raise
            with sync.reporting(sync.shards.device):
                raise sync.shards.explain(error) from error


def name_lost_ranks(parameters: Iterable[Tensor], sync: Synchronizer) -> None:
    """Let the collectives of these parameters raise errors with the rank that was lost, over gloo.

    All ranks of a replica call this: it connects them. NCCL does not raise such errors, but ends the process.
    """
    assert sync.shards is not None
    if sync.shards.size == 1 or not sync.shards.connect():
        return
    for group in _parameter_groups(parameters):
        for name in _COLLECTIVES:
            collective = getattr(group, name, None)
            if isinstance(collective, NamedCollective):
                collective = collective.collective  # of an optimizer before this one
            if collective is not None:
                setattr(group, name, NamedCollective(collective, sync))


def _parameter_groups(parameters: Iterable[Tensor]) -> Iterator[Any]:
    """Yield what FSDP gathers and reduces together; a parameter does not refer to it, so this looks at all models."""
    fsdp: Any = sys.modules["torch.distributed.fsdp"]
    wanted = {id(parameter) for parameter in parameters}
    classes: list[type] = [fsdp.FSDPModule]
    for each in classes:
        classes += each.__subclasses__()
    for module in gc.get_referrers(*classes):
        if issubclass(type(module), fsdp.FSDPModule) and not wanted.isdisjoint(map(id, module.parameters())):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            yield from (group for group in groups if group is not None)
