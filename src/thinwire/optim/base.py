"""Base of the optimizers: local momentum, updates sent instead of gradients, and steps that may be skipped.

After the warm-up, each rank sends its update, made from its own gradients. In the warm-up, and always for small
tensors, it sends the gradient, and `step` does the same as torch's optimizer of that name.

The backward pass sends, and changes nothing. `step` waits for the exchange, and applies all of it, or nothing if a
rank's gradient was not finite.
"""

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..collectives.groups import group_of_one
from ..collectives.handle import Span
from ..compressors import compressor as parsed
from ..integrations import register_ddp_hook
from ..integrations.fsdp import BackwardPass, sharded_parameters
from ..kernels.layout import residual_dtype
from ..kernels.recording import Recording
from ..sync import checkpoint
from ..sync.buckets import Bucket, shaped
from ..sync.policy import DENSE, Policy
from ..sync.residuals import NamedVectors
from ..sync.shards import local_of
from ..sync.step import Rule, Step, Updates
from ..sync.synchronizer import Synchronizer
from .checks import check_groups, check_number, check_order, check_replicas, dense_policy, warn_of_averaged
from .families import Families, Family
from .guard import GradientGuard
from .parameters import Params, count_ddp, ddp_of, find_parameters
from .torch_states import groups_for_torch, groups_from_torch, is_from_torch

_AT_ONCE = 1 << 20  # elements that take their step together, so that there is no second copy of a model


class Piece(NamedTuple):
    """Some parameters of one family, and a tensor for each of them: its averaged gradient or update."""

    family: int
    names: list[str]
    parameters: list[Tensor]
    tensors: list[Tensor]


class CompressedOptimizer(Optimizer):
    """Base class of `AdamW` and `SGD`."""

    moments: tuple[str, ...]  # names of the vectors kept for every parameter, as in torch; the local ones come first
    local_moments: tuple[str, ...]  # those that differ between ranks
    _step_supports_amp_scaling = True  # so that GradScaler does not change `.grad`, which is sent before

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        policy: Policy,
        *,
        ddp: DistributedDataParallel | None,
        max_grad_norm: float | None,
        **options: Any,
    ) -> None:
        check_order(policy)
        groups, ddp = find_parameters(params, ddp)
        super().__init__(groups, defaults)
        for group in self.param_groups:
            # Updates are sent times lr / reference_lr, so that a residual keeps the lr of its step.
            group["reference_lr"] = float(group["lr"]) or 1.0
        self._is_alone = ddp is None and options.get("group") is None and not dist.is_initialized()
        if self._is_alone:
            options["group"], policy = group_of_one(), dense_policy(policy)
        self._ddp = None if ddp is None else weakref.ref(ddp)  # weak: DDP holds this optimizer, as its hook
        if ddp is not None and options.get("group") is None:
            options["group"] = ddp.process_group
        if max_grad_norm is not None and (not isinstance(max_grad_norm, (int, float)) or not max_grad_norm > 0):
            raise ValueError(f"max_grad_norm {max_grad_norm!r}, expected a number above 0, or None")
        self.max_grad_norm = max_grad_norm
        self._families = Families([group["param_names"] for group in self.param_groups])
        self._given = dict(self.named_parameters())
        self._exchanged = {name for name, parameter in self._given.items() if parameter.requires_grad}  # by DDP
        self._sharded = sharded_parameters(self._given, options.get("group"))
        self._parameters: Mapping[str, Tensor] = self._given if self._sharded is None else self._sharded.tensors
        shards = None if self._sharded is None else self._sharded.group
        self.sync = Synchronizer(policy, families=self._families.number_of, shards=shards, **options)
        self._vectors = {kind: NamedVectors() for kind in self.moments}
        self._gradients_in_phase: dict[Hashable, set[str]] = {}
        self._count = 0  # of steps taken
        self._guard = GradientGuard(self._given, type(self).__name__)
        self._searched: int | None = None  # the `count_ddp` at which the parameters were last searched in DDP models
        self._gathered: list[dict[str, Any]] | None = None  # after `consolidate_state_dict`, until the next step
        self._recording: Recording | None = None  # of the GPU work of `step`
        self.sync.register_parameters(self._parameters.items())
        self._backward: BackwardPass | None = None  # of a sharded model, which sends the buckets
        if self._sharded is not None and not self._sharded.is_offloaded:
            self._backward = BackwardPass(self._sharded, self)
        if ddp is not None:
            register_ddp_hook(ddp, self)

    @property
    def ddp(self) -> DistributedDataParallel | None:
        return None if self._ddp is None else self._ddp()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"a thinwire.{type(self).__name__} cannot be copied or pickled: save its state_dict()")

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        for group in self.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "sync"):
            raise ValueError("parameter groups cannot be added after construction: make a new optimizer with all")
        super().add_param_group(param_group)
        self._check_settings(self.param_groups[-1])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as torch does, and drop a step that was sent but not applied."""
        super().zero_grad(set_to_none)
        self._forget_sent()
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
            self.watch_gradients()
            return
        named = list(self.named_parameters())
        made = count_ddp()  # to search takes long, so only after another one was made
        if self._searched != made and ddp_of([p for _, p in named]) is not None:
            raise RuntimeError(
                "the model was wrapped in DistributedDataParallel after this optimizer was made, so DDP has sent the "
                f"gradients too, dense: make thinwire.{type(self).__name__} after DistributedDataParallel(model)"
            )
        self._searched = made
        if self._is_first_exchange:
            check_replicas(self.sync, named)
            warn_of_averaged(self.sync, named, type(self).__name__)
        for bucket, first, last in self.sync.buckets_of(named):
            self.add_bucket(bucket, first=first, last=last)
        self.watch_gradients()

    def _forget_sent(self) -> None:
        self._guard.forget()
        if self._sharded is not None:
            self._sharded.forget_buckets()

    @property
    def _is_first_exchange(self) -> bool:
        return self.sync.steps == 0 and self.sync.stats.skipped == 0 and self.sync.world_size > 1

    def add_bucket(self, bucket: Bucket, *, first: bool, last: bool) -> None:
        """Send one bucket of gradients, which are only read."""
        self._check_frozen(bucket)
        if first:
            self._check_begin()
            if self._sharded is not None and self._is_first_exchange:
                check_replicas(self.sync, list(self._parameters.items()))
            self.sync.begin(bucket.tensor.device, self._updates(bucket.tensor.device))
        self.sync.send(bucket, last=last)

    def watch_gradients(self) -> None:
        self._guard.record()

    def end_backward(self, error: Exception | None) -> None:
        """End the backward pass of a sharded model, after all gradients were sent; raise the error of the pass."""
        if error is not None:
            raise error
        self.watch_gradients()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step; if a rank's gradient was not finite, nothing changes on any rank."""
        loss = None
        self._gathered = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with self.sync.reporting(next(iter(self._parameters.values())).device):
                sent = self._collect()
        except BaseException:
            self._remove_scaler_attributes()
            raise
        if sent.finite:
            self._count += 1
            self._apply(sent)
        self.sync.count(sent)
        if sent.finite:
            self._after_step(sent)
            self._follow_choice()
        else:
            self._report_to_scaler()
        return loss

    def _updates(self, device: torch.device) -> Updates:
        scaler, number = self.sync.grad_scaler, self.sync.steps
        warms_up = self._warms_up(number)
        return Updates(
            warms_up=warms_up,
            rules=[self._rule(family) for family in self._families.all],
            moments=list(self._vectors.values()),
            scale=float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0,
            # If the gradients of P ranks have independent noise, the norm of their average is smaller by sqrt(P).
            max_norm=None if self.max_grad_norm is None else self.max_grad_norm * self.sync.world_size**0.5,
            sampled=self._sampled_names(number, warms_up),
        )

    def _sampled_names(self, number: int, warms_up: bool) -> frozenset[str]:
        return frozenset()

    @property
    def skipped(self) -> int:
        return self.sync.stats.skipped

    # Defined by subclasses.

    @abstractmethod
    def _check_settings(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError for a setting of a parameter group that cannot be."""

    @abstractmethod
    def _rule(self, family: Family) -> Rule:
        """Return the rule by which the step that begins makes updates from gradients of a family."""

    @abstractmethod
    def _step_by_gradients(self, piece: Piece) -> None:
        """Take the step of torch's optimizer; gradients have the dtype of the moments."""

    @abstractmethod
    def _step_by_updates(self, piece: Piece) -> None:
        """Apply the averaged updates, and everything else that a step does to a parameter."""

    def _rate_of(self, group: dict[str, Any], name: str) -> float:
        return float(group["reference_lr"])

    def _to_updates(self, names: Collection[str]) -> None:
        """Convert the moments of parameters that are sent as updates from now on."""

    def _to_torch(self, name: str, moments: dict[str, Tensor]) -> None:
        """Convert averaged moments of a parameter that is sent as updates to those of torch's optimizer, in place."""

    def _begin_from_torch(self, steps: Mapping[str, int]) -> None:
        """Prepare for the first step with moments of torch's optimizer; `steps` were taken by each parameter."""

    def _steps_of(self, name: str) -> int:
        return self._count

    def _after_step(self, sent: Step) -> None:
        """Finish a step that was taken; this is called after the step was counted."""
        if sent.warms_up and not self._warms_up(self.sync.steps):
            self._to_updates(self._sent_as_updates(self.sync.steps))

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
                raise RuntimeError(f"no gradients were exchanged since the last step: {self._why_not_exchanged()}")
            if self._backward is not None:
                raise RuntimeError(
                    "no gradients were exchanged since the last step: the last backward pass before step() must be the "
                    "sharded model's, after set_requires_gradient_sync(True). get_optimizer_state_dict and "
                    "set_optimizer_state_dict would lose residuals, and are not for this optimizer: save "
                    "thinwire.per_rank(optimizer), and load thinwire.load_per_rank(..., owner=optimizer)"
                )
            self.exchange()
        self._check_gradients()
        self._forget_sent()
        return self.sync.collect()

    def _apply(self, sent: Step) -> None:
        """Apply a step; on a GPU by a recording, once the work has been the same for a few steps."""
        key = self._recording_key(sent)
        if key is None:
            self._apply_slices(sent)
            return
        if self._recording is None:
            assert self.sync.recorder is not None
            self._recording = self.sync.recorder.new_recording()
        started = time.perf_counter()
        if self._recording.run(key, lambda: self._apply_slices(sent)):
            sent.reports[-1].spans.append(Span("decode", started, time.perf_counter()))

    def _recording_key(self, sent: Step) -> Hashable:
        """Return everything that applying this step depends on; None if it cannot be recorded."""
        return None

    def _apply_slices(self, sent: Step) -> None:
        """Apply the slices one after the other, because their averages use the same memory."""
        assert sent.updates is not None
        unscale = 1.0 / sent.updates.scale
        for is_update, parts in sent.averages():
            named = (
                (name, self._parameters[name], shaped(part, self._parameters[name]))
                for name, part in parts
                if self._given[name].grad is not None or bool(part.any())  # otherwise no rank has used it
            )
            for piece in _pieces(named, self._families.number_of):
                if is_update:
                    self._step_by_updates(piece)
                else:
                    gradients = [_unscaled(part, unscale) for part in piece.tensors]
                    self._step_by_gradients(piece._replace(tensors=gradients))

    def _follow_choice(self) -> None:
        """Make the choice of "auto" if it is due: parameters may be dense from now on that were sent as updates."""
        if not self.sync.policy.auto or self.sync.choice is not None:
            return
        before = self._sent_as_updates(self.sync.steps - 1)
        self.sync.assignment.choose_if_due(
            self.sync.peers, self.sync.steps, next(p.device for _, p in self.named_parameters())
        )
        after = set(self._sent_as_updates(self.sync.steps))
        self._to_gradients([name for name in before if name not in after])

    def _sent_as_updates(self, step: int) -> list[str]:
        """Return the names of parameters whose updates are sent at a step."""
        if self._warms_up(step):
            return []
        by_gradient = self._sent_as_gradients(step)
        return [name for name, _ in self.named_parameters() if name not in by_gradient]

    def _sent_as_gradients(self, step: int) -> set[str]:
        """Return the parameters whose gradients are sent, beside updates of others; kept by phase."""
        policy = self.sync.policy
        key = policy.phase(step), self.sync.dense
        if policy.auto or key not in self._gradients_in_phase:
            sends_dense, is_small = self.sync.assignment.sends_dense, policy.is_small
            sizes = [(name, p.numel()) for name, p in self.named_parameters()]
            found = {name for name, size in sizes if is_small(name, size) or sends_dense(name, size, step)}
            self._gradients_in_phase[key] = found
        return self._gradients_in_phase[key]

    def _to_gradients(self, names: Sequence[str]) -> None:
        """Apply the residuals of all ranks, and average their moments, in the unit of torch's. All ranks call this."""
        residuals = self.sync.unsent.pop(names)
        for name in names:
            parameter, group = self._parameters[name], self._group_of(self._families.number_of[name])
            if name in residuals:
                self.sync.average([residuals[name]], DENSE)
                update = shaped(residuals[name], parameter).to(parameter.dtype)
                parameter.add_(update, alpha=-self._rate_of(group, name))
            moments = {kind: vectors[name] for kind, vectors in self._vectors.items() if name in vectors}
            self.sync.average(moments.values(), DENSE)
            if moments:
                self._to_torch(name, moments)

    def _group_of(self, family: int) -> dict[str, Any]:
        return self.param_groups[self._families.all[family].group]

    def _rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"]) / float(group["reference_lr"])

    def _moment(self, kind: str, name: str, parameter: Tensor) -> Tensor:
        vectors = self._vectors[kind]
        if name not in vectors:
            vectors.slice([name], sizes=[parameter.numel()], dtype=parameter.dtype, device=parameter.device)
        return shaped(vectors[name], parameter)

    # States: saved as torch does, consolidated, and loaded from thinwire's or torch's optimizer.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, as torch does, with the synchronizer's state under "thinwire".

        Every rank saves its own state. After `consolidate_state_dict`, and until the next step, that of its rank has
        the states of all ranks inside.
        """
        if self._gathered is not None:
            complete = checkpoint.consolidated(self._gathered, self.sync.rank)
            return {**complete, "param_groups": super().state_dict()["param_groups"]}  # a scheduler may have stepped
        for name, parameter in self.named_parameters():  # as torch does: views in the shapes of the parameters
            like = self._parameters[name]
            kept = {kind: shaped(vectors[name], like) for kind, vectors in self._vectors.items() if name in vectors}
            if kept:
                self.state[parameter] = {"step": torch.tensor(float(self._steps_of(name))), **kept}
        packed = super().state_dict()
        self.state.clear()  # otherwise it would keep vectors that have moved
        return {**packed, "thinwire": {**self.sync.state_dict(), **self._own_state()}}

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
        device = next(p.device for _, p in self.named_parameters())
        self._gathered = self.sync.gather(self.state_dict(), to, device)

    def torch_state_dict(self) -> dict[str, Any]:
        """Return a state for torch's optimizer of the same name, the same on all ranks. All ranks call this.

        Moments that differ between ranks are averaged, dense, and in the unit of torch's. Residuals are left out.
        """
        numbers = {name: number for number, (name, _) in enumerate(self.named_parameters())}
        apart = set(self._sent_as_updates(self.sync.steps))
        state: dict[int, dict[str, Tensor]] = {}
        for name in self._parameters:
            own = {kind: vectors[name] for kind, vectors in self._vectors.items() if name in vectors}
            if not own:
                continue
            moments = {kind: self.sync.mean_of(m) if name in apart else m.clone() for kind, m in own.items()}
            if name in apart:
                self._to_torch(name, moments)
            shapes = {kind: shaped(moment, self._parameters[name]) for kind, moment in moments.items()}
            if self.sync.shards is not None:
                shapes = {kind: self.sync.shards.distributed(name, moment) for kind, moment in shapes.items()}
            state[numbers[name]] = {"step": torch.tensor(float(self._steps_of(name))), **shapes}
        return {"state": state, "param_groups": groups_for_torch(self.param_groups, type(self).__name__)}

    def _load_torch_state(self, state_dict: Mapping[str, Any]) -> None:
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

    def load_state_dict(self, state_dict: checkpoint.States, *, strict: bool = True) -> None:
        """Load the state of this rank, a consolidated state, or a list of the states of all ranks.

        Another number of ranks needs one of the last two. The state of torch's optimizer of the same name, for the same
        parameters in the same order, is taken too: training goes on with its moments, and with the warm-up. With
        `strict=False`, ranks whose states are missing lose residuals and momenta, and a warning names them.
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
        taken = [by_rank[int(state["rank"])] for state in choice.taken]
        if not isinstance(apart := choice.alike.get("local"), list):
            raise checkpoint.DamagedError("'local' is no list in a saved state: the checkpoint is damaged")
        loaded: dict[str, NamedVectors] = {}
        with checkpoint.reading():
            check_groups(alike["param_groups"], self.param_groups)
            try:
                for group in alike["param_groups"]:
                    self._check_settings(group)
                    check_number("reference_lr", group["reference_lr"])
                    if not group["reference_lr"]:
                        raise ValueError("reference_lr 0, expected a number above 0")
                count = int(alike["thinwire"]["count"])
                take_own_state = self._parse_own_state(alike["thinwire"])
            except checkpoint.DamagedError:
                raise
            except ValueError as error:
                raise checkpoint.DamagedError(f"{error}, in a saved state: the checkpoint is damaged") from error
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
        self.sync.load_state_dict(sync_states, choice=choice)  # checks everything before it changes anything
        super().load_state_dict({"state": {}, "param_groups": alike["param_groups"]})
        self._vectors, self._gathered, self._count = loaded, None, count
        take_own_state()

    def _own_state(self) -> dict[str, Any]:
        last = self._sent_as_updates(self.sync.steps - 1) if self.sync.steps else []
        after = set(self._sent_as_updates(self.sync.steps))
        local = [name for name in last if name in after]
        return {"optimizer": type(self).__name__, "count": self._count, "local": local}

    def _parse_own_state(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check what a subclass has saved besides, and return a function that takes it over."""
        return lambda: None

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
                wide = residual_dtype(parameter.dtype)
                made[name] = torch.empty(parameter.numel(), dtype=wide, device=parameter.device)
                shaped(made[name], parameter).copy_(kept)
        return made

    # Checks for mistakes that would stay unnoticed.

    def _check_begin(self) -> None:
        if getattr(getattr(self.ddp, "_join_config", None), "enable", False):
            raise RuntimeError(
                f"ddp.join() with thinwire.{type(self).__name__}: a rank that has no more data could not step "
                "with the others; give all ranks as many batches, or use thinwire.attach"
            )
        if self._is_alone and dist.is_initialized():
            raise RuntimeError(
                "torch.distributed was initialised after this optimizer was made, for a process without others: make "
                f"thinwire.{type(self).__name__} after init_process_group"
            )
        if self.sync.is_pending:
            raise RuntimeError(
                "a second exchange before step(): the gradients of the first were sent; exchange once per step, with "
                "DDP by no_sync() around forward and backward for all but the last, with FSDP by "
                "set_requires_gradient_sync(False); checkpoint() needs use_reentrant=False with FSDP"
            )

    def _why_not_exchanged(self) -> str:
        """Return why DDP has not sent all gradients, as far as they tell: it waits for those that are missing."""
        missing = [name for name in self._given if name in self._exchanged and self._given[name].grad is None]
        if not missing or len(missing) == len(self._exchanged):
            return (
                "the last backward pass before step() must be the DDP model's, and neither it nor its forward pass "
                "under no_sync()"
            )
        frozen = [name for name in missing if not self._given[name].requires_grad]
        named = ", ".join(map(repr, (frozen or missing)[:3])) + (" and more" if len(frozen or missing) > 3 else "")
        if frozen:
            return f"DDP waits for {named}, frozen after DistributedDataParallel(...) was made: freeze before that"
        return (
            f"DDP waits for the gradient of {named}, which this backward pass did not use: give "
            "DistributedDataParallel find_unused_parameters=True, or freeze what is not used before it is made"
        )

    def _check_frozen(self, bucket: Bucket) -> None:
        """Raise RuntimeError if DDP sends zeros for a frozen parameter, which momentum would still move."""
        frozen = next((name for name in bucket.names if not self._given[name].requires_grad), None)
        if frozen is not None:
            self.sync.drop()
            raise RuntimeError(
                f"parameter {frozen!r} was frozen after DistributedDataParallel(...) was made, which goes on to "
                "exchange it: freeze it before that, or save the state, make DDP and the optimizer anew, and load it"
            )

    def _check_gradients(self) -> None:
        """Raise RuntimeError if gradients have changed since they were sent, because the step would be wrong."""
        is_checked_by_scaler = getattr(self, "grad_scale", None) is not None
        fault = self._guard.find_fault(self.sync.pending_names, is_checked_by_scaler=is_checked_by_scaler)
        if fault is None and self._sharded is not None and (changed := self._sharded.changed()) is not None:
            fault = self._guard.changed(repr(changed))
        if fault is not None:
            self._guard.forget()
            self.sync.drop()
            raise RuntimeError(fault)

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

    def _remove_scaler_attributes(self) -> None:
        # GradScaler does so after a step; its next step would use them.
        for name in ("grad_scale", "found_inf"):
            if hasattr(self, name):
                delattr(self, name)

    def _report_to_scaler(self) -> None:
        """Report to the GradScaler that a rank's gradient was not finite, so that all ranks choose the same scale."""
        scaler = self.sync.grad_scaler
        if hasattr(self, "grad_scale") and scaler is not None:
            for found in scaler._found_inf_per_device(self).values():
                found.fill_(1.0)


def _unscaled(gradient: Tensor, factor: float) -> Tensor:
    wide = residual_dtype(gradient.dtype)
    return gradient if factor == 1.0 and gradient.dtype == wide else gradient.to(wide).mul_(factor)


def _pieces(named: Iterable[tuple[str, Tensor, Tensor]], families: Mapping[str, int]) -> Iterator[Piece]:
    unfinished: dict[int, Piece] = {}
    elements = dict.fromkeys(families.values(), 0)
    for name, parameter, tensor in named:
        number = families[name]
        piece = unfinished.setdefault(number, Piece(number, names=[], parameters=[], tensors=[]))
        piece.names.append(name)
        piece.parameters.append(parameter)
        piece.tensors.append(tensor)
        elements[number] += tensor.numel()
        if elements[number] >= _AT_ONCE:
            elements[number] = 0
            yield unfinished.pop(number)
    yield from unfinished.values()
