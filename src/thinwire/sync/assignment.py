"""The compressor of each parameter at each step, the same on all ranks; `Auto` in trials.py measures which."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from ..compressors import Compressor, NoCompression
from .auto import Choice
from .buckets import BucketPlan, Together, plan_bucket
from .peers import Peers
from .policy import DENSE, Policy


class Assignment:
    """Assigns the compressors of the policy. With `families`, by parameter, it is that of an optimizer."""

    choice: Choice | None = None

    def __init__(self, policy: Policy, families: Mapping[str, int] | None) -> None:
        self.policy, self._families = policy, families
        self.sizes: Mapping[str, int] = {}  # numels of known parameters, over all shards
        self.dense: frozenset[str] = frozenset()
        self._chosen: Compressor | None = None  # in place of the policy's final one in the current step
        self._plans: dict[Hashable, BucketPlan] = {}

    def begin(self, peers: Peers, step: int, device: torch.device) -> None:
        """Choose the compressor of the step that begins; the base class does nothing."""

    def plan(self, bucket: Together, step: int, mode: Hashable) -> BucketPlan:
        """Return how a bucket is cut into slices and packed parameters; with another mode, slices are other objects."""
        policy = self.policy
        families = tuple(None if self._families is None else self._families[name] for name in bucket.names)
        key = bucket.names, families, policy.phase(step), mode, self.dense
        made = self._plans.get(key)
        if made is None:
            # A policy goes by the size of the whole parameter, so that it is the same for all shards.
            sized = [(name, self.sizes.get(name, size)) for name, size in zip(bucket.names, bucket.sizes, strict=True)]
            compressors = [self._compressor_of(name, size, step, self._chosen) for name, size in sized]
            small = {
                name
                for (name, size), given in zip(sized, compressors, strict=True)
                if policy.is_small(name, size) and (self._families is not None or given != policy.final)
            }
            made = self._plans[key] = plan_bucket(
                bucket.names, sizes=bucket.sizes, compressors=compressors, families=families, small=small
            )
        return made

    def is_dense(self, step: int) -> bool:
        return self.policy.is_dense(step, self._chosen)

    def sends_dense(self, name: str, numel: int, step: int) -> bool:
        return isinstance(self._compressor_of(name, numel, step, self._chosen_at(step)), NoCompression)

    def _compressor_of(self, name: str, numel: int, step: int, chosen: Compressor | None) -> Compressor:
        if name in self.dense:
            return DENSE
        return self.policy.compressor_of(name, numel=numel, step=step, chosen=chosen)

    def tries_gradients(self, step: int) -> bool:
        """Return whether this step is a trial in which an optimizer sends gradients instead of updates."""
        return False

    def choose_if_due(self, peers: Peers, step: int, device: torch.device) -> None:
        """Make the choice if the trials are over; the base class does nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, same_world: bool) -> None:
        self._plans = {}

    def _chosen_at(self, step: int) -> Compressor | None:
        return self._chosen

    def _choose(self, chosen: Compressor | None) -> None:
        if chosen != self._chosen:
            self._chosen, self._plans = chosen, {}
