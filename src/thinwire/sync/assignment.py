"""Which compressor each parameter has at each step: what the policy says, or what is chosen on the way.

    Assignment   what the policy says
    Adaptive     around it: the bytes of a top-k, shared anew every so often by what the parameters owe
    Auto         around it: what was measured to be quickest, for each bucket; before that, what is being tried

All ranks assign alike: what differs between them is averaged before anything is chosen by it.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..compressors import Compressor, NoCompression, TopK
from .auto import Choice
from .buckets import Bucket, BucketPlan, plan_bucket
from .parts import Mode, StepRecord
from .policy import DENSE, Policy, share_bytes
from .trials import Trials

_log = logging.getLogger("thinwire")


class Ranks(Protocol):
    """What is chosen by: this rank, the others, and what this one owes."""

    layout: list[tuple[str, ...]]

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def residuals(self) -> dict[str, Tensor]: ...

    def average(self, tensors: Iterable[Tensor], compressor: Compressor) -> None: ...

    def owes(self, name: str) -> bool: ...

    def fold_owners(self) -> None: ...


class Assignment:
    """As the policy says.

    families   for optimizers, the number of the parameter group of every parameter.
    """

    choice: Choice | None = None
    """What was chosen by measuring, and why."""

    def __init__(self, policy: Policy, families: Mapping[str, int] | None) -> None:
        self.policy, self._families = policy, families
        self.sizes: Mapping[str, int] = {}
        """Elements of every parameter, as far as they are known."""
        self._chosen: Mapping[str, Compressor] = {}
        """In place of the policy's compressor, by parameter, at the step under way."""
        self._plans: dict[tuple[tuple[str, ...], int, Mode], BucketPlan] = {}

    def begin(self, sync: Ranks, step: int, device: torch.device) -> bool:
        """Choose for the step that begins. Whether all that is owed is sent in it, since somebody goes dense for good.

        sync   the ranks, and what this one owes.
        """
        return False

    def ended(self, step: StepRecord) -> None:
        """A step was taken."""

    def plan(self, bucket: Bucket, step: StepRecord) -> BucketPlan:
        """Return how a bucket is cut at the step under way."""
        policy, key = self.policy, (bucket.names, self.policy.phase(step.number), step.mode)
        made = self._plans.get(key)
        if made is None:
            sized = list(zip(bucket.names, bucket.sizes, strict=True))
            compressors = [policy.compressor_of(name, size, step.number, self._chosen) for name, size in sized]
            families = [None if self._families is None else self._families[name] for name in bucket.names]
            small = {
                name
                for (name, size), given in zip(sized, compressors, strict=True)
                if policy.is_small(name, size) and (self._families is not None or given != policy.final)
            }
            made = self._plans[key] = plan_bucket(bucket.names, bucket.sizes, compressors, families, small)
        return made

    def is_dense(self, step: int) -> bool:
        """Whether nothing at all is compressed in the step under way."""
        return self.policy.is_dense(step, self._chosen)

    def sends_gradient(self, name: str, numel: int, step: int) -> bool:
        """Whether an optimizer's gradient is sent for this parameter, at the step under way or the next, though updates
        are for others."""
        return self.policy.is_small(name, numel) or self.sends_dense(name, numel, step)

    def sends_dense(self, name: str, numel: int, step: int) -> bool:
        """Whether this parameter is not compressed, at the step under way or the next."""
        return isinstance(self.policy.compressor_of(name, numel, step, self._chosen_at(step)), NoCompression)

    def tries_gradients(self, step: int) -> bool:
        """Whether something is tried at this step by which an optimizer sends gradients, not updates."""
        return False

    def choose_if_due(self, sync: Ranks, device: torch.device) -> None:
        """If trials are over, choose."""

    def state_dict(self) -> dict[str, Any]:
        return {"shared": {}}

    def load_state_dict(self, state: Mapping[str, Any], *, same_world: bool) -> None:
        self._plans = {}

    def _chosen_at(self, step: int) -> Mapping[str, Compressor]:
        return self._chosen

    def _choose(self, chosen: Mapping[str, Compressor]) -> None:
        if chosen is not self._chosen:
            self._chosen, self._plans = chosen, {}


class Adaptive(Assignment):
    """Every `adapt_every` steps, parameters that owe more get a larger ratio, and others a smaller one."""

    def begin(self, sync: Ranks, step: int, device: torch.device) -> bool:
        after = step - self.policy.warmup_steps
        if after > 0 and after % self.policy.adapt_every == 0:
            self._share(sync)
        return False

    def _share(self, sync: Ranks) -> None:
        sizes = {name: size for name, size in sorted(self.sizes.items()) if self.policy.adapts(name, size)}
        if not sizes:
            return
        residuals = sync.residuals
        nothing = torch.zeros(1, device=next(iter(residuals.values()), torch.zeros(())).device)
        owed = torch.stack([residuals.get(name, nothing).double().square().sum() for name in sizes])
        sync.average([owed], DENSE)
        self._choose(share_bytes(self._base, sizes, dict(zip(sizes, owed.tolist(), strict=True))))

    @property
    def _base(self) -> TopK:
        assert isinstance(self.policy.final, TopK)
        return self.policy.final

    def state_dict(self) -> dict[str, Any]:
        return {"shared": {name: str(made.ratio) for name, made in self._chosen.items() if isinstance(made, TopK)}}

    def load_state_dict(self, state: Mapping[str, Any], *, same_world: bool) -> None:
        shared = state["shared"] if same_world else {}
        self._choose({name: replace(self._base, ratio=ratio) for name, ratio in shared.items()})


class Auto(Assignment):
    """What `Trials` try, and then what they choose."""

    def __init__(self, policy: Policy, families: Mapping[str, int] | None, candidates: tuple[Compressor, ...]) -> None:
        super().__init__(policy, families)
        self._trials = Trials(candidates, policy.warmup_steps)
        self._flushed = False
        """Whether nothing is owed to what was left dense."""

    @property
    def choice(self) -> Choice | None:  # type: ignore[override]
        return self._trials.choice

    def begin(self, sync: Ranks, step: int, device: torch.device) -> bool:
        trials, sizes = self._trials, self.sizes
        self.choose_if_due(sync, device)
        if device.type == "cuda" and trials.is_timed(step):  # else who need not wait for the device would seem quick
            torch.cuda.current_stream(device).synchronize()
        trials.begins(step)
        chosen: Mapping[str, Compressor] = trials.assigned(step, sizes)
        owing = [name for name in sizes if sync.owes(name)]
        flushes = False
        if trials.choice is not None and not self._flushed:
            flushes = any(self.sends_dense(name, sizes[name], step) for name in owing)
            self._flushed = not flushes
        if flushes:
            # Who has a residual, though it is sent dense; others, such as those that an optimizer has paid, stay dense.
            chosen = {**chosen, **dict.fromkeys(owing, trials.candidates[1])}
            sync.fold_owners()
        self._choose(chosen)
        return flushes

    def ended(self, step: StepRecord) -> None:
        self._trials.ended(step)

    def tries_gradients(self, step: int) -> bool:
        return self._trials.tries_gradients(step)

    def choose_if_due(self, sync: Ranks, device: torch.device) -> None:
        trials, layout = self._trials, sync.layout
        if trials.choice is not None:
            return
        if sync.world_size == 1:
            trials.settle("nothing is compressed, because there is one rank")
        elif trials.is_due(sync.steps):
            numbers = torch.tensor(trials.numbers(layout), dtype=torch.float64)
            # A NaN, for what a rank has not measured, would end the exchange; it reaches all ranks as a count.
            known = torch.stack([numbers.nan_to_num(), numbers.isfinite().double()]).to(device)
            sync.average([known], DENSE)
            total, share = known.cpu()
            trials.decide(torch.where(share > 0.999, total, torch.nan).tolist(), layout)
        if trials.choice is not None and sync.rank == 0:
            _log.info("%s", trials.choice.describe())

    def state_dict(self) -> dict[str, Any]:
        return {"shared": {}, "auto": self._trials.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, same_world: bool) -> None:
        self._flushed, self._plans = False, {}
        self._trials.load_state_dict(state["auto"])
        if not same_world:  # whose links and payloads are others
            self._trials.again(int(state["steps"]), list(state["entries"]))

    def _chosen_at(self, step: int) -> Mapping[str, Compressor]:
        return self._trials.assigned(step, self.sizes)
