"""The interface of an update rule: what a rank sends in place of its gradient, and how averages move the weights.

A parameter group has a rule, and so has each family of its parameters. `base.CompressedOptimizer` does everything else:
exchange, warm-up, skipped steps, small tensors, checkpoints. `sgd.py` is the shortest rule; docs/design.md, "Add an
update rule", says how to write one.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.updates import Update
from ..sync.buckets import Slice
from ..sync.step import Step
from .families import Family, Parameters
from .families import sent_rate as sent_rate


class StepNumbers(NamedTuple):
    """The numbers by which a step changes the weights: floats, or tensors in GPU memory for a recorded step."""

    steps: Sequence[Any]  # taken by each family, with this one
    lr: Sequence[Any]  # of each family
    keep: Sequence[Any]  # factor of the weights of each family, 1 - lr * weight_decay
    rates: Mapping[str, Any]  # `Rule.rate` of each parameter


class Piece(NamedTuple):
    """Some parameters of one family, an average for each of them, and the numbers of their step."""

    group: dict[str, Any]
    steps: Any
    lr: Any
    keep: Any
    names: list[str]
    parameters: list[Tensor]
    tensors: list[Tensor]  # averaged gradients, in the dtype of the moments, or averaged updates
    rates: list[Any]


class Rule:
    """One way to make updates from gradients. A rule defines the first five methods, and the others if it needs them.

    All ranks make the same calls.

    moments         names of the vectors kept for every parameter, as in torch.
    local_moments   those of them that differ between ranks.
    settings        the settings that torch's optimizer of the same name has, the first of which no other has; empty if
                    torch has none of this name.
    takes_joined    whether its update takes a gradient that lies in several tensors.
    by_numbers      for a device, the kernels that read the numbers of an update from its memory, or None.
    """

    moments: tuple[str, ...] = ()
    local_moments: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    takes_joined = False
    by_numbers: Callable[[torch.device], ModuleType | None] = staticmethod(lambda device: None)
    parameters: Parameters  # set by the optimizer, with the numbers of the groups that have this rule
    groups: Collection[int]

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError for a setting of a parameter group that cannot be."""

    @abstractmethod
    def numbers(self, family: Family, group: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers of a family's update at the step that begins; `update` gets them."""

    @abstractmethod
    def update(self, slice_: Slice, moments: Sequence[Tensor], factor: float, **numbers: Any) -> Update:
        """Return the update of a slice of a bucket, with the factor of its gradient.

        An update is not finite where its gradient is not, which is how other ranks learn of it.
        """

    @abstractmethod
    def step_by_gradients(self, piece: Piece) -> None:
        """Take the step of torch's optimizer, in place."""

    @abstractmethod
    def step_by_updates(self, piece: Piece) -> None:
        """Apply the averaged updates, and everything else that a step does to a parameter."""

    def rate(self, group: Mapping[str, Any], name: str) -> float:
        """Return the factor of a parameter's averaged update, which has `sent_rate` in it."""
        return float(group["reference_lr"])

    def to_updates(self, names: Collection[str]) -> None:
        """Convert the moments of parameters that are sent as updates from now on."""

    def to_torch(self, name: str, moments: dict[str, Tensor]) -> None:
        """Convert averaged moments of a parameter that is sent as updates to those of torch's optimizer, in place."""

    # What is kept besides moments, and done between steps.

    def begin(self, absent: Collection[str]) -> frozenset[str]:
        """Prepare a step without the absent parameters; return the names of those whose gradients it samples."""
        return frozenset()

    def finish(self, step: Step) -> None:
        """Finish a step that was taken and counted."""

    def forget(self, names: Collection[str]) -> None:
        """Drop everything kept of parameters that are sent as gradients from now on."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def parsed(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a saved state, and return a function that takes it over; raise DamagedError if it cannot be."""
        return lambda: None

    def begin_from_torch(self, steps: Mapping[str, int]) -> None:
        """Begin anew with moments of torch's optimizer, where each parameter has taken so many steps."""
        if not self.parameters.warms_up(0):
            self.to_updates(self.parameters.sent_as_updates(0, self.groups))
