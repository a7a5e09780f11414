"""Synchronizer: averages compressed gradients over ranks, and owns all state that lasts from step to step.

Gradients come as buckets, from DDP's hook or from a plain loop; `step.py` implements one step. Its buckets count
together: residuals change only if every bucket is finite on every rank. Otherwise `finish` fills all gradients of the
step with NaN on every rank, and changes nothing else; thinwire's optimizers skip the step.
"""

import time
import warnings
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ..collectives import CollectiveError, PeerError, all_reduce_compressed
from ..collectives.collective import DEFAULT_COLLECTIVE, Collective
from ..collectives.groups import Group, as_group, is_ready
from ..collectives.transport.operation import refusing
from ..compressors import Compressor, format_spec
from ..compressors import compressor as parsed
from . import checkpoint
from .auto import Choice, Trials
from .buckets import Bucket, flatten, group_parameters, plain_name
from .consolidate import gather_states
from .policy import Policy, Spec, Way
from .recorded import Recorder
from .residuals import Residuals
from .shards import ShardGroup, is_sharded
from .slots import Peers, Slots
from .statistics import SyncStats
from .step import Step, Updates

SKIPPED_IN_A_ROW = 20  # more of them give a warning; a GradScaler that adjusts its scale skips fewer


class Synchronizer:
    """Averages gradients over the ranks of a group, and keeps what was not sent for the next step.

    compressor        a spec such as "topk:ratio=1/64,bits=2", a `Compressor` or a `Policy`. "default" is
                      `default_compressor`. "auto" sends the first steps by each compressor in turn, and continues with
                      the fastest; `choice` has the result and its reason.
    group             as for `all_reduce_compressed`: None, a process group, a pair of them or a mesh.
    error_feedback    False: what is not sent is lost.
    grad_scaler       the `torch.amp.GradScaler` in use, if any: residuals follow its scale.
    collective        algorithm, memory and time-out of an exchange.
    families          the number of each parameter's family, for optimizers; families are never compressed together.
    shards            the ranks that hold the shards of a sharded model; None if each rank has all of it.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> layer = torch.nn.Linear(100, 100)
    >>> layer(torch.arange(100.0)).sum().backward()
    >>> sync = Synchronizer("topk:ratio=1/100")
    >>> sync.all_reduce_gradients(layer.named_parameters())
    >>> int(layer.weight.grad.count_nonzero())  # of 10,000
    101
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        compressor: Spec | Policy,
        *,
        group: Group = None,
        error_feedback: bool = True,
        grad_scaler: GradScaler | None = None,
        collective: Collective = DEFAULT_COLLECTIVE,
        families: Mapping[str, int] | None = None,
        shards: ShardGroup | None = None,
    ) -> None:
        self.group, self.collective, self.error_feedback = as_group(group), collective, error_feedback
        self.shards = shards
        if shards is not None:
            shards.timeout = collective.timeout
        self.policy = compressor if isinstance(compressor, Policy) else Policy(compressor)
        self._families = families
        self._work_with(Residuals())
        if self.policy.by_ranks and is_ready(self.group):
            self.policy = self.policy.for_ranks(self.peers.nodes)
        if error_feedback and families is None:
            self.policy.check_order()
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise ValueError(f"grad_scaler {grad_scaler!r}, expected a torch.amp.GradScaler or None")
        self.grad_scaler = grad_scaler
        self.numels: dict[str, int] | None = None  # of every parameter; None until they are registered
        self._warned_of_skipped = False
        self._step: Step | None = None
        self.may_send_by_torch = False  # whether DDP's hook sends steps without compression by itself
        self.last_step: Step | None = None
        self.wanted_layout: list[tuple[str, ...]] = []
        """The buckets that the next step uses, if possible, as parameter names: other buckets give other bits.

        DDP rebuilds them after its first step, also in a run that resumes. So a run begins with those of the saved one,
        and any run keeps those of its first step for the second.
        """
        self._device = torch.device("cpu")  # of the parameters, for what is sent besides gradients
        self._unchecked: dict[str, int] | None = None  # numels of a loaded checkpoint, to compare with the model
        self.reset()

    def _work_with(self, unsent: Residuals) -> None:
        self.peers = Peers(self.group, self.collective.timeout)
        self.recorder: Recorder | None = None  # on a GPU
        self.slots = Slots(self.peers, self.collective, unsent, error_feedback=self.error_feedback)
        self._forget_ways()

    def _forget_ways(self) -> None:
        self._ways: dict[Hashable, Way] = {}
        self.trials: Trials | None = None  # of "auto"
        if self.policy.auto:
            steps, of_updates = self.policy.warmup_steps, self._families is not None
            self.trials = Trials(self.peers, warmup_steps=steps, of_updates=of_updates, shards=self.shards)

    def reset(self) -> None:
        self.drop()
        self._forget_ways()
        self.slots.residuals, self.stats = Residuals(), SyncStats()
        self.dense: frozenset[str] = frozenset()  # parameters that an optimizer sends dense, whatever the policy says
        self._scale = 1.0  # scale of the loss when residuals were last changed
        self._gathered: list[dict[str, Any]] | None = None  # after `consolidate_state_dict`, until the next step
        self.finite: bool | None = None
        """Whether the last step was finite on all ranks; None if not checked, as when nothing is compressed."""
        self.layout: list[tuple[str, ...]] = []  # the buckets of the last step that was not skipped, as parameter names
        self.wanted_layout, self._fresh, self._loaded = [], True, False
        """`_fresh`: before the first step, also of a checkpoint. `_loaded`: until ranks have compared their steps."""
        self._may_have_residuals = False  # whether some rank may have residuals; the same on all ranks

    # The public interface.

    def all_reduce_gradients(self, named_parameters: "nn.Module | Iterable[tuple[str, nn.Parameter]]") -> None:
        """Average `.grad` of all parameters over ranks, in place.

        Call this after backward and before `optimizer.step()`. A parameter without a gradient counts as zero.
        Afterwards the gradients are views of larger tensors.
        """
        if isinstance(named_parameters, nn.Module):
            named_parameters = named_parameters.named_parameters()
        everything = list(named_parameters)
        if not any(p.requires_grad for _, p in everything):
            return
        for bucket, first, last in self.buckets_of(everything):
            self.add_bucket(bucket, first=first, last=last)
        self.finish()

    @property
    def steps(self) -> int:
        return self.stats.steps

    @property
    def rank(self) -> int:
        return self.peers.rank

    @property
    def world_size(self) -> int:
        return self.peers.world_size

    @property
    def unsent(self) -> Residuals:
        return self.slots.residuals

    @property
    def residuals(self) -> dict[str, Tensor]:
        """Return what this rank has not sent so far, by parameter, as flat views."""
        return self.unsent.named()

    def residual_norm(self) -> float:
        """Return the norm of this rank's residuals. If it keeps growing, too little is sent."""
        return sqrt(sum(float(part.double().square().sum()) for part in self.residuals.values()))

    def average(self, tensors: Iterable[Tensor], compressor: Compressor) -> None:
        """Average tensors over ranks, in place and without residuals, and count the bytes."""
        started = time.perf_counter()
        handles = [
            all_reduce_compressed(
                each, compressor, op=dist.ReduceOp.AVG, group=self.group, async_op=True, shard_compressor=compressor,
                timeout=self.collective.timeout,
            )
            for each in tensors
        ]  # fmt: skip
        for handle in handles:
            handle.wait()
        self.stats.add_averages(handles, started)

    def mean_of(self, tensor: Tensor) -> Tensor:
        return self.peers.mean_of(tensor)

    @property
    def choice(self) -> Choice | None:
        """Return what "auto" has chosen, and why; None before that, and for other compressors."""
        return None if self.trials is None else self.trials.choice

    def way(self, step: int) -> Way:
        """Return how parameters are sent at a step; the same object as long as they are sent alike."""
        trials = self.trials
        chosen, is_trial = (None, False) if trials is None else (trials.chosen_at(step), trials.choice is None)
        key = self.policy.phase(step), chosen, is_trial, self.dense
        if key not in self._ways:
            made = self.policy.way(step, chosen, is_trial=is_trial)
            sizes = {} if self.shards is None else self.shards.numels
            self._ways[key] = replace(made, families=self._families, sizes=sizes, dense=self.dense)
        return self._ways[key]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; every rank saves its own. Tensors are not copied.

        After `consolidate_state_dict`, and until the next step, that of its rank has the states of all ranks inside.
        """
        if self._gathered is not None:
            return checkpoint.consolidated(self._gathered, self.rank)
        if self.stats.steps:
            self.peers.saves.note(self.stats.steps)
        return {
            "format": checkpoint.FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "policy": self.policy.describe(),
            "options": self._options(),
            "steps": self.stats.steps,
            "scale": self._scale,
            "entries": dict(self.numels or self._unchecked or {}),
            "layout": [list(names) for names in self.layout],
            "residuals": self.residuals,
            "owners": self.unsent.owner_states(),
            "compressor": None if self.policy.auto else format_spec(self.policy.final),
            **({} if self.trials is None else self.trials.state_dict()),
            **({} if self.shards is None else {"shard": self.shards.place}),
        }

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send the states of all ranks to rank `to`, whose next `state_dict()` then has all of them, in CPU memory.

        All ranks call this. It holds until the next step, and the other ranks' `state_dict()` is their own as before.
        """
        self._gathered = None
        self._gathered = self.gather(self.state_dict(), to, self._device)

    def gather(self, state: Mapping[str, Any], to: int, device: torch.device) -> list[dict[str, Any]] | None:
        """Return the states of all ranks by rank, in CPU memory, on rank `to`, and None on the other ranks."""
        try:
            return gather_states(state, group=self.group, device=device, to=to, timeout=self.peers.timeout_seconds)
        except PeerError as error:
            error.add_note("All ranks call consolidate_state_dict(): it must not stand behind `if rank == 0`.")
            raise

    def load_state_dict(
        self, state: checkpoint.States, *, strict: bool = True, choice: checkpoint.Choice | None = None
    ) -> None:
        """Resume from a checkpoint: the state of this rank, a consolidated state, or a list of those of all ranks.

        Another world size needs all states, whose residuals are then shared; with `strict=False` some may be lost, with
        a warning. An optimizer gives its `choice`.
        """
        self.drop()
        choice = choice or checkpoint.choose(state, self.rank, self.world_size, strict=strict)
        saved = choice.alike
        checkpoint.check_shards([choice.alike, *choice.taken], None if self.shards is None else self.shards.place)
        checkpoint.check_same("policy", saved["policy"], self.policy.describe())
        options, here = saved["options"], self._options()
        checkpoint.check_model(saved["entries"], self.numels)
        unsent = Residuals()
        with checkpoint.reading():
            checkpoint.check_same("error_feedback", options["error_feedback"], here["error_feedback"])
            for taken in choice.taken:
                checkpoint.check_lengths(taken)
            if choice.same_world and options == here and choice.taken:
                unsent.load(saved["residuals"], saved["owners"])
            else:
                unsent.load(checkpoint.merge(choice, [checkpoint.residuals_of(taken) for taken in choice.taken]))
            if self.trials is not None:
                self.trials.load_state_dict(saved, same_world=choice.same_world)
        self.slots.residuals, self._scale = unsent, float(saved["scale"])
        self._gathered = None
        self.stats, self.finite = SyncStats(steps=int(saved["steps"])), None
        self.layout = self.wanted_layout = [tuple(names) for names in saved["layout"]]
        self._fresh, self._loaded = not self.layout, True
        self._may_have_residuals = not choice.same_world or bool(saved["residuals"])
        self._unchecked = dict(saved["entries"]) if self.numels is None else None

    def _options(self) -> dict[str, Any]:
        second = self.collective.shard_compressor
        second = None if second is None else format_spec(parsed(second))
        return {"algorithm": self.collective.algorithm, "second": second, "error_feedback": self.error_feedback}

    # For integrations and optimizers.

    def register_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Register all parameters, once. Raise ValueError if they do not fit the policy or a checkpoint."""
        if self.numels is not None:
            return
        numels = {}
        for name, parameter in named:
            if is_sharded(parameter):
                raise ValueError(
                    f"parameter {name!r} is sharded, expected a plain tensor; for a model sharded by fully_shard use "
                    "thinwire.AdamW, or thinwire.attach(model, ...), with group="
                )
            if parameter.is_complex() and parameter.requires_grad:
                raise ValueError(
                    f"parameter {name!r} is complex, expected real numbers: make the parameter real, and take "
                    "torch.view_as_complex of it where it is used"
                )
            numels[name], self._device = parameter.numel(), parameter.device
        self.policy.check_patterns(numels.keys())
        if self._unchecked is not None:
            checkpoint.check_model(self._unchecked, numels)
        self.numels, self._unchecked = numels, None

    def add_bucket(self, bucket: Bucket, *, first: bool, last: bool) -> None:
        if first:
            self.begin(bucket.tensor.device)
        self.send(bucket, last=last)

    def begin(self, device: torch.device, updates: Updates | None = None) -> None:
        """Begin a step, with the settings of an optimizer if it sends updates."""
        self.drop()
        self._device = device
        if self.policy.by_ranks and self.policy.ranks is None:
            self.policy = self.policy.for_ranks(self.peers.nodes)
            self._forget_ways()
        if self._loaded:
            self._compare_steps(device)
        self._follow_scale()
        number = self.stats.steps
        if self.trials is not None:
            self.trials.begin(number, device)
        way = self.way(number)
        is_sent_by_torch = (
            self.may_send_by_torch
            and way.is_dense
            and isinstance(self.group, dist.ProcessGroup)
            and not self._may_have_residuals  # otherwise they are sent with this step, or kept if it is void
        )
        if is_sent_by_torch and not (self.last_step and self.last_step.is_sent_by_torch):
            self.mean_of(torch.zeros(1, device=device))  # names ranks that compress, which would wait in vain
        if device.type == "cuda":
            self.recorder = self.recorder or Recorder(self.slots)
            moments, numbers = ((), None) if updates is None else (updates.moments, updates.numbers)
            generations = [vectors.generation for vectors in (self.unsent, *moments)]
            self.recorder.begin([*generations, None if numbers is None else numbers.data_ptr()])
        self._step = Step(
            number,
            updates,
            way=way,
            slots=self.slots,
            recorder=self.recorder,
            shards=self.shards,
            wanted_layout=self.wanted_layout,
            is_sent_by_torch=is_sent_by_torch,
        )

    @property
    def sends_by_torch(self) -> bool:
        return self._step is not None and self._step.is_sent_by_torch

    def send(self, bucket: Bucket, *, last: bool) -> None:
        step = self._step
        assert step is not None
        try:
            for name, size in zip(bucket.names, bucket.sizes, strict=True):
                known = (self.numels or {}).get(name, size)
                if known != size:
                    raise ValueError(
                        f"parameter {name!r} has {size} elements, it had {known} before: a synchronizer is for one "
                        "model"
                    )
            step.add(bucket, last=last)
        except BaseException:
            self.drop()
            raise

    def finish(self) -> None:
        """Wait for the step, and write the averages into the gradients; raise any error of the exchange.

        If a rank's gradient was not finite, all gradients become NaN on every rank, and nothing else changes.
        """
        step = self.collect()
        step.write()
        self.count(step)

    def collect(self) -> Step:
        """Wait until the step is exchanged, and return it; raise any error. Nothing has changed so far."""
        step, self._step = self._step, None
        if step is None or not step.closed:
            raise RuntimeError("finish() without a step: add all buckets first")
        try:
            step.wait()
            if self.shards is not None:
                step.finite = self.shards.all_finite(step.finite)
        except Exception:
            step.abandon()
            raise
        except BaseException:  # Ctrl-C: the wire may still use this memory, so nothing else may
            self.slots.clear()
            raise
        return step

    @contextmanager
    def reporting(self, device: torch.device) -> Iterator[None]:
        """Report an error of the `with` block to the other shards, and to the other replicas of this shard."""
        try:
            yield
        except Exception as error:
            if self.shards is not None:
                is_theirs = error is self.shards.raised
                if is_theirs or not isinstance(error, CollectiveError):  # else all ranks of the group know it
                    for operation in self.peers.operations(device):
                        operation.refuse(str(error))
                if not is_theirs:
                    self.shards.report(error)
            raise

    def count(self, step: Step) -> None:
        """Count a step that was applied or skipped, and release it. Steps are counted only here."""
        self._gathered = None
        if self.peers.saves.noted is not None:
            self.peers.saves.check()
        tries = self.policy.auto and self.choice is None
        self.stats.add(step, warms_up=tries or step.number < self.policy.warmup_steps)
        if step.finite is not False:
            self.numels, self.layout = {**(self.numels or {}), **step.numels}, step.layout
            self.wanted_layout = self.layout if self._fresh and not step.is_sent_by_torch else []
            self._fresh = False
        if self.stats.skipped_in_a_row > SKIPPED_IN_A_ROW and not self._warned_of_skipped:
            self._warned_of_skipped = True
            warnings.warn(
                f"{self.stats.skipped_in_a_row} steps in a row were skipped, because a gradient was not finite, or "
                "too large to be squared, on some rank: training makes no progress. Look for a loss of NaN or Inf; try "
                "a lower learning rate, or max_grad_norm",
                stacklevel=3,
            )
        self.finite, self.last_step = step.finite, step
        step.release()
        self.slots.keep(step.slots_used)
        if self.recorder is not None:
            self.recorder.keep(step.slots_used)
        if step.finite is not False:
            self._may_have_residuals = not step.way.is_dense
            if step.carried:
                self.unsent.pop(step.carried)

    @property
    def is_pending(self) -> bool:
        return self._step is not None and self._step.closed

    @property
    def pending_names(self) -> Collection[str]:
        return () if self._step is None else self._step.numels

    def buckets_of(self, named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[tuple[Bucket, bool, bool]]:
        """Yield (bucket, is first, is last) without DDP. A ValueError for gradients reaches the other ranks."""
        named = [(plain_name(name), p) for name, p in named]
        trained = [(name, p) for name, p in named if p.requires_grad]
        try:
            groups = group_parameters(trained)
            self.register_parameters(named)
        except ValueError as error:
            with suppress(ValueError), refusing(self.peers.operations(trained[0][1].device)):
                raise error
            raise
        for index, group in enumerate(groups):
            yield flatten(group), index == 0, index == len(groups) - 1

    def drop(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            try:
                step.abandon()
            except BaseException:  # Ctrl-C: the wire may still use this memory, so nothing else may
                self.slots.clear()
                raise

    def follow_group(self, ranks_before: int) -> None:
        """Go on after members have changed: the share of a residual in an average over ranks stays the same."""
        self.drop()
        self.unsent.fold()
        self._work_with(self.unsent)  # which looks for the ranks anew
        self.unsent.scale(self.world_size / ranks_before, lambda name: True)
        self.policy = self.policy.for_ranks(self.world_size)

    # State from step to step.

    def _compare_steps(self, device: torch.device) -> None:
        """Raise ValueError on all ranks if they resume from checkpoints of different steps."""
        steps = torch.zeros(self.world_size, dtype=torch.float64, device=device)
        steps[self.rank] = self.stats.steps
        all_reduce_compressed(steps, "none", group=self.group, timeout=self.collective.timeout)
        if len(set(steps.tolist())) > 1:
            listed = ", ".join(f"rank {rank} at {int(step)}" for rank, step in enumerate(steps.tolist()))
            raise ValueError(f"the checkpoints that were loaded are of different steps: {listed}")
        self._loaded = False

    def _follow_scale(self) -> None:
        """Scale the residuals of gradients with the loss; residuals of updates do not depend on its scale."""
        scaler = self.grad_scaler
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0

        numels = (self.numels or {}) if self.shards is None else self.shards.numels

        def is_gradient(name: str) -> bool:
            return self._families is None or self.policy.is_small(name, numels.get(name, 0))

        if scale != self._scale:
            self.unsent.scale(scale / self._scale, is_gradient)
        self._scale = scale
