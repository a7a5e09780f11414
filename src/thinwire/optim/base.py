"""Base of the optimizers: local momentum, updates sent instead of gradients, and steps that may be skipped.

After the warm-up, each rank sends its update, made from its own gradients. In the warm-up, and always for small
tensors, it sends the gradient, and `step` does the same as torch's optimizer of that name.

The backward pass sends, and changes nothing: `.grad` remains this rank's gradient. `step` is a transaction: it waits
for the exchange, and applies all of it, or nothing if a rank's gradient was not finite.
"""

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..collectives.handle import Span
from ..compressors import compressor as parsed
from ..integrations import register_ddp_hook
from ..kernels.layout import residual_dtype
from ..kernels.recording import Recording
from ..sync import checkpoint
from ..sync.buckets import Bucket, shaped
from ..sync.parts import Rule, Updates
from ..sync.policy import DENSE, Policy
from ..sync.residuals import NamedVectors
from ..sync.step import Step
from ..sync.synchronizer import Synchronizer
from .checks import check_groups, check_order, check_replicas, warn_of_averaged
from .parameters import find

_AT_ONCE = 1 << 20
"""Parameters take their step in pieces of about this many elements.

So there is no second copy of a whole model.
"""

Piece = tuple[int, list[str], list[Tensor], list[Tensor]]


class CompressedOptimizer(Optimizer):
    """Base class of `AdamW` and `SGD`."""

    moments: tuple[str, ...]
    """Names of the vectors kept for every parameter, as in torch; the local ones come first."""
    local_moments: tuple[str, ...]
    """Names of the moments that differ between ranks."""
    _step_supports_amp_scaling = True  # so that GradScaler does not change `.grad`, which is sent before

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
            # Updates are sent times lr / reference_lr, so that a residual keeps the lr of its step.
            group["reference_lr"] = float(group["lr"]) or 1.0
        self._ddp = None if found.ddp is None else weakref.ref(found.ddp)  # weak: DDP holds this optimizer, as its hook
        if self.ddp is not None and options.get("group") is None:
            options["group"] = self.ddp.process_group
        if max_grad_norm is not None and (not isinstance(max_grad_norm, (int, float)) or not max_grad_norm > 0):
            raise ValueError(f"max_grad_norm {max_grad_norm!r}, expected a number above 0, or None")
        self.max_grad_norm = max_grad_norm
        self._families = {
            name: number for number, group in enumerate(self.param_groups) for name in group["param_names"]
        }
        self._parameters = dict(self.named_parameters())
        self.sync = Synchronizer(policy, grad_scaler=grad_scaler, families=self._families, **options)
        self._vectors = {kind: NamedVectors() for kind in self.moments}
        self._gradients_in_phase: dict[int, set[str]] = {}
        self._count = 0
        """Number of steps taken."""
        self._guard: dict[str, tuple[Tensor | None, int]] = {}
        """Gradients that were sent, and their versions, to detect changes before `step`."""
        self._recording: Recording | None = None
        """Recording of the GPU work of `step`."""
        self.sync.know(self.named_parameters())
        if self.ddp is not None:
            register_ddp_hook(self.ddp, self)

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """Return the DDP model whose backward pass exchanges, if there is one."""
        return None if self._ddp is None else self._ddp()

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) pairs, group by group."""
        for group in self.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"a thinwire.{type(self).__name__} cannot be copied or pickled: save its state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group while the optimizer is constructed; raise ValueError later."""
        if hasattr(self, "sync"):
            raise ValueError("groups cannot be added later: make a new optimizer, and load the state of this one")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as torch does, and drop a step that was sent but not applied."""
        super().zero_grad(set_to_none)
        self._guard = {}
        self.sync.drop()

    def exchange(self) -> None:
        """Send this step now, without DDP; `step` calls this if it was not called before.

        Raises ValueError with DDP, which sends in the backward pass.
        """
        if self.ddp is not None:
            raise ValueError("with DDP the exchange is part of the backward pass; leave exchange() out")
        named = list(self.named_parameters())
        if self._count == 0 and self.sync.stats.skipped == 0 and self.sync.world_size > 1:
            check_replicas(self.sync, named)
            warn_of_averaged(self.sync, named, type(self).__name__)
        for bucket, first, last in self.sync.buckets_of(named):
            self.add_bucket(bucket, first=first, last=last)
        self.watch_gradients()

    def add_bucket(self, bucket: Bucket, *, first: bool, last: bool) -> None:
        """Send one bucket of gradients, which are only read."""
        if first:
            self._check_begin()
            self.sync.begin(bucket.tensor.device, self._updates(bucket.tensor.device))
        self.sync.send(bucket, last=last)

    def watch_gradients(self) -> None:
        """Record all gradients after they were sent: they must not change before `step`."""
        self._guard = {}
        for name, parameter in self._parameters.items():
            grad = parameter.grad
            self._guard[name] = grad, -1 if grad is None else grad._version

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; if a rank's gradient was not finite, nothing changes on any rank."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            sent = self._collect()
        except BaseException:
            self._leave_scaler()
            raise
        if sent.finite:
            self._count += 1
            self._apply(sent)
        self.sync.count(sent)
        if sent.finite:
            self._after_step(sent)
            self._follow_choice(sent)
        else:
            self._tell_scaler()
        return loss

    def _updates(self, device: torch.device) -> Updates:
        """Return the settings of the step that begins."""
        scaler, number = self.sync.grad_scaler, self.sync.steps
        warms_up = self._warms_up(number)
        return Updates(
            warms_up,
            [self._rule(group) for group in self.param_groups],
            list(self._vectors.values()),
            float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0,
            # If the gradients of P ranks have independent noise, the norm of their average is smaller by sqrt(P).
            None if self.max_grad_norm is None else self.max_grad_norm * self.sync.world_size**0.5,
            self._sampled_names(number, warms_up),
        )

    def _sampled_names(self, number: int, warms_up: bool) -> frozenset[str]:
        """Return the names of the parameters whose gradients are sampled in the step that begins."""
        return frozenset()

    @property
    def skipped(self) -> int:
        """Return the number of steps that were skipped because a rank's gradient was not finite."""
        return self.sync.stats.skipped

    # Defined by subclasses.

    @abstractmethod
    def _rule(self, group: dict[str, Any]) -> Rule:
        """Return the rule by which the step that begins makes updates from gradients."""

    @abstractmethod
    def _step_by_gradients(
        self, group: dict[str, Any], names: list[str], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Take the step of torch's optimizer; gradients have the dtype of the moments."""

    @abstractmethod
    def _step_by_updates(
        self, group: dict[str, Any], names: list[str], parameters: list[Tensor], updates: list[Tensor]
    ) -> None:
        """Apply the averaged updates, and everything else that a step does to a parameter."""

    @abstractmethod
    def _add(self, group: dict[str, Any], name: str, parameter: Tensor, update: Tensor) -> None:
        """Change a parameter by its update, and by nothing else."""

    def _to_gradient(self, name: str) -> None:
        """Convert the moments, averaged over ranks, of a parameter that is sent as a gradient from now on."""

    def _to_updates(self, names: Collection[str]) -> None:
        """Convert the moments of parameters that are sent as updates from now on."""

    def _after_step(self, sent: Step) -> None:
        """Finish a step that was taken; this is called after the step was counted."""

    def _warms_up(self, step: int) -> bool:
        """Return whether a step is that of torch's optimizer: in the warm-up until it is sparse, and in some trials."""
        policy = self.sync.policy
        phase = policy.phase(step)
        if phase >= len(policy.warmup):
            return self.sync.assignment.tries_gradients(step)
        return not parsed(policy.warmup[phase][1]).sparse

    # The parts of a step.

    def _collect(self) -> Step:
        """Wait until the step is exchanged on all ranks, and return it; nothing has changed so far."""
        self._check_scaler()
        if not self.sync.is_pending:
            if self.ddp is not None:
                raise RuntimeError(
                    "no gradients were exchanged since the last step: the last backward pass before step() must be the "
                    "DDP model's, and not under no_sync()"
                )
            self.exchange()
        self._check_gradients()
        self._guard = {}  # it would keep the memory of the gradients
        return self.sync.collect()

    def _apply(self, sent: Step) -> None:
        """Apply a step; on a GPU by a recording, once the work has been the same for a few steps."""
        key = self._recording_key(sent)
        if key is None:
            self._apply_runs(sent)
            return
        if self._recording is None:
            self._recording = self.sync.workspace.new_recording()
        started = time.perf_counter()
        if self._recording.run(key, lambda: self._apply_runs(sent)):
            sent.handles[-1].report.spans.append(Span("decode", started, time.perf_counter()))

    def _recording_key(self, sent: Step) -> Hashable:
        """Return everything that applying this step depends on; None if it cannot be recorded."""
        return None

    def _apply_runs(self, sent: Step) -> None:
        """Apply the runs one after the other, because their averages use the same memory."""
        assert sent.updates is not None
        unscale = 1.0 / sent.updates.scale
        for average in sent.averages():
            named = (
                (name, self._parameters[name], shaped(part, self._parameters[name]))
                for name, part in average.parts()
                if self._parameters[name].grad is not None or bool(part.any())  # otherwise no rank has used it
            )
            for number, names, parameters, parts in _pieces(named, self._families):
                if average.is_update:
                    self._step_by_updates(self.param_groups[number], names, parameters, parts)
                    continue
                gradients = [
                    part if unscale == 1.0 and part.dtype == residual_dtype(part.dtype)
                    else part.to(residual_dtype(part.dtype)).mul_(unscale)
                    for part in parts
                ]  # fmt: skip
                self._step_by_gradients(self.param_groups[number], names, parameters, gradients)

    def _follow_choice(self, sent: Step) -> None:
        """Make the choice of "auto" if it is due, and convert the parameters whose way of sending changes.

        Parameters that change from updates to gradients get the residuals of all ranks and an averaged momentum.
        """
        if not self.sync.policy.auto or self.sync.choice is not None:
            return
        step = self.sync.steps
        before = set(self._sent_as_updates(step - 1))
        self.sync.assignment.choose_if_due(self.sync, next(p.device for _, p in self.named_parameters()))
        go_on = set(self._sent_as_updates(step))
        if not sent.warms_up:  # at the end of the warm-up, `_after_step` has done it
            self._to_updates(go_on - before)
        for group in self.param_groups:
            named = zip(group["param_names"], group["params"], strict=True)
            self._to_gradients(group, [(name, p) for name, p in named if name in before - go_on])

    def _sent_as_updates(self, step: int) -> list[str]:
        if self._warms_up(step):
            return []
        by_gradient = self._sent_as_gradients(step)
        return [name for name, _ in self.named_parameters() if name not in by_gradient]

    def _sent_as_gradients(self, step: int) -> set[str]:
        """Return the names of parameters whose gradients are sent at a step, while updates are sent for others.

        Without "auto", the result is kept for each phase.
        """
        policy = self.sync.policy
        key = None if policy.auto else policy.phase(step)
        if key is None or key not in self._gradients_in_phase:
            sends = self.sync.assignment.sends_gradient
            found = {name for name, p in self.named_parameters() if sends(name, p.numel(), step)}
            if key is None:
                return found
            self._gradients_in_phase[key] = found
        return self._gradients_in_phase[key]

    def _to_gradients(self, group: dict[str, Any], named: list[tuple[str, nn.Parameter]]) -> None:
        """Apply the residuals of all ranks, and average the moments, which differ between ranks.

        All ranks do this in the same order.
        """
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
        """Return the factor of an update when it is sent."""
        return float(group["lr"]) / float(group["reference_lr"])

    def _moment(self, kind: str, name: str, parameter: Tensor) -> Tensor:
        """Return a moment of a parameter, in the parameter's shape."""
        vectors = self._vectors[kind]
        if name not in vectors:
            vectors.slice([name], [parameter.numel()], parameter.dtype, parameter.device)
        return shaped(vectors[name], parameter)

    # Checks for mistakes that would stay unnoticed.

    def _check_begin(self) -> None:
        if getattr(getattr(self.ddp, "_join_config", None), "enable", False):
            raise RuntimeError(
                f"ddp.join() with thinwire.{type(self).__name__}: a rank that has no more data could not step "
                "with the others; give all ranks as many batches, or use thinwire.attach"
            )
        if self.sync.is_pending:
            raise RuntimeError(
                "a second exchange before step(): the gradients of the first were sent; exchange once a step, with DDP "
                "by no_sync() for all but the last backward pass"
            )

    def _check_gradients(self) -> None:
        """Raise RuntimeError if gradients have changed since they were sent, because the step would be wrong."""
        sent = self.sync.pending_names
        for name, parameter in self._parameters.items():
            grad = parameter.grad
            if name not in sent:
                if grad is not None:
                    self._refuse(
                        f"parameter {name!r} has a gradient that was not exchanged: set requires_grad before "
                        "DistributedDataParallel(...) is made, or set its .grad to None"
                    )
            elif name not in self._guard:
                self._refuse("the backward pass did not come to an end: call zero_grad(), and backward again")
            elif grad is not self._guard[name][0] or (grad is not None and not self._is_as_sent(name, grad)):
                beside = ", or of one beside it in memory," if grad is not None and self._sharing(grad) > 1 else ""
                self._refuse(
                    f"the gradient of {name!r}{beside} was changed after it was exchanged, as clip_grad_norm_ does; "
                    f"what was sent is the gradient before that. To clip, give thinwire.{type(self).__name__} "
                    "max_grad_norm=; to scale, scale the loss"
                )

    def _is_as_sent(self, name: str, grad: Tensor) -> bool:
        changes = grad._version - self._guard[name][1]
        if changes and getattr(self, "grad_scale", None) is not None:
            # To find Inf, GradScaler has multiplied all gradients by 1, which torch may count as a change.
            counted = _changes_by_scaler(grad.device)
            return counted > 0 and changes in (counted, counted * self._sharing(grad))
        return changes == 0

    def _sharing(self, grad: Tensor) -> int:
        """Return how many gradients share this one's memory, because torch counts changes of all views together."""
        memory = grad.untyped_storage().data_ptr()
        others = (p.grad for p in self._parameters.values() if p.grad is not None)
        return sum(other.untyped_storage().data_ptr() == memory for other in others)

    def _refuse(self, reason: str) -> None:
        self._guard = {}
        self.sync.drop()
        raise RuntimeError(reason)

    def _check_scaler(self) -> None:
        if not hasattr(self, "grad_scale"):  # GradScaler sets it while it calls step
            return
        if self.sync.grad_scaler is None:
            raise ValueError("a GradScaler calls step(); give it to the optimizer too: grad_scaler=scaler")
        if self.grad_scale is None:
            self.sync.drop()
            raise ValueError(
                "scaler.unscale_(optimizer) was called, but the gradients were sent before that; leave it out, and to "
                "clip give the optimizer max_grad_norm"
            )

    def _leave_scaler(self) -> None:
        """Remove the attributes that GradScaler has set, as it does after a step; its next step would use them."""
        for name in ("grad_scale", "found_inf"):
            if hasattr(self, name):
                delattr(self, name)

    def _tell_scaler(self) -> None:
        """Report to the GradScaler that a rank's gradient was not finite, so that all ranks choose the same scale."""
        scaler = self.sync.grad_scaler
        if hasattr(self, "grad_scale") and scaler is not None:
            for found in scaler._found_inf_per_device(self).values():
                found.fill_(1.0)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, as torch does, with the synchronizer's state under "thinwire".

        Every rank saves its own state.
        """
        self._fill_state()
        packed = super().state_dict()
        self.state.clear()  # otherwise it would keep vectors that have moved
        return {**packed, "thinwire": {**self.sync.state_dict(), **self._own_state()}}

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load the state of this rank, or a list of the states of all ranks, which another world size needs."""
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
                for name in apart:  # a frozen parameter has none
                    if name in local:
                        vectors[name] = local[name]
                    elif name in vectors:
                        vectors[name] = torch.zeros_like(vectors[name])
            loaded[kind].load(vectors)
        self.sync.load_state_dict(sync_states)  # checks everything before it changes anything
        super().load_state_dict({"state": {}, "param_groups": alike["param_groups"]})
        self._vectors = loaded
        self._load_own_state(alike["thinwire"])

    def _local_names(self, state: Mapping[str, Any]) -> list[str]:
        """Return the parameters whose momentum differs between ranks in a checkpoint: those sent as updates."""
        return list(state["local"]) if "local" in state else self._sent_as_updates(int(state["steps"]) - 1)

    def _own_state(self) -> dict[str, Any]:
        made: dict[str, Any] = {"optimizer": type(self).__name__, "count": self._count}
        if self.sync.policy.auto:  # depends on measurements, so it must be saved
            last = self._sent_as_updates(self.sync.steps - 1) if self.sync.steps else []
            go_on = set(self._sent_as_updates(self.sync.steps))
            made["local"] = [name for name in last if name in go_on]
        return made

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._count = int(state["count"])

    def _fill_state(self) -> None:
        """Fill `state` as torch does: with views of the vectors, in the shapes of the parameters."""
        for name, parameter in self.named_parameters():
            kept = {
                kind: shaped(vectors[name], parameter) for kind, vectors in self._vectors.items() if name in vectors
            }
            if kept:
                self.state[parameter] = {"step": torch.tensor(float(self._count)), **kept}

    def _vectors_in(self, state: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
        """Return a moment in a saved state by name: flat, on the parameter's device and in the order of its memory."""
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


@cache
def _changes_by_scaler(device: torch.device) -> int:
    """Return how often GradScaler's check for Inf counts as a change; that depends on the version of torch."""
    probe = torch.ones(1, device=device)
    before = probe._version
    torch._amp_foreach_non_finite_check_and_unscale_(
        [probe], torch.zeros(1, device=device), torch.ones(1, device=device)
    )
    return int(probe._version - before)


def _pieces(named: Iterable[tuple[str, nn.Parameter, Tensor]], families: Mapping[str, int]) -> Iterator[Piece]:
    """Yield (group number, names, parameters, tensors) in pieces: parameters of one group, a few megabytes together."""
    open_ones: dict[int, Piece] = {}
    elements: dict[int, int] = {}
    for name, parameter, tensor in named:
        number = families[name]
        _, names, parameters, tensors = open_ones.setdefault(number, (number, [], [], []))
        names.append(name)
        parameters.append(parameter)
        tensors.append(tensor)
        elements[number] = elements.get(number, 0) + tensor.numel()
        if elements[number] >= _AT_ONCE:
            elements[number] = 0
            yield open_ones.pop(number)
    yield from open_ones.values()
