"""Synchronizer: averages gradients over ranks, compressed, and owns everything that lasts from step to step.

It owns the residuals (by parameter name), the policy, the statistics and the order of collectives. Gradients come as
buckets, from DDP's hook or from a plain loop, and `exchange.py` says how one step of them goes.

All buckets of a step count together: residuals change only if every bucket is finite on every rank. If not, all
gradients of the step are NaN on every rank, and nothing else has changed.
"""

import logging
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from . import checkpoint
from .auto import GRADIENTS, Choice, updates
from .buckets import Bucket, BucketPlan, Run, flatten, group_parameters, plan_bucket
from .collectives import Handle, ShardState, all_reduce_compressed
from .collectives.all_reduce import check_timeout
from .collectives.groups import check_kind, compressing_ranks, place
from .collectives.local import LocalGroup
from .collectives.plan import ALGORITHMS
from .compressors import Compressor, NoCompression, TopK, format_spec
from .compressors import compressor as parsed
from .exchange import Exchange, Transform, refuse
from .owners import Owners
from .policy import DENSE, Policy, Spec, share_bytes
from .residuals import NamedVectors
from .sync_stats import SyncStats
from .trials import Trials

_log = logging.getLogger("thinwire")

SKIPPED_IN_A_ROW = 20
"""Steps; when more are skipped, something is wrong."""


class Synchronizer:
    """Averages gradients over the ranks of a group, and keeps what was not sent for the next step.

    compressor       a spec such as "topk:ratio=1/64,bits=2", a `Compressor`, a `Policy`, "default": that of
                     `default_compressor`, or "auto": the first steps are sent by each candidate in turn, and what was
                     quickest goes on; `choice` says what and why.
    group            as for `all_reduce_compressed`: None, a process group, a pair of them or a mesh.
    algorithm        "gather", "sharded", "dense" or "auto". Small tensors take what sends the least, or "dense".
    second           what owners compress sums with, for "sharded"; by default more entries and more bits.
    error_feedback   False: what is not sent is lost.
    grad_scaler      the `torch.amp.GradScaler` in use, if any: residuals follow its scale.
    max_bytes        an error if the payloads of one step, which are held until it ends, need more memory.
    timeout          seconds for one exchange; by default that of the group.
    transform        for optimizers, which send something else than gradients.

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
        group: Any = None,
        algorithm: str = "auto",
        second: Spec | None = None,
        error_feedback: bool = True,
        grad_scaler: Any = None,
        max_bytes: int | None = None,
        timeout: float | timedelta | None = None,
        transform: Transform | None = None,
    ) -> None:
        self.policy = compressor if isinstance(compressor, Policy) else Policy(compressor)
        known = dist.is_initialized() and group is not dist.GroupMember.NON_GROUP_MEMBER
        if self.policy.by_ranks and (isinstance(group, LocalGroup) or known):
            self.policy = self.policy.for_ranks(compressing_ranks(group))
        if error_feedback and transform is None:
            self.policy.check_order()
        if self.policy.adapt_every and not error_feedback:
            raise ValueError("adapt_every without error_feedback: it is by residuals that bytes are shared")
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm {algorithm!r}, expected one of {', '.join(ALGORITHMS)}")
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes <= 0):
            raise ValueError(f"max_bytes {max_bytes!r}, expected a whole number of bytes above 0, or None")
        check_timeout(timeout)
        check_kind(group)
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise ValueError(f"grad_scaler {grad_scaler!r}, expected a torch.amp.GradScaler or None")
        self.group, self.algorithm, self.second = group, algorithm, None if second is None else parsed(second)
        self.error_feedback, self.grad_scaler = error_feedback, grad_scaler
        self.max_bytes, self.timeout = max_bytes, timeout
        self.transform = transform
        self.entries: dict[str, int] | None = None
        """Of every parameter, by name; known from the first step on, or beforehand."""
        self.wanted_layout: list[tuple[str, ...]] = []
        """The buckets that the next step is to have, if it can.

        DDP puts its buckets together anew after its first step, and other buckets are other bits. So that a run which
        goes on from a checkpoint, whose DDP begins anew, has the same bits as one that never stopped, its first step
        has the buckets of the run that was saved; and the second step of any run has the buckets of its first.
        """
        self._layout: list[tuple[str, ...]] = []
        self._vectors, self._owners = NamedVectors(), Owners()
        self._shared: Mapping[str, Compressor] = {}
        """The compressor of a parameter, where bytes are shared, or where auto tries or has chosen."""
        self._flushed = False
        """Whether nothing is owed to what auto has left dense."""
        self._trials: Trials | None = None
        if isinstance(group, LocalGroup) or known:
            self._make_trials()
        self._scale = 1.0
        """What the loss was multiplied by when residuals were last changed."""
        self._stats = SyncStats()
        self._warned_of_skipped = False
        self._finite: bool | None = None
        self._exchange: Exchange | None = None
        self._plans: dict[tuple[Any, ...], BucketPlan] = {}
        self._fresh, self._loaded = True, False
        """Before the first step, and nothing was loaded."""
        self._unchecked: dict[str, int] | None = None
        """Entries of the model of a checkpoint, until a model is there to be compared."""

    # What a caller sees.

    def all_reduce_gradients(self, named_parameters: "nn.Module | Iterable[tuple[str, nn.Parameter]]") -> None:
        """Average `.grad` of all parameters over ranks, in place: after backward, before `optimizer.step()`.

        A parameter without a gradient counts as zero. Afterwards gradients are views of larger tensors.
        """
        if isinstance(named_parameters, nn.Module):
            named_parameters = named_parameters.named_parameters()
        everything = list(named_parameters)
        named = [(name, p) for name, p in everything if p.requires_grad]
        if not named:
            return
        try:
            groups = group_parameters(named)
            self.know(everything)
        except ValueError as error:
            refuse(self, error, named[0][1].device)
            raise
        futures = [
            self.reduce(flatten(group), first=index == 0, last=index == len(groups) - 1)
            for index, group in enumerate(groups)
        ]
        self.wait()
        for future in futures:
            future.wait()

    @property
    def stats(self) -> SyncStats:
        self._account()
        return self._stats

    @property
    def steps(self) -> int:
        """Steps that counted: not those that were skipped."""
        return self.stats.steps

    @property
    def finite(self) -> bool | None:
        """Whether the last step was finite on all ranks; None if nobody looked, as when nothing is compressed."""
        self._account()
        return self._finite

    @property
    def choice(self) -> Choice | None:
        """What "auto" has chosen, for each bucket, and why; None until then, and for other compressors."""
        return None if self._trials is None else self._trials.choice

    @property
    def residuals(self) -> dict[str, Tensor]:
        """What this rank has not sent so far, by parameter: flat views."""
        return self._vectors.named()

    def residual_norm(self) -> float:
        """Of all that this rank has not sent. If it grows without end, too little is sent."""
        return sqrt(sum(float(part.double().square().sum()) for part in self.residuals.values()))

    def state_dict(self) -> dict[str, Any]:
        """Of this rank: every rank saves its own. Tensors are not copied."""
        self._account()
        return {
            "format": checkpoint.FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "policy": self.policy.describe(),
            "options": self._options(),
            "steps": self._stats.steps,
            "scale": self._scale,
            "entries": dict(self.entries or {}),
            "layout": [list(names) for names in self._layout],
            "residuals": self.residuals,
            "owners": self._owners.state_dict(),
            "shared": {name: str(made.ratio) for name, made in self._shared.items() if isinstance(made, TopK)},
            "compressor": None if self.policy.auto else format_spec(self.policy.final),
            **({} if self._trials is None else {"auto": self._trials.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a checkpoint: the state of this rank, or those of all ranks, in a list.

        With another number of ranks give all of them: what was owed to the average is then shared among the ranks here.
        """
        self._account()
        self._make_trials()
        choice = checkpoint.choose(state, self.rank, self.world_size)
        saved = choice.alike
        checkpoint.check_same("policy", saved["policy"], self.policy.describe())
        options, here = saved["options"], self._options()
        checkpoint.check_same("error_feedback", options["error_feedback"], here["error_feedback"])
        checkpoint.check_model(saved["entries"], self.entries)
        for taken in choice.taken:
            checkpoint.check_lengths(taken)
        owners = Owners()
        if choice.same_world and options == here:
            vectors = checkpoint.merge(choice, [saved["residuals"]])
            owners.load_state_dict(saved["owners"])
        else:
            vectors = checkpoint.merge(choice, [checkpoint.residuals_of(taken) for taken in choice.taken])
        self._vectors, self._owners, self._scale = vectors, owners, float(saved["scale"])
        self._stats, self._finite, self._exchange, self._plans = SyncStats(steps=int(saved["steps"])), None, None, {}
        self._layout = self.wanted_layout = [tuple(names) for names in saved["layout"]]
        self._fresh, self._loaded = not self._layout, True
        self._unchecked = dict(saved["entries"]) if self.entries is None else None
        if self._trials is None:
            shared = saved["shared"] if choice.same_world else {}
            self._shared = {name: replace(self._base(), ratio=ratio) for name, ratio in shared.items()}
        else:
            self._flushed = False
            self._trials.load_state_dict(saved["auto"])
            if not choice.same_world:  # whose links and payloads are others
                self._trials.again(self._stats.steps, list(saved["entries"]))

    def _options(self) -> dict[str, Any]:
        second = None if self.second is None else format_spec(self.second)
        return {"algorithm": self.algorithm, "second": second, "error_feedback": self.error_feedback}

    # What integrations use.

    def know(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """The model's parameters, frozen ones too; ValueError if they do not fit the policy or a checkpoint."""
        if self.entries is not None:
            return
        entries = {name: parameter.numel() for name, parameter in named}
        self.policy.check_patterns(entries.keys())
        if self._unchecked is not None:
            checkpoint.check_model(self._unchecked, entries)
        self.entries, self._unchecked = entries, None

    def reduce(self, bucket: Bucket, *, first: bool, last: bool) -> "Future[Tensor]":
        """Average one bucket of a step, in place; the future is that of its tensor."""
        if first:
            self._begin(bucket.tensor.device)
        exchange = self._exchange
        assert exchange is not None
        try:
            self._check(bucket)
            future = exchange.reduce(bucket, last=last)
        except BaseException as error:
            exchange.abandon(str(error))
            raise
        if last:
            self.entries, self._layout = {**(self.entries or {}), **exchange.entries}, exchange.shown
            self.wanted_layout = self._layout if self._fresh and not exchange.passes_on else []
            self._fresh = False
        return future

    def average(self, tensors: Iterable[Tensor], compressor: Compressor) -> None:
        """Average tensors over ranks, in place, without residuals; the bytes are counted. Waits for all of them.

        Sums are sent on by the same compressor.
        """
        handles: list[Handle] = []
        started = time.perf_counter()
        for tensor in tensors:
            handles.append(
                all_reduce_compressed(
                    tensor,
                    compressor,
                    op=dist.ReduceOp.AVG,
                    group=self.group,
                    async_op=True,
                    timeout=self.timeout,
                    second=compressor,
                )
            )
        for handle in handles:
            handle.wait()
        self._stats.add_averages(handles, started)

    def wait(self) -> None:
        """Until the step is over; raises what went wrong."""
        if self._exchange is not None:
            for handle in self._exchange.handles:
                handle.wait()
        self._account()

    @property
    def rank(self) -> int:
        return place(self.group)[0]

    @property
    def world_size(self) -> int:
        return place(self.group)[1]

    def plan(self, bucket: Bucket, exchange: Exchange) -> BucketPlan:
        """How a bucket is cut, at this step."""
        key = (bucket.names, self.policy.phase(exchange.number), exchange.as_gradients)
        made = self._plans.get(key)
        if made is None:
            compressors: list[Compressor] = [
                self.policy.compressor_of(name, size, exchange.number, self._shared)
                for name, size in zip(bucket.names, bucket.sizes, strict=True)
            ]
            families = [None if self.transform is None else self.transform.family(name) for name in bucket.names]
            small = {
                name
                for name, size, made in zip(bucket.names, bucket.sizes, compressors, strict=True)
                if self.policy.is_small(name, size) and (self.transform is not None or made != self.policy.final)
            }
            made = self._plans[key] = plan_bucket(bucket.names, bucket.sizes, compressors, families, small)
        return made

    def sends_dense(self, name: str, numel: int, step: int) -> bool:
        """Whether this parameter is not compressed at this step, which is the one under way or the next."""
        shared = self._shared if self._trials is None else self._trials.assigned(step, self.entries or {})
        return isinstance(self.policy.compressor_of(name, numel, step, shared), NoCompression)

    def sends_gradient(self, name: str, numel: int, step: int) -> bool:
        """Whether an optimizer's gradient is sent for this parameter at this step, though updates are for others."""
        return self.policy.is_small(name, numel) or self.sends_dense(name, numel, step)

    def tries_gradients(self, step: int) -> bool:
        """Whether auto tries something at this step by which an optimizer sends gradients, not updates."""
        return self._trials is not None and self._trials.tries_gradients(step)

    def choose_if_due(self, device: torch.device) -> None:
        """If the trials of "auto" are over, choose. All ranks average what they measured, so all choose alike."""
        trials, layout = self._trials, self._layout
        if trials is None or trials.choice is not None:
            return
        if self.world_size == 1:
            trials.settle("nothing is compressed, because there is one rank")
        elif trials.is_due(self.steps):
            numbers = torch.tensor(trials.numbers(layout), dtype=torch.float64)
            # A NaN, for what a rank has not measured, would end the exchange; it reaches all ranks as a count.
            known = torch.stack([numbers.nan_to_num(), numbers.isfinite().double()]).to(device)
            self.average([known], DENSE)
            total, share = known.cpu()
            trials.decide(torch.where(share > 0.999, total, torch.nan).tolist(), layout)
        if trials.choice is not None and self.rank == 0:
            _log.info("%s", trials.choice.describe())

    def take_residuals(self, names: Collection[str]) -> dict[str, Tensor]:
        """What this rank owes to these parameters, which owe nothing then: whoever takes it must deliver it."""
        self._account()
        self._owners.fold(self._vectors)
        taken = {name: part.clone() for name, part in self._vectors.named().items() if name in names}
        self._forget(taken)
        return taken

    def keep(self, run: Run, tensor: Tensor) -> tuple[Tensor | None, ShardState | None]:
        """Where what is not sent of a run is kept: by this rank, and by this rank as an owner."""
        if not self.error_feedback or not run.compressor.contracts:
            return None, None
        state = self._owners.state(run, self._vectors)
        return self._vectors.slice(run.names, run.sizes, tensor.dtype, tensor.device), state

    # From step to step.

    def _begin(self, device: torch.device) -> None:
        self._account()
        if self.policy.by_ranks and self.policy.ranks is None:
            self.policy = self.policy.for_ranks(compressing_ranks(self.group))
        self._make_trials()
        if self._loaded:
            self._compare_steps(device)
        if self._exchange is not None:
            self._exchange.abandon("its backward pass did not come to an end")
        self._follow_scale()
        number = self._stats.steps
        self._share_anew(number)
        flushes = self._follow_trials(number, device)
        transform = self.transform
        as_gradients = transform is not None and transform.begin()
        passes_on = (
            (transform is None or (self._trials is not None and device.type == "cpu"))
            and self.policy.is_dense(number, self._shared)
            and (self.group is None or isinstance(self.group, dist.ProcessGroup))
        )
        collects = bool(self.wanted_layout) or (transform is not None and transform.whole)
        self._exchange = Exchange(self, number, passes_on, as_gradients, collects, flushes)

    def _make_trials(self) -> None:
        """Make the trials of "auto", once the number of ranks is known."""
        if self.policy.auto and self._trials is None:
            candidates = GRADIENTS if self.transform is None else updates(compressing_ranks(self.group))
            self._trials = Trials(candidates, self.policy.warmup_steps)

    def _compare_steps(self, device: torch.device) -> None:
        """ValueError on all ranks if they go on from checkpoints of different steps."""
        steps = torch.zeros(self.world_size, dtype=torch.float64, device=device)
        steps[self.rank] = self._stats.steps
        all_reduce_compressed(steps, "none", group=self.group, timeout=self.timeout)
        if len(set(steps.tolist())) > 1:
            listed = ", ".join(f"rank {rank} at {int(step)}" for rank, step in enumerate(steps.tolist()))
            raise ValueError(f"the checkpoints that were loaded are of different steps: {listed}")
        self._loaded = False

    def _account(self) -> None:
        """Once the step is settled, count it."""
        exchange = self._exchange
        if exchange is not None:
            exchange.look()
        if exchange is not None and exchange.step.finite is not None:
            self._stats.add(exchange)
            self._warn_of_skipped()
            nobody_looked = exchange.passes_on and self.transform is None
            self._finite = None if nobody_looked else exchange.step.finite
            self._exchange = None
            if self._trials is not None and exchange.step.finite:
                self._trials.ended(exchange)
                if exchange.flushes:
                    self._forget(exchange.entries)

    def _warn_of_skipped(self) -> None:
        """Say once that training stands still. A GradScaler that looks for its scale skips steps, but not so many."""
        if self._stats.skipped_in_a_row > SKIPPED_IN_A_ROW and not self._warned_of_skipped:
            self._warned_of_skipped = True
            warnings.warn(
                f"{self._stats.skipped_in_a_row} steps in a row were skipped, because a gradient was not finite, or "
                "too large to be squared, on some rank: training stands still. Look for a loss that is NaN or Inf; try "
                "a lower learning rate, or max_grad_norm",
                stacklevel=4,
            )

    def _check(self, bucket: Bucket) -> None:
        if self.entries is None:
            return
        for name, size in zip(bucket.names, bucket.sizes, strict=True):
            known = self.entries.get(name)
            if known is not None and known != size:
                raise ValueError(
                    f"parameter {name!r} has {size} entries, it had {known} before: a synchronizer is for one model"
                )

    def _follow_scale(self) -> None:
        """Let residuals of gradients follow the scale of the loss; those of updates have none."""
        enabled = self.grad_scaler is not None and self.grad_scaler.is_enabled()
        scale = float(self.grad_scaler.get_scale()) if enabled else 1.0
        if scale != self._scale:
            self._vectors.scale(scale / self._scale, self._is_gradient)
            self._owners.scale(scale / self._scale, self._is_gradient)
        self._scale = scale

    def _is_gradient(self, name: str) -> bool:
        return self.transform is None or self.policy.is_small(name, (self.entries or {}).get(name, 0))

    def _share_anew(self, number: int) -> None:
        """Adaptive: share the bytes by what all ranks' residuals owe."""
        policy, after = self.policy, number - self.policy.warmup_steps
        if not policy.adapt_every or after <= 0 or after % policy.adapt_every:
            return
        sizes = {name: size for name, size in sorted((self.entries or {}).items()) if policy.adapts(name, size)}
        if sizes:
            nothing = torch.zeros(1, device=next(iter(self.residuals.values()), torch.zeros(())).device)
            owed = torch.stack([self.residuals.get(name, nothing).double().square().sum() for name in sizes])
            self.average([owed], NoCompression())
            energies = dict(zip(sizes, owed.tolist(), strict=True))
            self._shared = share_bytes(self._base(), sizes, energies)
            self._plans = {}

    def _follow_trials(self, number: int, device: torch.device) -> bool:
        """Auto: what this step is sent by. Whether it sends all that is owed, because somebody goes dense for good."""
        trials = self._trials
        if trials is None:
            return False
        self.choose_if_due(device)
        if device.type == "cuda" and trials.is_timed(number):  # else who need not wait for the device would seem quick
            torch.cuda.current_stream(device).synchronize()
        trials.begins(number)
        entries = self.entries or {}
        assigned = trials.assigned(number, entries)
        flushes = False
        if trials.choice is not None and not self._flushed:
            flushes = any(name in self._vectors and self.sends_dense(name, entries[name], number) for name in entries)
            self._flushed = not flushes
        if flushes:
            # Who has a residual, though it is sent dense; others, such as those that an optimizer has paid, stay dense.
            assigned = assigned | {name: trials.candidates[1] for name in entries if name in self._vectors}
            self._owners.fold(self._vectors)
        if assigned is not self._shared:
            self._shared, self._plans = assigned, {}
        return flushes

    def _forget(self, names: Collection[str]) -> None:
        """Free the residuals of parameters that owe nothing."""
        left = {name: part for name, part in self._vectors.named().items() if name not in names}
        self._owners.fold(self._vectors)
        self._vectors = NamedVectors()
        self._vectors.load(left)

    def _base(self) -> TopK:
        assert isinstance(self.policy.final, TopK)
        return self.policy.final
