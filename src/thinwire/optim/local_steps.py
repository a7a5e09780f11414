"""Local steps: each rank trains alone for some steps, and then ranks exchange how far they have come.

A round ends after every H-th step. With common weights c, local weights w and residual e on each rank:

    d = c - w + e              sent compressed, as C(d)
    e = decay (d - C(d))
    c = c - outer(mean of C(d) over ranks)
    w = c

With one element in 64 and no outer momentum this is SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706). Dense or in
a few bits, with Nesterov momentum, it is DiLoCo (Douillard et al. 2023, arXiv 2311.08105); with Muon inside, MuLoCo
(Thérien et al. 2025, arXiv 2505.23725). Fragments that are exchanged in turn, while training goes on, are from
Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512). What differs: steps that are taken while an exchange is
under way are kept as they are, w = c + (w - w when it was sent), where that paper mixes w and c. So nothing is lost or
counted twice.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives import CollectiveError
from ..collectives.collective import DEFAULT_COLLECTIVE, Collective
from ..collectives.elastic import Change, ElasticGroup
from ..collectives.groups import Group, channels, group_of_one
from ..integrations.ddp_models import ddp_of
from ..sync import checkpoint
from ..sync.buckets import Bucket, plain_name
from ..sync.policy import Policy, Spec
from ..sync.shards import is_sharded
from ..sync.step import Step, is_finite
from ..sync.synchronizer import Synchronizer
from .base import CompressedOptimizer, dense_policy
from .fragments import Fragment, Named, Part, split
from .guard import check_numbers, check_replicas
from .membership import Membership
from .states import check_kind, check_saved, states_of

_BUFFER = "buffer: "  # begins the names of buffers
_OPTIONS = ("every", "delay", "outer_lr", "outer_momentum", "nesterov", "decay")
_KEYS = {"common", "outer", "weights", "under_way", "local_steps", "exchanged_at", "left_out", "setting"}


@dataclass
class Round:
    """An exchange that is under way."""

    fragment: Fragment
    since: int  # local steps since the fragment's last exchange
    due: int  # local steps after which it is applied
    buckets: list[Bucket]  # the differences; once the exchange has ended, their means over ranks
    is_received: bool = False
    is_void: bool = False  # whether the sum overflowed on all ranks, so that nothing changes
    error: CollectiveError | None = None  # of sending, on which the members of an `ElasticGroup` have to decide
    change: Change | None = None  # what they have decided


class LocalSteps(Optimizer):
    """Takes steps on this rank alone, and averages what all ranks have done after every H-th step.

    optimizer      a torch optimizer, or a list of several, such as Muon for matrices and AdamW for the rest.
    every          the number H of local steps in a round.
    compressor     a spec, a `Compressor` or a `Policy` for the differences.
    outer_lr, outer_momentum, nesterov   SGD by which the common weights move against the mean difference. For sparse
                   compressors leave out the momentum; for dense ones and few bits DiLoCo has (0.7, 0.9, True).
    decay          factor of the residual in every round.
    fragments      F parts of the model, one of which is exchanged every H / F steps.
    delay          number of local steps for which an exchange is under way, so that nobody waits for the network; at
                   most H / F.
    model          gives names to parameters, and its float buffers, such as those of batch norms, are averaged when a
                   round ends. Without it buffers stay local.
    group          as for `all_reduce_compressed`, or an `ElasticGroup` whose ranks may leave and join. None for all.
    offload        keep common weights and residuals in CPU memory, and compress there.
    collective     algorithm, memory and time-out of an exchange.

    It is used as an optimizer. Do not use DistributedDataParallel between the same ranks. All ranks start from the same
    weights, which is checked. A learning rate scheduler counts local steps. After a round, without fragments and delay,
    all ranks have the same weights, bit for bit; otherwise call `synchronize()` on all ranks before evaluating.

    If a rank's weights are not finite when a round ends, its difference is left out, as if it had not moved; it goes on
    from the common weights, without those moments that are not finite.

    >>> import torch, thinwire
    >>> model = torch.nn.Linear(100, 10)
    >>> optimizer = thinwire.LocalSteps(torch.optim.AdamW(model.parameters()), every=8, model=model)
    >>> for step in range(16):
    ...     model(torch.ones(100)).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> optimizer.steps, optimizer.rounds
    (16, 2)
    """

    _step_supports_amp_scaling = True  # so that a GradScaler calls `step` even if it skips, since a round may end

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        every: int,
        *,
        compressor: Spec | Policy = "topk:ratio=1/64,bits=2",
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = False,
        decay: float = 1.0,
        fragments: int = 1,
        delay: int = 0,
        model: nn.Module | None = None,
        group: Group = None,
        offload: bool = False,
        collective: Collective = DEFAULT_COLLECTIVE,
    ) -> None:
        self.optimizers = _listed(optimizer)
        named, buffers = _named(self.optimizers, model)
        _check_schedule(every, fragments, delay, len(named))
        check_numbers({"outer_lr": outer_lr}, "outer_lr")
        check_numbers({"outer_momentum": outer_momentum}, "outer_momentum", below=1.0)
        if nesterov and not outer_momentum:
            raise ValueError("nesterov with outer_momentum 0, expected a momentum above 0")
        if not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
            raise ValueError(f"decay {decay!r}, expected a number from 0 to 1")
        self.outer_lr, self.outer_momentum, self.nesterov = float(outer_lr), float(outer_momentum), nesterov
        self.every, self.delay, self.decay = every, delay, float(decay)
        policy = compressor if isinstance(compressor, Policy) else Policy(compressor)
        if policy.auto:
            raise ValueError("compressor 'auto', which chooses by the time of single steps; give one")
        if buffers:
            policy = replace(policy, exclude=(*policy.exclude, f"{_BUFFER}*"))
        if group is None and not dist.is_initialized():
            group, policy = group_of_one(), dense_policy(policy)
        self._membership = Membership(group) if isinstance(group, ElasticGroup) else None
        self._device = named[0][1].device
        self.sync = Synchronizer(policy, group=group, collective=collective)
        if self._membership is None:
            _check_ddp([p for _, p in named], group, self._device)
        self.sync.register_parameters([*named, *buffers])
        device = torch.device("cpu") if offload else None
        parts = split(named, fragments)
        self.fragments = [Fragment(part, buffers if part is parts[-1] else [], device) for part in parts]
        self._parts = [part for fragment in self.fragments for part in fragment.parts]
        self.steps = 0  # local ones
        self.left_out = 0  # number of exchanges from which this rank's difference was left out, since it was not finite
        self._round: Round | None = None
        self._gathered: list[dict[str, Any]] | None = None
        self._is_checked = self._is_made = False
        super().__init__([p for _, p in named], self.optimizers[0].defaults)
        self._is_made = True
        if self._membership is not None and self._membership.is_newcomer:
            self.load_common_state(self._membership.take_over(self.common_state, self._device, self.sync))
            self._is_checked = True

    # As an optimizer.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all inner optimizers, whose options a scheduler may change."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Ignore what the constructor of torch's class sets: the groups are those of the inner optimizers."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Accept the call of torch's constructor, and raise ValueError later: groups belong to the inner optimizers."""
        if self._is_made:
            raise ValueError("parameter groups cannot be added: make the optimizer with all, and LocalSteps after it")

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a local step; begin and end exchanges that are due."""
        if self.has_left:
            raise RuntimeError("this rank has left the group: it takes no more steps")
        self._check_start()
        self._gathered = None
        loss = self._step_here(closure)
        self.steps += 1
        if self._round is not None and self.steps >= self._round.due:
            self._end_round(self._round)
        for number, fragment in enumerate(self.fragments, start=1):
            if (self.steps - number * self.every // len(self.fragments)) % self.every == 0:
                self._begin_round(fragment, self.delay)
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange now what would be exchanged later, so that all ranks have the same weights. All ranks call this."""
        if self.has_left:
            raise RuntimeError("this rank has left the group: it has nobody to exchange with")
        self._check_start()
        if self._round is not None:
            self._end_round(self._round)
        for fragment in self.fragments:
            if fragment.exchanged_at < self.steps:
                self._begin_round(fragment, 0)

    @property
    def rounds(self) -> int:
        return self.sync.steps // len(self.fragments)

    @property
    def has_left(self) -> bool:
        return self._membership is not None and self._membership.group.has_left

    def _step_here(self, closure: Callable[[], float] | None) -> float | None:
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)  # set by a GradScaler
        if found_inf is not None and float(found_inf):
            return None
        if scale is not None:
            for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                parameter.grad.mul_(1.0 / float(scale))
        first, *others = self.optimizers
        with torch.enable_grad():
            loss = first.step(closure) if closure is not None else first.step()
            for optimizer in others:
                optimizer.step()
        return loss

    # States: of a rank in the middle of a round, and what all ranks have in common when one ends.

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: weights, inner optimizers, common weights and residual.

        Save that of every rank, at any step, or call `consolidate_state_dict` first. If no local step was taken since
        the last exchange, it can be loaded by another number of ranks. Loading it sets the weights of this rank.
        """
        if self._gathered is not None:
            return checkpoint.consolidated(self._gathered, self.sync.rank)
        if self._round is not None and self._membership is None:
            self._receive(self._round)
        elif self._round is not None:
            self._end_round(self._round)  # since members may have changed with it
        if not self.steps and not self._is_checked:  # the program may have loaded weights since this was made
            for part in self._parts:
                part.take_common()
        is_common = self._round is None and all(each.exchanged_at == self.steps for each in self.fragments)
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
                **self._common(),
                "weights": None if is_common else self._by_name(Part.local),
                "under_way": self._under_way(),
            },
        }

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send the states of all ranks to rank `to`, whose next `state_dict()` then has all of them. All ranks call."""
        self._gathered = None
        self._gathered = self.sync.gather(self.state_dict(), to, self._device)

    @torch.no_grad()
    def load_state_dict(self, state_dict: checkpoint.States, *, strict: bool = True) -> None:
        """Load the state of this rank, a consolidated state, or a list of the states of all ranks.

        Another number of ranks needs one of the last two, saved when a round had ended; each rank then goes on with the
        inner optimizer of one of them. With `strict=False`, what missing ranks had not sent is lost, with a warning.
        """
        states = states_of(state_dict, "LocalSteps")
        saved = [state["thinwire"] for state in states]
        choice = checkpoint.choose(saved, self.sync.rank, self.sync.world_size, strict=strict)
        check_kind(choice.alike, "LocalSteps")
        if lacking := {key for key in _KEYS for state in saved if key not in state}:
            raise checkpoint.DamagedError(f"{min(lacking)!r} is missing in a saved state: the checkpoint is damaged")
        checkpoint.check_same("setting", choice.alike["setting"], self._setting)
        if (choice.alike["weights"] is not None or choice.alike["under_way"]) and not choice.same_world:
            raise ValueError(
                f"a state of {choice.alike['world_size']} ranks in the middle of a round, here there are "
                f"{self.sync.world_size}: each rank has weights of its own there. Load it with as many ranks, or save "
                "when a round has ended, or after synchronize()"
            )
        tensors = {kind: self._checked(choice.alike, kind) for kind in ("common", "outer", "weights")}
        inner = next(state for state in states if state["thinwire"] is choice.alike)
        inner_states = [
            {"state": state, "param_groups": groups}
            for state, groups in zip(inner["state"], inner["param_groups"], strict=True)
        ]
        for optimizer, state in zip(self.optimizers, inner_states, strict=True):
            check_saved(state, optimizer, settings=False)  # a scheduler may have changed them
        self.sync.load_state_dict(saved, choice=choice)  # checks everything before it changes anything
        for optimizer, state in zip(self.optimizers, inner_states, strict=True):
            optimizer.load_state_dict(state)
        for fragment, exchanged_at in zip(self.fragments, choice.alike["exchanged_at"], strict=True):
            fragment.exchanged_at = int(exchanged_at)
        for part in self._parts:
            part.load(tensors["common"], tensors["outer"])
            part.set_local(part.flat(tensors["weights"]) if tensors["weights"] else part.common)
        self.steps, self.left_out = int(choice.alike["local_steps"]), int(choice.alike["left_out"])
        self._gathered = self._round = None
        if under_way := choice.alike["under_way"]:
            self._resume(under_way)

    def common_state(self) -> dict[str, Any]:
        return {
            **self._common(),
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
        for part in self._parts:
            part.load(common, momentum)
            part.set_local(part.common)
        self.steps, self.sync.stats.steps = int(state["local_steps"]), int(state["rounds"])
        for group, options in zip(self.param_groups, state["options"], strict=True):
            group.update(options)

    @property
    def _setting(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OPTIONS} | {"fragments": len(self.fragments)}

    def _common(self) -> dict[str, dict[str, Tensor]]:
        return {
            "common": self._by_name(lambda part: part.common),
            "outer": self._by_name(lambda part: part.momentum),
        }

    def _by_name(self, flat: Any) -> dict[str, Tensor]:
        found = [(part, flat(part)) for part in self._parts]
        return {name: own for part, one in found if one is not None for name, own in part.named(one).items()}

    def _under_way(self) -> dict[str, Any] | None:
        current = self._round
        if current is None:
            return None
        return {
            "fragment": self.fragments.index(current.fragment),
            "since": current.since,
            "due": current.due,
            "before": self._by_name(lambda part: part.before),
            "means": {name: mean for bucket in current.buckets for name, mean in bucket.parts().items()},
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

    # A round.

    def _begin_round(self, fragment: Fragment, delay: int) -> None:
        """Send the difference between common and local weights; with no delay, wait for the mean and apply it."""
        buckets = [part.difference(is_overlapped=delay > 0) for part in fragment.parts]
        if not all(is_finite(bucket.tensor) for bucket in buckets):
            self._leave_out(buckets)
        since, fragment.exchanged_at = self.steps - fragment.exchanged_at, self.steps
        self._round = Round(fragment, since=since, due=self.steps + delay, buckets=buckets)
        try:
            self._send(self._round)
        except BaseException:
            self._drop(self._round)
            raise
        if not delay:
            self._end_round(self._round)

    def _drop(self, current: Round) -> None:
        """Forget an exchange that failed: the next one sends the whole difference."""
        self._round = None
        current.fragment.exchanged_at -= current.since
        for part in current.fragment.parts:
            part.before = None

    def _send(self, current: Round) -> None:
        buckets, current.error = current.buckets, None
        try:
            for bucket in buckets:
                self.sync.add_bucket(bucket, first=bucket is buckets[0], last=bucket is buckets[-1])
        except CollectiveError as error:
            if self._membership is None:
                raise
            current.error = error  # the members decide on it, as if it had come while this rank waited

    def _end_round(self, current: Round) -> None:
        self._receive(current)
        self._round = None
        if current.is_void:
            current.fragment.exchanged_at -= current.since
        else:
            for part, bucket in zip(current.fragment.parts, current.buckets, strict=True):
                part.move(bucket.tensor, lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.nesterov)
        if self._membership is not None and current.change is not None:
            self._membership.follow(current.change, self.sync)
            self._membership.hand_over(self.common_state, self._device)

    def _receive(self, current: Round) -> None:
        """Wait for the means over ranks, and update the residuals; the weights do not change yet."""
        if current.is_received:
            return
        try:
            step = self._collect(current)
        except BaseException:
            self._drop(current)
            raise
        step.bytes_dense *= current.since  # dense training would have sent as much at every step
        step.bytes_dense_between_nodes *= current.since
        step.write()
        self.sync.count(step)
        current.is_received, current.is_void = True, step.finite is False
        if self.decay != 1.0 and not current.is_void:
            self.sync.unsent.scale(self.decay, current.fragment.names.__contains__)

    def _resume(self, under_way: Mapping[str, Any]) -> None:
        fragment = self.fragments[under_way["fragment"]]
        for part in fragment.parts:
            part.before = part.flat(under_way["before"])
        self._round = Round(
            fragment,
            since=int(under_way["since"]),
            due=int(under_way["due"]),
            buckets=[part.bucket(part.flat(under_way["means"])) for part in fragment.parts],
            is_received=True,
            is_void=bool(under_way["is_void"]),
        )

    def _collect(self, current: Round) -> Step:
        """Return the exchange that has ended; where ranks may leave, repeat it until it counts for all members."""
        if self._membership is None:
            return self.sync.collect()
        while True:
            step, error = None, current.error
            try:
                step = self.sync.collect() if error is None else None
            except CollectiveError as found:
                error = found
            change = self._membership.agree(error)
            if change.counts:
                assert step is not None  # no rank decides so before all have received everything
                current.change = change
                return step
            if step is not None:
                step.abandon()
            self._membership.follow(change, self.sync)
            self._send(current)

    # Ranks that are not finite, and ranks that come and go.

    def _leave_out(self, buckets: Sequence[Bucket]) -> None:
        """Send no difference, and go on from the common weights, in all fragments: one NaN has reached them all."""
        self.left_out += 1
        if self.left_out == 1:
            warnings.warn(
                f"the weights of rank {self.sync.rank} are not finite after {self.steps} local steps: they are left "
                "out of the average, and this rank goes on from the common weights; a GradScaler or a lower learning "
                "rate avoids it. `left_out` counts how often this happens",
                stacklevel=4,
            )
        for bucket in buckets:
            bucket.tensor.zero_()
        for part in self._parts:
            part.restart()
        for optimizer in self.optimizers:
            for parameter, kept in list(optimizer.state.items()):
                if any(isinstance(t, Tensor) and t.is_floating_point() and not is_finite(t) for t in kept.values()):
                    del optimizer.state[parameter]

    def _check_start(self) -> None:
        if self._is_checked:
            return
        parts = [part for part in self._parts if not part.is_averaged]  # a forward pass has changed the others
        if not self.steps:  # the program may have loaded weights since this optimizer was made
            for part in parts:
                part.take_common()
        if self.sync.world_size > 1:
            check_replicas(self.sync, [pair for part in parts for pair in part.named(part.common).items()])
        self._is_checked = True


def _listed(given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    found = [given] if isinstance(given, Optimizer) else list(given)
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"a {type(optimizer).__name__} as optimizer, expected a torch optimizer, or a list of them"
            )
        if isinstance(optimizer, (CompressedOptimizer, LocalSteps)):
            raise ValueError(
                f"thinwire.{type(optimizer).__name__} inside LocalSteps: it exchanges at every step by itself; give "
                f"torch.optim.{'SGD' if type(optimizer).__name__ == 'SGD' else 'AdamW'}"
            )
    if not found:
        raise ValueError("an empty list of optimizers, expected one or more")
    return found


def _named(optimizers: Iterable[Optimizer], model: nn.Module | None) -> tuple[Named, Named]:
    """Return the parameters of all optimizers, and the float buffers of the model, with their names."""
    known = {} if model is None else {id(p): plain_name(name) for name, p in model.named_parameters()}
    named: dict[str, Tensor] = {}
    taken: set[int] = set()
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            names = group.get("param_names") or [f"{number}.{index}.{i}" for i in range(len(group["params"]))]
            for given, parameter in zip(names, group["params"], strict=True):
                name = known.get(id(parameter), plain_name(given))
                if id(parameter) in taken or name in named:
                    raise ValueError(f"parameter {name!r} was given to two optimizers, or two have this name")
                if is_sharded(parameter):
                    raise ValueError(
                        f"parameter {name!r} is sharded, expected a plain tensor: for FSDP2 use thinwire.AdamW, which "
                        "exchanges every step"
                    )
                taken.add(id(parameter))
                named[name] = parameter
    unused = [name for i, name in known.items() if i not in taken] if model is not None else []
    if len(unused) == len(known) and known:
        raise ValueError("no parameter of the model is in an optimizer: give the model whose parameters are trained")
    buffers = [] if model is None else [(f"{_BUFFER}{plain_name(n)}", b) for n, b in model.named_buffers()]
    return list(named.items()), [(name, buffer) for name, buffer in buffers if buffer.is_floating_point()]


def _check_schedule(every: int, fragments: int, delay: int, parameters: int) -> None:
    for name, given, least in (("every", every, 1), ("fragments", fragments, 1), ("delay", delay, 0)):
        if type(given) is not int or given < least:
            raise ValueError(f"{name} {given!r}, expected a whole number, {least} or more")
    if fragments > min(every, parameters):
        raise ValueError(
            f"fragments {fragments}, expected at most {min(every, parameters)}: one is exchanged at a step, and there "
            f"are {every} steps in a round and {parameters} parameters"
        )
    if delay > every // fragments:
        raise ValueError(
            f"delay {delay}, expected at most {every // fragments}: every {every // fragments} steps another exchange "
            f"begins (every={every}, fragments={fragments}), and one is under way at a time"
        )


def _check_ddp(parameters: Sequence[Tensor], group: Group, device: torch.device) -> None:
    """Raise ValueError if DDP averages between the same ranks at every step."""
    ddp = ddp_of(parameters)
    if ddp is None:
        return
    ours = {rank for channel in channels(group, device) for rank in channel.ranks}
    shared = ours & set(dist.get_process_group_ranks(ddp.process_group))
    if len(shared) > 1:
        raise ValueError(
            "the model is in DistributedDataParallel, which averages gradients between the same ranks at every step: "
            "give LocalSteps the plain model's parameters, or DDP a group of the ranks inside a node, and LocalSteps "
            "one of the ranks between nodes"
        )
