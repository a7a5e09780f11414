"""States of `LocalSteps`: of a rank in the middle of a round, and what all ranks have in common when one ends."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..sync import checkpoint
from ..sync.synchronizer import Synchronizer
from .fragments import Fragment, Part

_OPTIONS = ("every", "delay", "outer_lr", "outer_momentum", "nesterov", "decay")
_KEYS = {"common", "outer", "weights", "under_way", "local_steps", "exchanged_at", "left_out", "setting"}


class LocalStepsState(Optimizer):
    """The part of `LocalSteps` that saves and loads its state."""

    sync: Synchronizer
    optimizers: list[Optimizer]
    fragments: list[Fragment]
    steps: int
    left_out: int
    _device: torch.device
    _round: Any
    _is_checked: bool
    _gathered: list[dict[str, Any]] | None

    @abstractmethod
    def _settle(self, current: Any) -> None:
        """Wait for an exchange that is under way, before the state is saved."""

    @abstractmethod
    def _resume(self, under_way: Mapping[str, Any]) -> None:
        """Go on with an exchange that was received when the state was saved."""

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: weights, inner optimizers, common weights and residual.

        Save that of every rank, at any step, or call `consolidate_state_dict` first. If no local step was taken since
        the last exchange, it can be loaded by another number of ranks. It has the weights in it, since they differ
        between ranks in the middle of a round: loading it sets them.
        """
        if self._gathered is not None:
            return checkpoint.consolidated(self._gathered, self.sync.rank)
        if self._round is not None:
            self._settle(self._round)
        if not self.steps and not self._is_checked:  # the program may have loaded weights since this was made
            for part in self._parts():
                part.take_common()
        inner = [optimizer.state_dict() for optimizer in self.optimizers]
        return {
            "state": [state["state"] for state in inner],
            "param_groups": [state["param_groups"] for state in inner],
            "thinwire": {
                **self.sync.state_dict(),
                "optimizer": "LocalSteps",
                "setting": self._setting,
                "local_steps": self.steps,
                "exchanged_at": [fragment.exchanged_at for fragment in self.fragments],
                "left_out": self.left_out,
                "common": self._by_name(lambda part: part.common),
                "outer": self._by_name(lambda part: part.momentum),
                "weights": None if self._is_common else self._by_name(Part.local),
                "under_way": self._under_way(),
            },
        }

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send the states of all ranks to rank `to`, whose next `state_dict()` then has all of them. All ranks call."""
        self._gathered = None
        self._gathered = self.sync.gather(self.state_dict(), to, self._device)

    @torch.no_grad()
    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Load the state of this rank, a consolidated state, or a list of the states of all ranks.

        Another number of ranks needs one of the last two, saved when a round had ended; each rank then goes on with the
        inner optimizer of one of them.

        strict   False: ranks whose states are missing may be left out. What they had not sent is lost, and a warning
                 names them.
        """
        states = checkpoint.as_list(state_dict)
        for state in states:
            if not isinstance(state, Mapping) or not isinstance(state.get("thinwire"), Mapping):
                raise ValueError("not a state of thinwire.LocalSteps: it has no key 'thinwire'")
            kind = state["thinwire"].get("optimizer")
            if kind != "LocalSteps":
                raise ValueError(f"a state of thinwire.{kind}, expected thinwire.LocalSteps")
            if lacking := _KEYS - state["thinwire"].keys():
                raise checkpoint.DamagedError(
                    f"{min(lacking)!r} is missing in a saved state: the checkpoint is damaged"
                )
        saved = [state["thinwire"] for state in states]
        choice = checkpoint.choose(saved, self.sync.rank, self.sync.world_size, strict=strict)
        checkpoint.check_same("setting", choice.alike["setting"], self._setting)
        if (choice.alike["weights"] is not None or choice.alike["under_way"]) and not choice.same_world:
            raise ValueError(
                f"a state of {choice.alike['world_size']} ranks in the middle of a round, here there are "
                f"{self.sync.world_size}: each rank has weights of its own there. Load it with as many ranks, or save "
                "when a round has ended, or after synchronize()"
            )
        tensors = {kind: self._checked(choice.alike, kind) for kind in ("common", "outer", "weights")}
        inner = next(state for state in states if state["thinwire"] is choice.alike)
        self.sync.load_state_dict(saved, choice=choice)  # checks everything before it changes anything
        for optimizer, state, groups in zip(self.optimizers, inner["state"], inner["param_groups"], strict=True):
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        for fragment, exchanged_at in zip(self.fragments, choice.alike["exchanged_at"], strict=True):
            fragment.exchanged_at = int(exchanged_at)
        for part in self._parts():
            part.load(tensors["common"], tensors["outer"])
            part.set_local(part.flat(tensors["weights"]) if tensors["weights"] else part.common)
        self.steps, self.left_out = int(choice.alike["local_steps"]), int(choice.alike["left_out"])
        self._gathered = self._round = None
        if under_way := choice.alike["under_way"]:
            self._resume(under_way)

    def common_state(self) -> dict[str, Any]:
        """Return what all ranks have in common, and a newcomer needs."""
        return {
            "common": self._by_name(lambda part: part.common),
            "outer": self._by_name(lambda part: part.momentum),
            "local_steps": self.steps,
            "rounds": self.sync.steps,
            "options": [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in self.param_groups],
        }

    @torch.no_grad()
    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Begin from the common weights of others, at their step and with their learning rate; the rest begins anew."""
        for fragment in self.fragments:
            fragment.exchanged_at = int(state["local_steps"])
        common, momentum = (self._checked(state, kind) for kind in ("common", "outer"))
        for part in self._parts():
            part.load(common, momentum)
            part.set_local(part.common)
        self.steps, self.sync.stats.steps = int(state["local_steps"]), int(state["rounds"])
        for group, options in zip(self.param_groups, state["options"], strict=True):
            group.update(options)

    def _parts(self) -> Iterator[Part]:
        for fragment in self.fragments:
            yield from fragment.parts

    @property
    def _setting(self) -> dict[str, Any]:
        """Return the options by which a saved state and this optimizer must agree."""
        return {name: getattr(self, name) for name in _OPTIONS} | {"fragments": len(self.fragments)}

    @property
    def _is_common(self) -> bool:
        """Return whether the weights of this rank are the common ones."""
        return self._round is None and all(fragment.exchanged_at == self.steps for fragment in self.fragments)

    def _by_name(self, flat: Any) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for part in self._parts():
            if (found := flat(part)) is not None:
                made |= part.named(found)
        return made

    def _under_way(self) -> dict[str, Any] | None:
        """Return an exchange that was received and is not applied yet."""
        current = self._round
        if current is None:
            return None
        before: dict[str, Tensor] = {}
        means: dict[str, Tensor] = {}
        for part, bucket in zip(current.fragment.parts, current.buckets, strict=True):
            assert part.before is not None
            before |= part.named(part.before)
            means |= part.named(bucket.tensor)
        return {
            "fragment": self.fragments.index(current.fragment),
            "since": current.since,
            "due": current.due,
            "before": before,
            "means": means,
            "is_void": current.is_void,
        }

    def _checked(self, state: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
        """Return the tensors of a kind in a state; raise ValueError if they are those of another model."""
        found = state[kind] or {}
        for name, here in self._by_name(lambda part: part.common).items():
            there = found.get(name)
            if there is None and kind != "common":
                continue
            if not isinstance(there, Tensor) or there.numel() != here.numel():
                size = there.numel() if isinstance(there, Tensor) else "no"
                raise ValueError(
                    f"the state is of another model: parameter {name!r} has {size} elements there, and "
                    f"{here.numel()} here"
                )
        return dict(found)
