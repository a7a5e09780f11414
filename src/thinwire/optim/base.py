"""What the optimizers share: momentum on each rank, updates instead of gradients on the wire, steps that may not count.

After the warm-up, what a rank sends is its update, made of its own gradients; in the warm-up, and for small tensors
always, it is the gradient, and `step` does what torch's optimizer of the same name does.

Backward sends, and changes nothing: `.grad` is and stays this rank's gradient. `step` is the transaction: it waits for
what the ranks sent, and applies all of it, or nothing if a rank's gradient was not finite.
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
"""Entries after which those that step by their gradients do: there is no second copy of a whole model."""

Piece = tuple[int, list[str], list[Tensor], list[Tensor]]


class CompressedOptimizer(Optimizer):
    """See `AdamW` and `SGD`."""

    moments: tuple[str, ...]
    """Names of the vectors kept for every parameter, the local ones first: torch's."""
    local_moments: tuple[str, ...]
    """Those that differ from rank to rank."""
    _step_supports_amp_scaling = True  # GradScaler then leaves `.grad`, which was sent by then, as it is

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
        """Steps taken."""
        self._guard: dict[str, tuple[Tensor | None, int]] = {}
        """The gradients that were sent, and their versions: nobody may change them before `step`."""
        self._recording: Recording | None = None
        """Of what `step` does on a GPU."""
        self.sync.know(self.named_parameters())
        if self.ddp is not None:
            register_ddp_hook(self.ddp, self)

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
        """As torch's. What was sent and not applied by `step` is dropped."""
        super().zero_grad(set_to_none)
        self._guard = {}
        self.sync.drop()

    def exchange(self) -> None:
        """Send now, without DDP; `step` does it unless it was done."""
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
        """All gradients were sent: from now until `step` they may not change."""
        self._guard = {}
        for name, parameter in self._parameters.items():
            grad = parameter.grad
            self._guard[name] = grad, -1 if grad is None else grad._version

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, unless a rank's gradient was not finite: then nothing changes, on any rank."""
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
        """What this step sends."""
        scaler, number = self.sync.grad_scaler, self.sync.steps
        warms_up = self._warms_up(number)
        return Updates(
            warms_up,
            [self._rule(group) for group in self.param_groups],
            list(self._vectors.values()),
            float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0,
            # Of P ranks' gradients with independent noise the average is sqrt(P) shorter.
            None if self.max_grad_norm is None else self.max_grad_norm * self.sync.world_size**0.5,
            self._sampled_names(number, warms_up),
        )

    def _sampled_names(self, number: int, warms_up: bool) -> frozenset[str]:
        """Return the names of parameters of whose gradients samples are kept in the step that begins."""
        return frozenset()

    @property
    def skipped(self) -> int:
        """Steps that were not taken, because a rank's gradient was not finite."""
        return self.sync.stats.skipped

    # What a subclass says.

    @abstractmethod
    def _rule(self, group: dict[str, Any]) -> Rule:
        """How updates are made of gradients at the step that begins."""

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

    def _after_step(self, sent: Step) -> None:
        """A step was taken."""

    def _warms_up(self, step: int) -> bool:
        """Whether a step is as torch's optimizer takes it: in the warm-up, until its phases become sparse."""
        policy = self.sync.policy
        phase = policy.phase(step)
        if phase >= len(policy.warmup):
            return self.sync.assignment.tries_gradients(step)
        return not parsed(policy.warmup[phase][1]).sparse

    # How it goes.

    def _collect(self) -> Step:
        """What was sent, once it is exchanged on all ranks; nothing has changed so far."""
        self._check_scaler()
        if not self.sync.is_pending:
            if self.ddp is not None:
                raise RuntimeError(
                    "no gradients were exchanged since the last step: the last backward pass before step() must be the "
                    "DDP model's, and not under no_sync()"
                )
            self.exchange()
        self._check_gradients()
        self._guard = {}  # which has the gradients, and would keep their memory
        return self.sync.collect()

    def _apply(self, sent: Step) -> None:
        """Take the step: on a GPU by a recording, once it has been the same for a while."""
        key = self._recording_key(sent)
        if key is None:
            self._apply_runs(sent)
            return
        if self._recording is None:
            self._recording = self.sync.workspace.new_recording()
        started = time.perf_counter()
        if self._recording.replay(key):
            sent.handles[-1].report.spans.append(Span("decode", started, time.perf_counter()))
        else:
            self._recording.run(key, lambda: self._apply_runs(sent))

    def _recording_key(self, sent: Step) -> Hashable:
        """What taking this step depends on; None if it cannot be recorded."""
        return None

    def _apply_runs(self, sent: Step) -> None:
        """Run after run: its average is in memory that the next one uses again."""
        assert sent.updates is not None
        unscale = 1.0 / sent.updates.scale
        for average in sent.averages():
            named = (
                (name, self._parameters[name], shaped(part, self._parameters[name]))
                for name, part in average.parts()
                if self._parameters[name].grad is not None or bool(part.any())  # else no rank has used it
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
        """Under auto: whose updates were sent, and who goes on by gradients, gets what it is owed, and one momentum."""
        if not self.sync.policy.auto or self.sync.choice is not None:
            return
        step = self.sync.steps
        before = set(self._sent_as_updates(step - 1))
        self.sync.assignment.choose_if_due(self.sync, next(p.device for _, p in self.named_parameters()))
        go_on = set(self._sent_as_updates(step))
        if not sent.warms_up:  # else it is the end of the warm-up, which has done it
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
        """Names of those whose gradients are sent at a step though updates of others are; kept until that changes."""
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
        """What an update is multiplied by when it is sent."""
        return float(group["lr"]) / float(group["reference_lr"])

    def _moment(self, kind: str, name: str, parameter: Tensor) -> Tensor:
        """A parameter's vector, in its shape."""
        vectors = self._vectors[kind]
        if name not in vectors:
            vectors.slice([name], [parameter.numel()], parameter.dtype, parameter.device)
        return shaped(vectors[name], parameter)

    # What would go wrong silently.

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
        """Refuse gradients that were not sent as they are now: the step would be that of others."""
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
            # To look for Inf, GradScaler has multiplied all gradients by 1, which torch may count as a change.
            counted = _changes_by_scaler(grad.device)
            return counted > 0 and changes in (counted, counted * self._sharing(grad))
        return changes == 0

    def _sharing(self, grad: Tensor) -> int:
        """How many gradients are views of the tensor that this one is a view of: their changes count together."""
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
        """Take away what GradScaler has set, as it does itself after a step; else its next one would go by it."""
        for name in ("grad_scale", "found_inf"):
            if hasattr(self, name):
                delattr(self, name)

    def _tell_scaler(self) -> None:
        """A rank's gradient was not finite: the scalers of all ranks must see it, to choose the same scale."""
        scaler = self.sync.grad_scaler
        if hasattr(self, "grad_scale") and scaler is not None:
            for found in scaler._found_inf_per_device(self).values():
                found.fill_(1.0)

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


@cache
def _changes_by_scaler(device: torch.device) -> int:
    """How often GradScaler's look for Inf counts as a change of a gradient: not all versions of torch count it."""
    probe = torch.ones(1, device=device)
    before = probe._version
    torch._amp_foreach_non_finite_check_and_unscale_(
        [probe], torch.zeros(1, device=device), torch.ones(1, device=device)
    )
    return int(probe._version - before)


def _pieces(named: Iterable[tuple[str, nn.Parameter, Tensor]], families: Mapping[str, int]) -> Iterator[Piece]:
    """(parameter group, names, parameters, tensors): parameters of one group, of some megabytes together."""
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
