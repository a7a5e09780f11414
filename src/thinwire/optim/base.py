"""Base of the optimizers: local momentum, updates sent instead of gradients, and steps that may be skipped.

After the warm-up, each rank sends its update, made from its own gradients by a rule (`rule.py`). In the warm-up, and
always for small tensors, it sends the gradient, and `step` does the same as torch's optimizer of that name.

The backward pass sends, and changes nothing. `step` waits for the exchange, and applies all of it, or nothing if a
rank's gradient was not finite.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..collectives.groups import group_of_one
from ..compressors import compressor as parsed
from ..integrations import register_ddp_hook
from ..integrations.fsdp import BackwardPass, sharded_parameters
from ..kernels.layout import residual_dtype
from ..kernels.updates import Update
from ..sync import checkpoint
from ..sync.buckets import Bucket, Slice, shaped
from ..sync.policy import DENSE, Policy, Spec
from ..sync.step import Step, Updates
from ..sync.synchronizer import Synchronizer
from . import states
from .families import Families, Parameters
from .guard import Guard, check_norm, check_order
from .parameters import Params as Params
from .parameters import find_parameters
from .recorded import Recorder
from .rule import Piece, Rule, StepNumbers

_AT_ONCE = 1 << 20  # elements that take their step together, so that there is no second copy of a model
TOGETHER_BYTES = {"cuda": 100 << 20}
"""Smaller buckets are sent together: each operation takes time of the CPU that launches the backward pass."""


class CompressedOptimizer(Optimizer):
    """Base class of `AdamW` and `SGD`.

    rule    that of all parameters; or several by name, from which the option "rule" of a parameter group chooses.
    policy  how parameters are sent, as `policy_of` makes it. Other options are those of `AdamW` and `Synchronizer`.
    """

    _step_supports_amp_scaling = True  # so that GradScaler does not change `.grad`, which is sent before

    def __init__(
        self, params: Params, defaults: dict[str, Any], rule: Rule | Mapping[str, Rule], policy: Policy, *,
        ddp: DistributedDataParallel | None = None, max_grad_norm: float | None = None, **options: Any,
    ) -> None:  # fmt: skip
        check_order(policy)
        self._rules, self._rule_of_group = rule if isinstance(rule, Mapping) else {"": rule}, list[Rule]()
        groups, ddp = find_parameters(params, ddp)
        super().__init__(groups, defaults)
        for group in self.param_groups:
            group["reference_lr"] = float(group["lr"]) or 1.0  # see `sent_rate`
        self._is_alone = ddp is None and options.get("group") is None and not dist.is_initialized()
        if self._is_alone:
            options["group"], policy = group_of_one(), dense_policy(policy)
        self._ddp = None if ddp is None else weakref.ref(ddp)  # weak: DDP holds this optimizer, as its hook
        if ddp is not None and options.get("group") is None:
            options["group"] = ddp.process_group
        check_norm(max_grad_norm)
        self.max_grad_norm = max_grad_norm
        given = dict(self.named_parameters())
        self._sharded = sharded_parameters(given, options.get("group"))
        tensors = given if self._sharded is None else self._sharded.tensors
        families = Families([group["param_names"] for group in self.param_groups])
        shards = None if self._sharded is None else self._sharded.group
        self.sync = Synchronizer(policy, families=families.number_of, shards=shards, **options)
        kinds = [rule.moments for rule in self._rule_of_group]
        kept = Counter(kind for rule in self._rules.values() for kind in rule.moments)
        if kept and max(kept.values()) > 1:
            raise ValueError(f"two rules keep {max(kept, key=kept.get)}, expected moments of their own for each")  # type: ignore[arg-type]
        self._parameters = Parameters(self, self.sync, families, given=given, tensors=tensors, kinds=kinds)
        for rule in self._rules.values():
            rule.parameters = self._parameters
            rule.groups = {number for number, own in enumerate(self._rule_of_group) if own is rule}
        self._guard = Guard(type(self).__name__, self.sync, given, self._sharded)
        self._gathered: list[dict[str, Any]] | None = None  # after `consolidate_state_dict`, until the next step
        self._recorder = Recorder(self._parameters, self._rule_of_group)
        self.sync.register_parameters(tensors.items())
        self._backward: BackwardPass | None = None  # of a sharded model, which sends the buckets
        if self._sharded is not None and not self._sharded.is_offloaded:
            self._backward = BackwardPass(self._sharded, self)
        if ddp is not None:
            register_ddp_hook(ddp, self)

    @property
    def ddp(self) -> DistributedDataParallel | None:
        return None if self._ddp is None else self._ddp()

    @property
    def skipped(self) -> int:
        return self.sync.stats.skipped

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"a thinwire.{type(self).__name__} cannot be copied or pickled: save its state_dict()")

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        for group in self.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "sync"):
            raise ValueError("parameter groups cannot be added after construction: make a new optimizer with all")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        chosen = group.get("rule", next(iter(self._rules)))
        if chosen not in self._rules:
            raise ValueError(f"rule {chosen!r} of a parameter group, expected one of {', '.join(self._rules)}")
        self._rules[chosen].check(group)
        self._rule_of_group.append(self._rules[chosen])

    # The backward pass: send.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as torch does, and drop a step that was sent but not applied."""
        super().zero_grad(set_to_none)
        self._guard.forget()
        self.sync.drop()
        if self._backward is not None:
            self._backward.reset()

    def exchange(self) -> None:
        """Send this step now, as `step` does otherwise. Raise ValueError with DDP, whose backward pass sends."""
        if self.ddp is not None or self._backward is not None:
            kind = "FSDP" if self.ddp is None else "DDP"
            raise ValueError(f"with {kind} the exchange is part of the backward pass; do not call exchange()")
        if self._sharded is not None:
            groups = self._sharded.groups()
            for number, names in enumerate(groups, start=1):
                self.add_bucket(self._sharded.bucket(names), first=number == 1, last=number == len(groups))
        else:
            named = list(self.named_parameters())
            self._guard.check_plain(named)
            for bucket, first, last in self.sync.buckets_of(named):
                self.add_bucket(bucket, first=first, last=last)
        self.watch_gradients()

    def add_bucket(self, bucket: Bucket, *, first: bool, last: bool) -> None:
        """Send one bucket of gradients, which are only read."""
        self._guard.check_bucket(bucket)
        if first:
            self._guard.check_begin(self.ddp, is_alone=self._is_alone)
            self.sync.begin(bucket.tensor.device, self._updates(bucket.tensor.device))
        self.sync.send(bucket, last=last)

    def watch_gradients(self) -> None:
        self._guard.record()

    def end_backward(self, error: Exception | None) -> None:
        """End the backward pass of a sharded model, after all gradients were sent; raise the error of the pass."""
        if error is not None:
            raise error
        self.watch_gradients()

    def _updates(self, device: torch.device) -> Updates:
        """Return the settings of the step that begins."""
        parameters, scaler, rules = self._parameters, self.sync.grad_scaler, self._rules.values()
        trained = {name for name, p in parameters.given.items() if p.requires_grad}
        absent = parameters.given.keys() - (trained if self.ddp is None else self._guard.trained)
        sampled = frozenset[str]().union(*[rule.begin(absent) for rule in rules])
        families = [(self._rule_of_group[family.group], family) for family in parameters.families.all]
        numbers = [rule.numbers(family, self.param_groups[family.group]) for rule, family in families]
        made = Updates(
            warms_up=parameters.warms_up(self.sync.steps),
            rules=[self._maker(rule, given) for (rule, _), given in zip(families, numbers, strict=True)],
            moments=list(parameters.vectors.values()),
            scale=float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0,
            # If the gradients of P ranks have independent noise, the norm of their average is smaller by sqrt(P).
            max_norm=None if self.max_grad_norm is None else self.max_grad_norm * self.sync.world_size**0.5,
            sampled=sampled,
            together_bytes=TOGETHER_BYTES.get(device.type, 0) if all(rule.takes_joined for rule in rules) else 0,
        )
        return self._recorder.with_numbers(made, numbers, device) if device.type == "cuda" else made

    def _maker(self, rule: Rule, numbers: Mapping[str, Any]) -> Callable[[Slice, Any, float], Update]:
        """Return the function that makes updates of slices; of all moments, a rule gets its own."""
        own = [place for place, kind in enumerate(self._parameters.vectors) if kind in rule.moments]
        return lambda slice_, moments, factor: rule.update(slice_, [moments[n] for n in own], factor, **numbers)

    # The step: wait, then apply all of it or nothing.

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step; if a rank's gradient was not finite, nothing changes on any rank."""
        loss = None
        self._gathered = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with self.sync.reporting(self._parameters.device):
                sent = self._collect()
        except BaseException:
            for name in ("grad_scale", "found_inf"):  # GradScaler removes them after a step; its next would use them
                self.__dict__.pop(name, None)
            raise
        if sent.finite:
            self._apply(sent)
        self.sync.count(sent)
        if sent.finite:
            self._finish(sent)
        elif hasattr(self, "grad_scale") and self.sync.grad_scaler is not None:
            for found in self.sync.grad_scaler._found_inf_per_device(self).values():
                found.fill_(1.0)  # so that the GradScaler of every rank chooses the same scale
        return loss

    def _collect(self) -> Step:
        """Wait until the step is exchanged on all ranks, and return it; nothing has changed so far."""
        self._guard.check_scaler(self)
        if not self.sync.is_pending:
            self._guard.check_sent(by_ddp=self.ddp is not None, by_fsdp=self._backward is not None)
            self.exchange()
        self._guard.check_gradients(is_checked_by_scaler=getattr(self, "grad_scale", None) is not None)
        self._guard.forget()
        return self.sync.collect()

    def _apply(self, sent: Step) -> None:
        of_groups = list(zip(self._rule_of_group, self.param_groups, strict=True))
        rates = {name: rule.rate(group, name) for rule, group in of_groups for name in group["param_names"]}
        families = [(family.steps, self.param_groups[family.group]) for family in self._parameters.families.all]
        lr = [float(group["lr"]) for _, group in families]
        keep = [1 - one * group.get("weight_decay", 0.0) for one, (_, group) in zip(lr, families, strict=True)]
        numbers = StepNumbers([steps + 1 for steps, _ in families], lr, keep, rates)
        if sent.updates is None or sent.updates.numbers is None:
            self._apply_slices(sent, numbers)
        else:
            self._recorder.run(sent, numbers, partial(self._apply_slices, sent))

    def _apply_slices(self, sent: Step, numbers: StepNumbers) -> None:
        """Apply the slices one after the other, because their averages use the same memory."""
        assert sent.updates is not None
        unscale = 1.0 / sent.updates.scale
        for is_update, parts in sent.averages():
            for rule, piece in self._pieces(parts, numbers):
                if is_update:
                    rule.step_by_updates(piece)
                else:
                    gradients = [_unscaled(part, unscale) for part in piece.tensors]
                    rule.step_by_gradients(piece._replace(tensors=gradients))

    def _pieces(self, parts: Iterable[tuple[str, Tensor]], numbers: StepNumbers) -> Iterator[tuple[Rule, Piece]]:
        families, given, tensors = self._parameters.families, self._parameters.given, self._parameters.tensors
        unfinished: dict[int, tuple[Rule, Piece]] = {}
        elements: Counter[int] = Counter()
        for name, part in parts:
            if given[name].grad is None and not bool(part.any()):  # no rank has used it
                continue
            number = families.number_of[name]
            if number not in unfinished:
                group, (steps, lr, keep) = families.all[number].group, (column[number] for column in numbers[:3])
                piece = Piece(self.param_groups[group], steps, lr, keep, [], [], [], [])
                unfinished[number] = self._rule_of_group[group], piece
            piece = unfinished[number][1]
            piece.names.append(name)
            piece.parameters.append(tensors[name])
            piece.tensors.append(shaped(part, tensors[name]))
            piece.rates.append(numbers.rates[name])
            elements[number] += part.numel()
            if elements[number] >= _AT_ONCE:
                del elements[number]
                yield unfinished.pop(number)
        yield from unfinished.values()

    def _finish(self, sent: Step) -> None:
        """Finish a step that was taken and counted: what follows may be sent in another way."""
        parameters, sync, rules = self._parameters, self.sync, self._rules.values()
        for family in parameters.families.present:
            family.steps += 1
        for rule in rules:
            rule.finish(sent)
            if sent.warms_up and not parameters.warms_up(sync.steps):
                rule.to_updates(parameters.sent_as_updates(sync.steps, rule.groups))
        if not sync.policy.auto or sync.choice is not None:
            return
        before = parameters.sent_as_updates(sync.steps - 1)
        assert sync.trials is not None
        sync.trials.choose_if_due(sync.steps, parameters.device)
        after = set(parameters.sent_as_updates(sync.steps))
        self._to_gradients([name for name in before if name not in after])

    def _to_gradients(self, names: list[str]) -> None:
        """Apply the residuals of all ranks, and average their moments, in the unit of torch's. All ranks call this."""
        residuals = self.sync.unsent.pop(names)
        for name in names:
            parameter, family = self._parameters.tensors[name], self._parameters.families.of(name)
            rule = self._rule_of_group[family.group]
            if name in residuals:
                self.sync.average([residuals[name]], DENSE)
                update = shaped(residuals[name], parameter).to(parameter.dtype)
                parameter.add_(update, alpha=-rule.rate(self.param_groups[family.group], name))
            moments = self._parameters.moments_of(name)
            self.sync.average(moments.values(), DENSE)
            if moments:
                rule.to_torch(name, moments)
            rule.forget([name])

    # States: saved as torch does, consolidated, and loaded from thinwire's or torch's optimizer.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, as torch does, with the synchronizer's state under "thinwire".

        Every rank saves its own state. After `consolidate_state_dict`, and until the next step, that of its rank has
        the states of all ranks inside.
        """
        if self._gathered is not None:
            complete = checkpoint.consolidated(self._gathered, self.sync.rank)
            return {**complete, "param_groups": super().state_dict()["param_groups"]}  # a scheduler may have stepped
        self.state.update(states.kept_by_torch(self._parameters))
        packed = super().state_dict()
        self.state.clear()  # otherwise it would keep vectors that have moved
        own = states.own_state(self._parameters, self._rules.values(), type(self).__name__)
        return {**packed, "thinwire": own}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send the states of all ranks to rank `to`, whose next `state_dict()` then has all of them, in CPU memory.

        All ranks call this. It holds until the next step, and the other ranks' `state_dict()` is their own as before.
        """
        if self._sharded is not None:
            raise ValueError(
                "one rank cannot hold the states of all shards: save thinwire.per_rank(optimizer) by "
                "torch.distributed.checkpoint, on all ranks"
            )
        self._gathered = None
        self._gathered = self.sync.gather(self.state_dict(), to, self._parameters.device)

    def torch_state_dict(self) -> dict[str, Any]:
        """Return a state for torch's optimizer of the same name, the same on all ranks. All ranks call this.

        Moments that differ between ranks are averaged, dense, and in the unit of torch's. Residuals are left out.
        """
        return states.for_torch(self._parameters, self._rule_of_group, type(self).__name__)

    def load_state_dict(self, state_dict: checkpoint.States, *, strict: bool = True) -> None:
        """Load the state of this rank, a consolidated state, or a list of the states of all ranks.

        Another number of ranks needs one of the last two. The state of torch's optimizer of the same name, for the same
        parameters in the same order, is taken too: training goes on with its moments, and with the warm-up. With
        `strict=False`, ranks whose states are missing lose residuals and momenta, and a warning names them.
        """
        parameters, rules, kind = self._parameters, self._rule_of_group, type(self).__name__
        if isinstance(state_dict, Mapping) and states.is_from_torch(state_dict):
            loaded = states.read_from_torch(state_dict, parameters, rules, kind)
            self.sync.reset()
        else:
            given = states.states_of(state_dict, kind)
            own = [state["thinwire"] for state in given]
            choice = checkpoint.choose(own, self.sync.rank, self.sync.world_size, strict=strict)
            loaded = states.read(given, choice, parameters, rules, kind)
            self.sync.load_state_dict(own, choice=choice)  # checks everything before it changes anything
        super().load_state_dict({"state": {}, "param_groups": loaded.groups})
        parameters.load_moments(loaded.moments)
        self._gathered = None
        for family in parameters.families.all:
            family.steps = loaded.steps
        for take in loaded.take:
            take()


def policy_of(compressor: Spec | Policy, warmup_steps: int, warmup: Spec) -> Policy:
    """Return a policy with the optimizer's warm-up, unless it has its own. Raise ValueError for steps below 0."""
    if type(warmup_steps) is not int or warmup_steps < 0:
        raise ValueError(f"warmup_steps {warmup_steps!r}, expected a whole number, 0 or more")
    phases = ((warmup_steps, parsed(warmup)),) if warmup_steps else ()
    if not isinstance(compressor, Policy):
        return Policy(compressor, warmup=phases)
    return compressor if compressor.warmup else replace(compressor, warmup=phases)


def dense_policy(policy: Policy) -> Policy:
    """Return a policy that compresses nothing, for a process without others."""
    none: dict[str, Any] = {"compressor": "none", "small_compressor": "none", "overrides": {}, "warmup": ()}
    return replace(policy, **none)


def _unscaled(gradient: Tensor, factor: float) -> Tensor:
    wide = residual_dtype(gradient.dtype)
    return gradient if factor == 1.0 and gradient.dtype == wide else gradient.to(wide).mul_(factor)
