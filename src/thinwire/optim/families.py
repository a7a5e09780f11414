"""The parameters of an optimizer: their families, their moments, and how each is sent at a step.

A family is the parameters of one parameter group that have taken part in the same steps. Adam's bias corrections depend
on how many steps a parameter has taken, so if one of a group is frozen or unfrozen, the group is split. Families are
never compressed together.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..sync.buckets import shaped
from ..sync.checkpoint import DamagedError
from ..sync.policy import Way
from ..sync.residuals import NamedVectors
from ..sync.step import Step
from ..sync.synchronizer import Synchronizer


@dataclass(eq=False)
class Family:
    """The steps that the parameters of a family have taken."""

    group: int
    steps: int = 0
    weights: tuple[float, float] = (0.0, 0.0)
    """Sums of the weights of gradients and of squares in moments; with constant betas these are 1 - beta ** steps."""


class Families:
    """The families of an optimizer; at first, one for each parameter group.

    >>> families = Families([["a", "b"], ["c"]])
    >>> families.split({"b", "c"})
    >>> families.number_of, [family.group for family in families.all]
    ({'a': 0, 'b': 2, 'c': 1}, [0, 1, 0])
    """

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        self.number_of = {name: number for number, names in enumerate(groups) for name in names}
        """The number of each parameter's family, by name. This dict changes in place."""
        self.all = [Family(number) for number in range(len(groups))]
        self.present = list(self.all)  # in the step under way
        self._groups = dict(self.number_of)
        self._absent: Collection[str] | None = None
        """The parameters that `present` leaves out; None if it was not computed from any."""

    def of(self, name: str) -> Family:
        return self.all[self.number_of[name]]

    def leave_out(self, absent: Collection[str]) -> None:
        """Let the step that begins leave these parameters out, mostly the same as in the step before."""
        if absent != self._absent:
            self.split(absent)
            numbers = {number for name, number in self.number_of.items() if name not in absent}
            self.present, self._absent = [self.all[number] for number in sorted(numbers)], absent

    def split(self, chosen: Collection[str]) -> None:
        """Give the chosen parameters families of their own, unless all parameters of a family are chosen."""
        sizes = Counter(self.number_of.values())
        inside: dict[int, list[str]] = {}
        for name in (name for name in self.number_of if name in chosen):
            inside.setdefault(self.number_of[name], []).append(name)
        for number, names in inside.items():
            if len(names) < sizes[number]:
                self.number_of.update(dict.fromkeys(names, len(self.all)))
                self.all.append(replace(self.all[number]))

    def reset(self, steps: Mapping[str, int]) -> None:
        """Begin anew, with the number of steps that each parameter has taken; 0 if it is missing."""
        kind_of = {name: (group, steps.get(name, 0)) for name, group in self._groups.items()}
        first = dict(reversed(kind_of.values()))  # by group
        kinds = list(dict.fromkeys([*sorted(first.items()), *kind_of.values()]))
        self.all, self._absent = [Family(group, count) for group, count in kinds], None
        self.number_of.update({name: kinds.index(kind) for name, kind in kind_of.items()})

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": [family.weights for family in self.all],
            "families": [[family.group, family.steps] for family in self.all],
            "family_of": {name: number for name, number in self.number_of.items() if number != self._groups[name]},
        }

    def parsed(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check the families of a checkpoint, and return a function that takes them over; raise DamagedError."""
        weights = [(float(first), float(second)) for first, second in state["weights"]]
        families, number_of = state["families"], {**self._groups, **state["family_of"]}
        if len(families) != len(weights) or number_of.keys() != self._groups.keys():
            raise DamagedError("families of a saved state do not fit its weights: the checkpoint is damaged")
        pairs = zip(families, weights, strict=True)
        made = [Family(int(group), int(count), weight) for (group, count), weight in pairs]
        if not all(0 <= family.steps < 2**63 and all(0 <= each <= 1 for each in family.weights) for family in made):
            raise DamagedError("numbers of steps that no training has in a saved state: the checkpoint is damaged")
        for name, number in number_of.items():
            if number not in range(len(made)) or made[number].group != self._groups[name]:
                raise DamagedError(f"{name!r} has no family in a saved state: the checkpoint is damaged")

        def take() -> None:
            self.all, self._absent = made, None
            self.number_of.update(number_of)

        return take


class MomentVectors(NamedVectors):
    """The moments of one kind, for the parameters whose rule keeps them; empty for all others."""

    def __init__(self, names: Collection[str], parts: Mapping[str, Tensor]) -> None:
        super().__init__(parts)
        self._names = names

    def slice(self, names: Sequence[str | None], *args: Any, **others: Any) -> Tensor:
        # A slice is of one family, and begins with a parameter.
        return super().slice(names, *args, **others) if names[0] in self._names else torch.empty(0)


class Parameters:
    """The parameters of an optimizer, by name in the order of its groups.

    given     as the user gave them.
    tensors   plain tensors in the same memory: of a sharded parameter, the shard of this rank.
    kinds     the moments that each parameter group keeps.
    """

    def __init__(
        self, optimizer: Optimizer, sync: Synchronizer, families: Families, *,
        given: Mapping[str, Tensor], tensors: Mapping[str, Tensor], kinds: Sequence[Sequence[str]],
    ) -> None:  # fmt: skip
        self._optimizer = weakref.ref(optimizer)  # whose `param_groups` torch replaces when it loads a state
        self.sync, self.families, self.given, self.tensors = sync, families, given, tensors
        own = {name: kinds[families.of(name).group] for name in given}
        self._names = {kind: {name for name in given if kind in own[name]} for each in kinds for kind in each}
        self._sent_as_gradients: dict[Way, set[str]] = {}
        self.load_moments({})

    @property
    def groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer.param_groups

    def group_of(self, name: str) -> dict[str, Any]:
        return self.groups[self.families.of(name).group]

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def load_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.vectors = {kind: MomentVectors(names, moments.get(kind, {})) for kind, names in self._names.items()}

    def moments_of(self, name: str) -> dict[str, Tensor]:
        """Return the moments that a parameter has so far, flat, by kind."""
        return {kind: vectors[name] for kind, vectors in self.vectors.items() if name in vectors}

    def moments(self, kind: str, names: Sequence[str]) -> list[Tensor]:
        """Return one moment of several parameters, in their shapes; it is zero until its first use."""
        vectors, found = self.vectors[kind], []
        for name in names:
            like = self.tensors[name]
            if name not in vectors:
                vectors.slice([name], sizes=[like.numel()], dtype=like.dtype, device=like.device)
            found.append(shaped(vectors[name], like))
        return found

    def warms_up(self, step: int) -> bool:
        """Return whether a step is that of torch's optimizer: in the warm-up until it is sparse, and in some trials."""
        return self.sync.way(step).by_gradients

    def sent_as_updates(self, step: int, groups: Collection[int] | None = None) -> list[str]:
        """Return the names of parameters, of these groups or all, whose updates are sent at a step."""
        if self.warms_up(step):
            return []
        by_gradient = self.sent_as_gradients(step)
        found = [name for name in self.given if name not in by_gradient]
        return found if groups is None else [name for name in found if self.families.of(name).group in groups]

    def sent_as_gradients(self, step: int) -> set[str]:
        """Return the names of parameters whose gradients are sent, beside updates of others."""
        way = self.sync.way(step)
        if way not in self._sent_as_gradients:
            found = {name for name, p in self.given.items() if way.sends_gradient(name, p.numel())}
            self._sent_as_gradients[way] = found
        return self._sent_as_gradients[way]

    def follow_weights(self, step: Step, own: Collection[int], warmup: int, *, freezes: bool) -> None:
        """Follow the weights of gradients in moments through a step; `freezes`: not in second moments of updates."""
        by_updates = not step.warms_up and self.sent_as_updates(step.number, own)
        for family in (family for family in self.families.present if family.group in own):
            as_update = by_updates and family.steps > warmup  # this step is counted
            beta1, beta2 = self.groups[family.group]["compressed_betas" if as_update else "betas"]
            first, second = family.weights
            first, changed = beta1 * first + 1 - beta1, beta2 * second + 1 - beta2
            family.weights = first, second if as_update and freezes else changed

    def choose_dense(self, warmup: int, groups: Collection[int]) -> Collection[str]:
        """Let parameters that were unfrozen be sent dense in their own warm-up; return those that have ended it."""
        sync, before = self.sync, self.sync.dense
        early = [family for family in self.families.all if family.steps < warmup and family.group in groups]
        sync.dense = frozenset()
        if self.warms_up(sync.steps):
            return ()
        if early:
            of, is_small, given = self.families.of, sync.policy.is_small, self.given.items()
            sync.dense = frozenset(name for name, p in given if of(name) in early and not is_small(name, p.numel()))
        return before - sync.dense


def sent_rate(group: Mapping[str, Any]) -> float:
    """Return the factor of updates that are sent. With it, what is not sent keeps the lr of its own step."""
    return float(group["lr"]) / float(group["reference_lr"])
