"""The compressor of each parameter at each step.

    Assignment   follows the policy
    Adaptive     redistributes the bytes of a top-k every few steps, by the size of the residuals
    Auto         tries each compressor, then uses the fastest one for each bucket

All ranks make the same assignment: measurements that differ between ranks are averaged before they are used.
"""

import logging
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..compressors import Compressor, NoCompression, TopK
from .auto import Choice
from .buckets import BucketPlan, Together, plan_bucket
from .parts import StepRecord
from .policy import DENSE, Policy, share_bytes
from .ranks import Ranks
from .trials import Trials

_log = logging.getLogger("thinwire")


class Assignment:
    """Assigns the compressors of the policy.

    families   the number of each parameter's family, for optimizers; None otherwise.
    """

    choice: Choice | None = None
    """The choice made by measurement, and its reason; None before it is made, and without "auto"."""

    def __init__(self, policy: Policy, families: Mapping[str, int] | None) -> None:
        self.policy, self._families = policy, families
        self.sizes: Mapping[str, int] = {}
        """Number of elements of each known parameter, by name; of a sharded model, over all shards."""
        self.dense: frozenset[str] = frozenset()
        """Parameters that are sent dense at the current step, whatever the policy says."""
        self._chosen: Mapping[str, Compressor] = {}
        """Compressors that replace the policy's in the current step, by parameter."""
        self._plans: dict[Hashable, BucketPlan] = {}

    def begin(self, sync: Ranks, step: int, device: torch.device) -> bool:
        """Choose the compressors of the step that begins.

        sync   the synchronizer, for its ranks and residuals.

        Returns True if this step must send all residuals dense, because some parameters stay dense from now on.
        """
        return False

    def ended(self, step: StepRecord) -> None:
        """Record a step that was taken; the base class does nothing."""

    def plan(self, bucket: Together, step: StepRecord) -> BucketPlan:
        """Return how a bucket is cut into slices and packed parameters at the current step."""
        policy = self.policy
        families = tuple(None if self._families is None else self._families[name] for name in bucket.names)
        key = bucket.names, families, policy.phase(step.number), step.mode, self.dense
        made = self._plans.get(key)
        if made is None:
            # A policy goes by the size of the whole parameter, so that it is the same for all shards.
            sized = [(name, self.sizes.get(name, size)) for name, size in zip(bucket.names, bucket.sizes, strict=True)]
            compressors = [self._compressor_of(name, size, step.number, self._chosen) for name, size in sized]
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
        """Return whether no parameter is compressed in the current step."""
        return self.policy.is_dense(step, self._chosen)

    def sends_dense(self, name: str, numel: int, step: int) -> bool:
        """Return whether this parameter is not compressed.

        step   the current step or the next one.
        """
        return isinstance(self._compressor_of(name, numel, step, self._chosen_at(step)), NoCompression)

    def _compressor_of(self, name: str, numel: int, step: int, chosen: Mapping[str, Compressor]) -> Compressor:
        if name in self.dense:
            return DENSE
        return self.policy.compressor_of(name, numel=numel, step=step, shared=chosen)

    def tries_gradients(self, step: int) -> bool:
        """Return whether this step is a trial in which an optimizer sends gradients instead of updates."""
        return False

    def choose_if_due(self, sync: Ranks, device: torch.device) -> None:
        """Make the choice if the trials are over; the base class does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"shared": {}}

    def load_state_dict(self, state: Mapping[str, Any], *, same_world: bool) -> None:
        """Load the state of a checkpoint.

        same_world   whether the checkpoint has the same world size.
        """
        self._plans = {}

    def _chosen_at(self, step: int) -> Mapping[str, Compressor]:
        return self._chosen

    def _choose(self, chosen: Mapping[str, Compressor]) -> None:
        if chosen is not self._chosen:
            self._chosen, self._plans = chosen, {}


class Adaptive(Assignment):
    """Redistributes the bytes of a top-k among the parameters every `adapt_every` steps.

    Parameters with larger residuals get a larger ratio, and others a smaller one.
    """

    def begin(self, sync: Ranks, step: int, device: torch.device) -> bool:
        """Redistribute the bytes if it is time; always return False."""
        after = step - self.policy.warmup_steps
        if after > 0 and after % self.policy.adapt_every == 0:
            self._share(sync)
        return False

    def _share(self, sync: Ranks) -> None:
        policy = self.policy
        sizes = {
            name: size
            for name, size in sorted(self.sizes.items())
            if not policy.is_excluded(name) and not policy.is_small(name, size) and policy.of_layer(name) is None
        }
        if not sizes:
            return
        residuals = sync.residuals
        nothing = torch.zeros(1, device=next(iter(residuals.values()), torch.zeros(())).device)
        energy = torch.stack([residuals.get(name, nothing).double().square().sum() for name in sizes])
        energy = sync.average_over_all(energy)
        self._choose(share_bytes(self._base, sizes, dict(zip(sizes, energy.tolist(), strict=True))))

    @property
    def _base(self) -> TopK:
        assert isinstance(self.policy.final, TopK)
        return self.policy.final

    def state_dict(self) -> dict[str, Any]:
        """Return the ratio of each parameter."""
        return {"shared": {name: str(made.ratio) for name, made in self._chosen.items() if isinstance(made, TopK)}}

    def load_state_dict(self, state: Mapping[str, Any], *, same_world: bool) -> None:
        """Load the ratios; start without them if the world size has changed."""
        shared = state["shared"] if same_world else {}
        self._choose({name: replace(self._base, ratio=ratio) for name, ratio in shared.items()})


class Auto(Assignment):
    """Assigns the compressors that `Trials` tries, and then its choice."""

    def __init__(self, policy: Policy, families: Mapping[str, int] | None, compressors: tuple[Compressor, ...]) -> None:
        super().__init__(policy, families)
        self._trials = Trials(compressors, policy.warmup_steps)
        self._flushed = False
        """True once no parameter that stays dense has a residual."""

    @property
    def choice(self) -> Choice | None:  # type: ignore[override]
        """Return the choice of the trials; None before it is made."""
        return self._trials.choice

    def begin(self, sync: Ranks, step: int, device: torch.device) -> bool:
        """Choose the compressors of this step, and return whether it sends all residuals dense."""
        trials, sizes = self._trials, self.sizes
        self.choose_if_due(sync, device)
        if device.type == "cuda" and trials.is_timed(step):  # or a step that skips the wait would seem quick
            torch.cuda.current_stream(device).synchronize()
        trials.begins(step)
        chosen: Mapping[str, Compressor] = trials.assigned(step, sizes)
        with_residual = [name for name in sizes if name in sync.unsent]
        flushes = False
        if trials.choice is not None and not self._flushed:
            flushes = any(self.sends_dense(name, sizes[name], step) for name in with_residual)
            self._flushed = not flushes
        if flushes:
            # Parameters with a residual get a compressor that uses it, though `flushes` sends them dense. The others
            # stay dense, such as those whose residual an optimizer has applied.
            chosen = {**chosen, **dict.fromkeys(with_residual, trials.compressors[1])}
            sync.unsent.fold()
        self._choose(chosen)
        return flushes

    def ended(self, step: StepRecord) -> None:
        """Record the times of a step that was taken."""
        self._trials.ended(step)

    def tries_gradients(self, step: int) -> bool:
        """Return whether this step tries a compressor that is not sparse, so that gradients are sent."""
        return self._trials.tries_gradients(step)

    def choose_if_due(self, sync: Ranks, device: torch.device) -> None:
        """Make the choice if the trials are over, from measurements averaged over ranks; rank 0 logs it.

        With one rank, dense is chosen without trials.
        """
        trials, layout = self._trials, sync.layout
        if trials.choice is not None:
            return
        if sync.world_size == 1:
            trials.choose_dense("nothing is compressed, because there is one rank")
        elif trials.is_due(sync.steps):
            numbers = torch.tensor(trials.numbers(layout), dtype=torch.float64)
            # A NaN, for a missing measurement, would void the exchange: 0 is sent, and the share of finite values.
            known = torch.stack([numbers.nan_to_num(), numbers.isfinite().double()]).to(device)
            total, share = sync.average_over_all(known).cpu()
            trials.decide(torch.where(share > 0.999, total, torch.nan).tolist(), layout)
        if trials.choice is not None and sync.rank == 0:
            _log.info("%s", trials.choice.describe())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trials."""
        return {"shared": {}, "auto": self._trials.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, same_world: bool) -> None:
        """Load the state of the trials; start them again if the world size has changed."""
        self._flushed, self._plans = False, {}
        self._trials.load_state_dict(state["auto"])
        if not same_world:  # links and payloads have changed
            self._trials.again(int(state["steps"]), list(state["entries"]))

    def _chosen_at(self, step: int) -> Mapping[str, Compressor]:
        return self._trials.assigned(step, self.sizes)
