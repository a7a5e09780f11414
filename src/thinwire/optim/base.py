"""What the optimizers share: momentum on each rank, updates instead of gradients on the wire, steps that may not count.

After the warm-up, what a rank sends is its update, made of its own gradients. So `.grad` holds the average update over
ranks when the exchange is done, and `step` applies it. In the warm-up, and for small tensors always, it holds the
average gradient, and `step` does what torch's optimizer of the same name does.

The update is written over the gradient, and momentum changes when the step counts: it is worked out again from the
update, so that a step that is skipped has changed nothing, and no memory is needed for a second copy.
"""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .. import checkpoint
from ..buckets import Run, shaped
from ..compressors import compressor as parsed
from ..integrations import register
from ..kernels.layout import residual_dtype
from ..kernels.updates import Update
from ..policy import DENSE, Policy
from ..residuals import NamedVectors
from ..sync import Synchronizer
from .checks import check_groups, check_order, check_replicas, warn_of_averaged
from .parameters import find
from .transform import UpdateTransform

_AT_ONCE = 1 << 20
"""Entries after which those that step by their gradients do: there is no second copy of a whole model."""


class CompressedOptimizer(Optimizer):
    """See `AdamW` and `SGD`."""

    moments: tuple[str, ...]
    """Names of the vectors kept for every parameter, the local ones first: torch's."""
    local_moments: tuple[str, ...]
    """Those that differ from rank to rank."""
    _step_supports_amp_scaling = True  # GradScaler then leaves `.grad`, which is no gradient, alone

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        policy: Policy,
        *,
        ddp: Any,
        max_grad_norm: float | None,
        grad_scaler: Any,
        **options: Any,
    ) -> None:
        check_order(policy)
        found = find(params, ddp)
        super().__init__(found.groups, defaults)
        for group in self.param_groups:
            # What is sent is an update times lr / reference_lr, so that what was not sent keeps the lr of its step.
            group["reference_lr"] = float(group["lr"]) or 1.0
        self._ddp = None if found.ddp is None else weakref.ref(found.ddp)  # which has us, as its hook
        if self.ddp is not None and options.get("group") is None:
            options["group"] = self.ddp.process_group
        self._transform = UpdateTransform(self, max_grad_norm)
        self.sync = Synchronizer(policy, grad_scaler=grad_scaler, transform=self._transform, **options)
        self._families = {
            name: number for number, group in enumerate(self.param_groups) for name in group["param_names"]
        }
        self._vectors = {kind: NamedVectors() for kind in self.moments}
        self._gradients_in_phase: dict[int, set[str]] = {}
        self._count = 0
        """Steps taken."""
        self._exchanged = 0
        """Exchanges, of which the last was the one of the last step."""
        self.sync.know(self.named_parameters())
        if self.ddp is not None:
            register(self.ddp, self.sync)

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The model whose backward pass exchanges, if there is one."""
        return None if self._ddp is None else self._ddp()

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        for group in self.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"a thinwire.{type(self).__name__} cannot be copied or pickled: save its state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "sync"):
            raise ValueError("groups cannot be added later: make a new optimizer, and load the state of this one")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. What was exchanged and not applied by `step` is dropped."""
        super().zero_grad(set_to_none)
        self._exchanged = self._exchanges()

    def exchange(self) -> None:
        """Average over ranks now, without DDP; `step` does it unless it was done. GradScaler wants it before `step`."""
        if self.ddp is not None:
            raise ValueError("with DDP the exchange is part of the backward pass; leave exchange() out")
        if self._exchanged == 0 and self.sync.steps == 0 and self.sync.world_size > 1:
            named = list(self.named_parameters())
            check_replicas(self.sync, named)
            warn_of_averaged(self.sync, named, type(self).__name__)
        self.sync.all_reduce_gradients(self.named_parameters())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, unless a rank's gradient was not finite: then nothing changes, on any rank."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_scaler()
        if self._exchanges() == self._exchanged:
            if self.ddp is not None:
                raise RuntimeError(
                    "no gradients were exchanged since the last step: the last backward pass before step() must be the "
                    "DDP model's, and not under no_sync()"
                )
            self.exchange()
        self.sync.wait()
        self._exchanged = self._exchanges()
        if self.sync.finite:
            self._count += 1
            for group in self.param_groups:
                self._apply(group)
            self._after_step()
            self._follow_choice()
        return loss

    def _sampled_names(self) -> frozenset[str]:
        """Return the names of parameters of whose gradients samples are kept in the step that begins."""
        return frozenset()

    @property
    def skipped(self) -> int:
        """Steps that were not taken, because a rank's gradient was not finite."""
        return self.sync.stats.skipped

    # What a subclass says.

    @abstractmethod
    def _send(self, run: Run, tensor: Tensor, group: dict[str, Any], factor: float) -> Update:
        """How the update is made of the gradient, which is to be multiplied by `factor`; no other effect."""

    @abstractmethod
    def _step_by_gradients(
        self, group: dict[str, Any], names: list[str], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """As torch's optimizer would; gradients have the moments' dtype."""

    @abstractmethod
    def _step_by_updates(
        self, group: dict[str, Any], names: list[str], parameters: list[Tensor], updates: list[Tensor]
    ) -> None:
        """Apply the averaged updates, and what else a step does to a parameter."""

    @abstractmethod
    def _add(self, group: dict[str, Any], name: str, parameter: Tensor, update: Tensor) -> None:
        """Change a parameter by its update, and by nothing else."""

    def _to_gradient(self, name: str) -> None:
        """Turn the moments of a parameter, averaged over ranks, into those of what is sent as a gradient."""

    def _to_updates(self, names: Collection[str]) -> None:
        """Turn the moments of parameters whose gradients were sent into those of what is compressed."""

    def _after_step(self) -> None:
        """A step was taken."""

    def _warms_up(self, step: int) -> bool:
        """Whether a step is as torch's optimizer takes it: in the warm-up, until its phases become sparse."""
        policy = self.sync.policy
        phase = policy.phase(step)
        if phase == len(policy.warmup):
            return self.sync.tries_gradients(step)
        return not parsed(policy.warmup[phase][1]).sparse

    # How it goes.

    def _apply(self, group: dict[str, Any]) -> None:
        unscale = 1.0 / self._transform.scale
        updated: list[Tensor] = []
        updated_names: list[str] = []
        names: list[str] = []
        others: list[Tensor] = []
        gradients: list[Tensor] = []
        entries = 0
        by_gradient = self._sent_as_gradients(self._transform.number)
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            if not self._transform.as_gradients and name not in by_gradient:
                updated.append(parameter)
                updated_names.append(name)
                continue
            if unscale != 1.0 or gradient.dtype != residual_dtype(gradient.dtype):
                gradient = gradient.to(residual_dtype(gradient.dtype)).mul_(unscale)
            names.append(name)
            others.append(parameter)
            gradients.append(gradient)
            entries += gradient.numel()
            if entries >= _AT_ONCE:
                self._step_by_gradients(group, names, others, gradients)
                names, others, gradients, entries = [], [], [], 0
        if others:
            self._step_by_gradients(group, names, others, gradients)
        if updated:
            self._step_by_updates(group, updated_names, updated, [p.grad for p in updated if p.grad is not None])

    def _follow_choice(self) -> None:
        """Under auto: whose updates were sent, and who goes on by gradients, gets what it is owed, and one momentum."""
        if not self.sync.policy.auto or self.sync.choice is not None:
            return
        step = self.sync.steps
        sent = set(self._sent_as_updates(step - 1))
        self.sync.choose_if_due(next(p.device for _, p in self.named_parameters()))
        go_on = set(self._sent_as_updates(step))
        if not self._transform.as_gradients:  # else it is the end of the warm-up, which has done it
            self._to_updates(go_on - sent)
        for group in self.param_groups:
            named = zip(group["param_names"], group["params"], strict=True)
            self._to_gradients(group, [(name, p) for name, p in named if name in sent - go_on])

    def _sent_as_updates(self, step: int) -> list[str]:
        if self._warms_up(step):
            return []
        by_gradient = self._sent_as_gradients(step)
        return [name for name, _ in self.named_parameters() if name not in by_gradient]

    def _sent_as_gradients(self, step: int) -> set[str]:
        """Names of those whose gradients are sent at a step though updates of others are; kept until that changes."""
        policy = self.sync.policy
        key = None if policy.auto else policy.phase(step)
        if key is None or key not in self._gradients_in_phase:
            sends = self.sync.sends_gradient
            found = {name for name, p in self.named_parameters() if sends(name, p.numel(), step)}
            if key is None:
                return found
            self._gradients_in_phase[key] = found
        return self._gradients_in_phase[key]

    def _to_gradients(self, group: dict[str, Any], named: list[tuple[str, nn.Parameter]]) -> None:
        """The residuals of all ranks are applied, and their momenta, which differ, averaged: in order, on all ranks."""
        owed = self.sync.take_residuals([name for name, _ in named])
        for name, parameter in named:
            if name in owed:
                self.sync.average([owed[name]], DENSE)
                self._add(group, name, parameter, shaped(owed[name], parameter).to(parameter.dtype))
            self.sync.average(
                [self._vectors[kind][name] for kind in self.moments if name in self._vectors[kind]], DENSE
            )
            self._to_gradient(name)

    def _rate(self, group: dict[str, Any]) -> float:
        """What an update is multiplied by when it is sent; never 0, since momentum is worked out from what was sent."""
        return max(float(group["lr"]) / float(group["reference_lr"]), 1e-8)

    def _moment(self, kind: str, name: str, parameter: Tensor) -> Tensor:
        """A parameter's vector, in its shape."""
        vectors = self._vectors[kind]
        if name not in vectors:
            vectors.slice([name], [parameter.numel()], parameter.dtype, parameter.device)
        return shaped(vectors[name], parameter)

    def _moments_of(self, run: Run, tensor: Tensor) -> list[Tensor]:
        """The vectors of a run, flat."""
        return [self._vectors[kind].slice(run.names, run.sizes, tensor.dtype, tensor.device) for kind in self.moments]

    def _exchanges(self) -> int:
        stats = self.sync.stats
        return stats.steps + stats.skipped

    def _check_scaler(self) -> None:
        if not hasattr(self, "grad_scale"):  # GradScaler sets it while it calls step
            return
        if self.sync.grad_scaler is None:
            raise ValueError("a GradScaler calls step(); give it to the optimizer too: grad_scaler=scaler")
        if self.grad_scale is None:
            raise ValueError(
                "scaler.unscale_(optimizer) was called, but .grad holds the update, which has no scale; leave it out, "
                "and to clip give the optimizer max_grad_norm"
            )
        if self.ddp is None and self._exchanges() == self._exchanged:
            raise RuntimeError("call optimizer.exchange() before scaler.step(optimizer): all ranks must see an Inf")

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Of this rank: every rank saves its own. As torch's, with the synchronizer's state under "thinwire"."""
        self._fill_state()
        packed = super().state_dict()
        self.state.clear()  # else it would keep vectors that have moved
        return {**packed, "thinwire": {**self.sync.state_dict(), **self._own_state()}}

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """The state of this rank, or those of all ranks in a list, which another number of ranks needs."""
        states = checkpoint.as_list(state_dict)
        for state in states:
            if not isinstance(state, Mapping) or "thinwire" not in state or "param_groups" not in state:
                raise ValueError(f"not a state of thinwire.{type(self).__name__}: there is no 'thinwire' in it")
        sync_states = [state["thinwire"] for state in states]
        choice = checkpoint.choose(sync_states, self.sync.rank, self.sync.world_size)
        by_rank = {int(state["thinwire"]["rank"]): state for state in states}
        alike = by_rank[int(choice.alike["rank"])]
        if alike["thinwire"].get("optimizer") != type(self).__name__:
            raise ValueError(
                f"a state of thinwire.{alike['thinwire'].get('optimizer')}, this is thinwire.{type(self).__name__}"
            )
        check_groups([group["param_names"] for group in alike["param_groups"]], self.param_groups)
        taken = [by_rank[int(state["rank"])] for state in choice.taken]
        apart = self._local_names(choice.alike) if choice.alike["steps"] else []
        loaded = {kind: NamedVectors() for kind in self.moments}
        for kind in self.moments:
            vectors = self._vectors_in(alike, kind)
            if kind in self.local_moments:
                local = checkpoint.merge(choice, [self._vectors_in(state, kind) for state in taken])
                for name in apart:  # a frozen one has none
                    if name in local:
                        vectors[name] = local[name]
                    elif name in vectors:
                        vectors[name] = torch.zeros_like(vectors[name])
            loaded[kind].load(vectors)
        self.sync.load_state_dict(sync_states)  # which checks everything before it changes anything
        super().load_state_dict({"state": {}, "param_groups": alike["param_groups"]})
        self._vectors = loaded
        self._load_own_state(alike["thinwire"])
        self._exchanged = self._exchanges()

    def _local_names(self, state: Mapping[str, Any]) -> list[str]:
        """Parameters whose momentum differs between ranks in a checkpoint: those of which updates were sent."""
        return list(state["local"]) if "local" in state else self._sent_as_updates(int(state["steps"]) - 1)

    def _own_state(self) -> dict[str, Any]:
        made: dict[str, Any] = {"optimizer": type(self).__name__, "count": self._count}
        if self.sync.policy.auto:  # what was measured says who, so who loads it cannot tell beforehand
            last = self._sent_as_updates(self.sync.steps - 1) if self.sync.steps else []
            go_on = set(self._sent_as_updates(self.sync.steps))
            made["local"] = [name for name in last if name in go_on]
        return made

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._count = int(state["count"])

    def _fill_state(self) -> None:
        """`state`, as torch has it: views of the vectors, in the parameters' shapes."""
        for name, parameter in self.named_parameters():
            kept = {
                kind: shaped(vectors[name], parameter) for kind, vectors in self._vectors.items() if name in vectors
            }
            if kept:
                self.state[parameter] = {"step": torch.tensor(float(self._count)), **kept}

    def _vectors_in(self, state: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
        """By name, flat, on the device of the parameter and in the order of its memory."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        made = {}
        for number, (name, parameter) in zip(numbers, self.named_parameters(), strict=True):
            kept = state["state"].get(number, {}).get(kind)
            if kept is not None:
                made[name] = torch.empty(
                    parameter.numel(), dtype=residual_dtype(parameter.dtype), device=parameter.device
                )
                shaped(made[name], parameter).copy_(kept)
        return made
