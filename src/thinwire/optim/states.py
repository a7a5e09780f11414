"""States of the optimizers: saved as torch does, consolidated, and loaded from thinwire's or torch's optimizer."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives import all_reduce_compressed
from ..integrations.fsdp import ShardedParameters
from ..kernels.layout import residual_dtype
from ..sync import checkpoint
from ..sync.buckets import shaped
from ..sync.residuals import NamedVectors
from ..sync.shards import local_of
from ..sync.synchronizer import Synchronizer
from .checks import check_groups
from .torch_states import groups_for_torch, groups_from_torch, is_from_torch


class StatefulOptimizer(Optimizer):
    """The part of `CompressedOptimizer` that saves and loads its state."""

    moments: tuple[str, ...]
    """Names of the vectors kept for every parameter, as in torch; the local ones come first."""
    local_moments: tuple[str, ...]
    """Names of the moments that differ between ranks."""

    sync: Synchronizer
    _count: int
    _given: Mapping[str, nn.Parameter]
    _parameters: Mapping[str, Tensor]
    _sharded: ShardedParameters | None
    _vectors: dict[str, NamedVectors]
    _gathered: list[dict[str, Any]] | None

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) pairs, group by group."""
        for group in self.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    # Defined by subclasses.

    @abstractmethod
    def _warms_up(self, step: int) -> bool:
        """Return whether a step is that of torch's optimizer."""

    @abstractmethod
    def _sent_as_updates(self, step: int) -> list[str]:
        """Return the names of parameters whose updates are sent at a step."""

    def _to_updates(self, names: Collection[str]) -> None:
        """Convert the moments of parameters that are sent as updates from now on."""

    def _to_torch(self, name: str, moments: dict[str, Tensor]) -> None:
        """Convert averaged moments of a parameter that is sent as updates to those of torch's optimizer, in place."""

    def _begin_from_torch(self, steps: Mapping[str, int]) -> None:
        """Prepare for the first step after the moments of torch's optimizer were loaded.

        steps   the number of steps that each parameter has taken.
        """

    def _steps_of(self, name: str) -> int:
        """Return the number of steps that a parameter has taken."""
        return self._count

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, as torch does, with the synchronizer's state under "thinwire".

        Every rank saves its own state. After `consolidate_state_dict`, and until the next step, that of its rank has
        the states of all ranks inside.
        """
        if self._gathered is not None:
            complete = checkpoint.consolidated(self._gathered, self.sync.rank)
            return {**complete, "param_groups": super().state_dict()["param_groups"]}  # a scheduler may have stepped
        self._fill_state()
        packed = super().state_dict()
        self.state.clear()  # otherwise it would keep vectors that have moved
        return {**packed, "thinwire": {**self.sync.state_dict(), **self._own_state()}}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send the states of all ranks to rank `to`, whose next `state_dict()` then has all of them, in CPU memory.

        All ranks call this. It holds until the next step, and the other ranks' `state_dict()` is their own as before.
        `load_state_dict` takes what was saved so on every rank, with any number of ranks. This is the name that
        torch's ZeroRedundancyOptimizer has for it.
        """
        if self._sharded is not None:
            raise ValueError(
                "one rank cannot hold the states of all shards: save thinwire.per_rank(optimizer) by "
                "torch.distributed.checkpoint, on all ranks"
            )
        self._gathered = None
        device = next(p.device for _, p in self.named_parameters())
        self._gathered = self.sync.gather(self.state_dict(), to, device)

    def torch_state_dict(self) -> dict[str, Any]:
        """Return a state for torch's optimizer of the same name, the same on all ranks. All ranks call this.

        Moments that differ between ranks are averaged, dense, and in the unit of torch's. What is left out: residuals,
        the part of the updates that was not sent so far; and what thinwire's own `state_dict()` has besides.
        """
        numbers = {name: number for number, (name, _) in enumerate(self.named_parameters())}
        apart = set(self._sent_as_updates(self.sync.steps))
        state: dict[int, dict[str, Tensor]] = {}
        for name in self._parameters:
            moments = {kind: v[name].clone() for kind, v in self._vectors.items() if name in v}
            if not moments:
                continue
            if name in apart:
                for moment in moments.values():
                    all_reduce_compressed(
                        moment, "none", op=dist.ReduceOp.AVG, group=self.sync.group, timeout=self.sync.timeout
                    )
                self._to_torch(name, moments)
            shapes = {kind: shaped(moment, self._parameters[name]) for kind, moment in moments.items()}
            if self.sync.shards is not None:
                shapes = {kind: self.sync.shards.distributed(name, moment) for kind, moment in shapes.items()}
            state[numbers[name]] = {"step": torch.tensor(float(self._steps_of(name))), **shapes}
        return {"state": state, "param_groups": groups_for_torch(self.param_groups, type(self).__name__)}

    def _load_torch_state(self, state_dict: Mapping[str, Any]) -> None:
        """Begin with the moments and settings of a state of torch's optimizer."""
        groups = groups_from_torch(state_dict, self.param_groups, type(self).__name__)
        loaded = {kind: self._vectors_in(state_dict, kind) for kind in self.moments}
        numbers = [number for group in groups for number in group["params"]]
        kept = {name: state_dict["state"].get(number, {}) for name, number in zip(self._given, numbers, strict=True)}
        steps = {name: int(moments["step"]) for name, moments in kept.items() if "step" in moments}
        self.sync.reset()
        super().load_state_dict({"state": {}, "param_groups": groups})
        self._gathered, self._count = None, max(steps.values(), default=0)
        self._vectors = {kind: NamedVectors(vectors) for kind, vectors in loaded.items()}
        self._begin_from_torch(steps)
        if not self._warms_up(0):
            self._to_updates(self._sent_as_updates(0))

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Load the state of this rank, a consolidated state, or a list of the states of all ranks.

        Another number of ranks needs one of the last two. The state of torch's optimizer of the same name, for the same
        parameters in the same order, is taken too: training goes on with its moments, and with the warm-up.

        strict   False: ranks whose states are missing may be left out. Their residuals and momenta are lost, and a
                 warning names them.
        """
        if isinstance(state_dict, Mapping) and is_from_torch(state_dict):
            self._load_torch_state(state_dict)
            return
        states = checkpoint.as_list(state_dict)
        for state in states:
            if not isinstance(state, Mapping) or "thinwire" not in state or "param_groups" not in state:
                raise ValueError(f"not a state of thinwire.{type(self).__name__}: it has no key 'thinwire'")
        sync_states = [state["thinwire"] for state in states]
        choice = checkpoint.choose(sync_states, self.sync.rank, self.sync.world_size, strict=strict)
        by_rank = {int(state["thinwire"]["rank"]): state for state in states}
        alike = by_rank[int(choice.alike["rank"])]
        if alike["thinwire"].get("optimizer") != type(self).__name__:
            raise ValueError(
                f"state of thinwire.{alike['thinwire'].get('optimizer')}, expected thinwire.{type(self).__name__}"
            )
        check_groups([group["param_names"] for group in alike["param_groups"]], self.param_groups)
        taken = [by_rank[int(state["rank"])] for state in choice.taken]
        apart = self._local_names(choice.alike) if choice.alike["steps"] else []
        loaded: dict[str, NamedVectors] = {}
        for kind in self.moments:
            vectors = self._vectors_in(alike, kind)
            if kind in self.local_moments:
                local = checkpoint.merge(choice, [self._vectors_in(state, kind) for state in taken])
                for name in apart:  # a frozen parameter has none
                    if name in local:
                        vectors[name] = local[name]
                    elif name in vectors:
                        vectors[name] = torch.zeros_like(vectors[name])
            loaded[kind] = NamedVectors(vectors)
        try:
            take_own_state = self._parse_own_state(alike["thinwire"], loaded)
        except checkpoint.DamagedError:
            raise
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise checkpoint.DamagedError(f"{error!r} in a saved state: the checkpoint is damaged") from error
        self.sync.load_state_dict(sync_states, choice=choice)  # checks everything before it changes anything
        super().load_state_dict({"state": {}, "param_groups": alike["param_groups"]})
        self._vectors, self._gathered = loaded, None
        take_own_state()

    def _local_names(self, state: Mapping[str, Any]) -> list[str]:
        """Return the parameters whose momentum differs between ranks in a checkpoint: those sent as updates.

        Older checkpoints have no list of them, unless the compressor was chosen by measurement.
        """
        return list(state["local"]) if "local" in state else self._sent_as_updates(int(state["steps"]) - 1)

    def _own_state(self) -> dict[str, Any]:
        last = self._sent_as_updates(self.sync.steps - 1) if self.sync.steps else []
        after = set(self._sent_as_updates(self.sync.steps))
        local = [name for name in last if name in after]
        return {"optimizer": type(self).__name__, "count": self._count, "local": local}

    def _parse_own_state(self, state: Mapping[str, Any], loaded: Mapping[str, NamedVectors]) -> Callable[[], None]:
        """Check what was saved beside the moments, `loaded`, and return a function that takes it over."""
        count = int(state["count"])

        def take() -> None:
            self._count = count

        return take

    def _fill_state(self) -> None:
        """Fill `state` as torch does: with views of the vectors, in the shapes of the parameters."""
        for name, parameter in self.named_parameters():
            like = self._parameters[name]
            kept = {kind: shaped(vectors[name], like) for kind, vectors in self._vectors.items() if name in vectors}
            if kept:
                self.state[parameter] = {"step": torch.tensor(float(self._steps_of(name))), **kept}

    def _vectors_in(self, state: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
        """Return a moment in a saved state by name: flat, on the parameter's device and in the order of its memory."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        made = {}
        for number, (name, parameter) in zip(numbers, self._parameters.items(), strict=True):
            kept = state["state"].get(number, {}).get(kind)
            if kept is not None:
                kept = local_of(kept)
                if not isinstance(kept, Tensor) or kept.shape != parameter.shape:
                    found = list(kept.shape) if isinstance(kept, Tensor) else type(kept).__name__
                    raise ValueError(
                        f"{kind} of parameter {name!r} is {found} in the state, expected {list(parameter.shape)}: it "
                        "belongs to another model, or its parameters came in another order"
                    )
                made[name] = torch.empty(
                    parameter.numel(), dtype=residual_dtype(parameter.dtype), device=parameter.device
                )
                shaped(made[name], parameter).copy_(kept)
        return made
