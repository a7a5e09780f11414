"""What the optimizers share: momentum on each rank, updates instead of gradients on the wire, steps that may not count.

After the warm-up, what a rank sends is its update, made of its own gradients. So `.grad` holds the average update over
ranks when the exchange is done, and `step` applies it. In the warm-up, and for small tensors always, it holds the
average gradient, and `step` does what torch's optimizer of the same name does.

The update is written over the gradient, and momentum changes when the step counts: it is worked out again from the
update, so that a step that is skipped has changed nothing, and no memory is needed for a second copy.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import checkpoint
from ..buckets import Bucket, Run
from ..collectives import all_reduce_compressed
from ..compressors import NoCompression, RandomK, TopK, format_spec
from ..integrations import register
from ..kernels.layout import residual_dtype
from ..policy import Policy, parsed
from ..residuals import NamedVectors
from ..sync import Synchronizer
from .parameters import find


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
        _check_order(policy)
        found = find(params, ddp)
        super().__init__(found.groups, defaults)
        for group in self.param_groups:
            # What is sent is an update times lr / reference_lr, so that what was not sent keeps the lr of its step.
            group["reference_lr"] = float(group["lr"]) or 1.0
        self.ddp = found.ddp
        if self.ddp is not None and options.get("group") is None:
            options["group"] = self.ddp.process_group
        self.sync = Synchronizer(policy, grad_scaler=grad_scaler, **options)
        self._families = {
            name: number for number, group in enumerate(self.param_groups) for name in group["param_names"]
        }
        self._vectors = {kind: NamedVectors() for kind in self.moments}
        self._count = 0
        """Steps taken."""
        self._exchanged = 0
        """Exchanges, of which the last was the one of the last step."""
        self._transform = _Transform(self, max_grad_norm)
        self.sync.transform = self._transform
        self.sync.entries = {name: p.numel() for name, p in self.named_parameters()}
        if self.ddp is not None:
            register(self.ddp, self.sync)

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        for group in self.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "sync"):
            raise ValueError("groups cannot be added later: make a new optimizer, and load the state of this one")
        super().add_param_group(param_group)

    def exchange(self) -> None:
        """Average over ranks now, without DDP; `step` does it unless it was done. GradScaler wants it before `step`."""
        if self.ddp is not None:
            raise ValueError("with DDP the exchange is part of the backward pass; leave exchange() out")
        if self._exchanged == 0 and self.sync.steps == 0:
            self._check_replicas()
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
        return loss

    @property
    def skipped(self) -> int:
        """Steps that were not taken, because a rank's gradient was not finite."""
        return self.sync.stats.skipped

    # What a subclass says.

    @abstractmethod
    def _send(self, run: Run, tensor: Tensor, group: dict[str, Any], factor: float) -> None:
        """Write the update over the gradient, which is to be multiplied by `factor`; change nothing else."""

    @abstractmethod
    def _commit(self, run: Run, tensor: Tensor, group: dict[str, Any]) -> None:
        """Update the momentum from the update in `tensor`."""

    @abstractmethod
    def _step_by_gradient(self, group: dict[str, Any], name: str, parameter: Tensor, gradient: Tensor) -> None:
        """As torch's optimizer would."""

    @abstractmethod
    def _step_by_update(self, group: dict[str, Any], parameter: Tensor, update: Tensor) -> None: ...

    def _after_step(self) -> None:
        """A step was taken."""

    def _warms_up(self, step: int) -> bool:
        """Whether a step is as torch's optimizer takes it: in the warm-up, until its phases become sparse."""
        policy = self.sync.policy
        phase = policy.phase(step)
        return phase < len(policy.warmup) and not isinstance(policy.warmup[phase][1], (TopK, RandomK))

    # How it goes.

    def _apply(self, group: dict[str, Any]) -> None:
        unscale = 1.0 / self._transform.scale
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if parameter.grad is None:
                continue
            goes_dense = self._transform.goes_dense(name, parameter.numel())
            if not goes_dense and not self._transform.as_gradients:
                self._step_by_update(group, parameter, parameter.grad)
                continue
            gradient = parameter.grad
            if unscale != 1.0 or gradient.dtype != residual_dtype(gradient.dtype):
                gradient = gradient.to(residual_dtype(gradient.dtype)).mul_(unscale)
            self._step_by_gradient(group, name, parameter, gradient)

    def _rate(self, group: dict[str, Any]) -> float:
        """What an update is multiplied by when it is sent; never 0, since momentum is worked out from what was sent."""
        return max(float(group["lr"]) / float(group["reference_lr"]), 1e-8)

    def _moment(self, kind: str, name: str, parameter: Tensor) -> Tensor:
        """A parameter's vector, in its shape."""
        vectors = self._vectors[kind]
        if name not in vectors:
            vectors.slice([name], [parameter.numel()], parameter.dtype, parameter.device)
        return vectors[name].view(parameter.shape)

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

    def _check_replicas(self) -> None:
        """Replicas that begin differently would stay so for ever, and nobody would notice."""
        sums = torch.stack([_digest(p) for _, p in self.named_parameters()])
        mean = sums.clone()
        all_reduce_compressed(mean, "none", op=dist.ReduceOp.AVG, group=self.sync.group, timeout=self.sync.timeout)
        apart = (sums - mean).abs() > 1e-9 * (1.0 + mean.abs())
        worst = apart.double()
        all_reduce_compressed(worst, "none", op=dist.ReduceOp.SUM, group=self.sync.group, timeout=self.sync.timeout)
        for (name, _), differs in zip(self.named_parameters(), worst.tolist(), strict=True):
            if differs:
                raise ValueError(
                    f"parameter {name!r} differs between ranks before the first step; start all ranks from the same "
                    "weights (the same seed, a broadcast, or DDP, which does it)"
                )

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Of this rank: every rank saves its own. As torch's, with the synchronizer's state under "thinwire"."""
        self._refresh_state()
        return {**super().state_dict(), "thinwire": {**self.sync.state_dict(), **self._own_state()}}

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
        _check_groups([group["param_names"] for group in alike["param_groups"]], self.param_groups)
        self.sync.load_state_dict(sync_states)  # checks everything before it changes anything
        super().load_state_dict({"state": {}, "param_groups": alike["param_groups"]})
        taken = [by_rank[int(state["rank"])] for state in choice.taken]
        apart = self._local_names(int(choice.alike["steps"])) if choice.alike["steps"] else []
        for kind in self.moments:
            vectors = _vectors_in(alike, kind)
            if kind in self.local_moments:
                local = checkpoint.merge(choice, [_vectors_in(state, kind) for state in taken])
                vectors |= {name: local[name] if name in local else torch.zeros_like(vectors[name]) for name in apart}
            self._vectors[kind] = NamedVectors()
            self._vectors[kind].load(vectors)
        self._load_own_state(alike["thinwire"])
        self._exchanged = self._exchanges()
        self._refresh_state()

    def _local_names(self, steps: int) -> list[str]:
        """Parameters whose momentum differs between ranks after so many steps: those of which updates were sent."""
        if self._warms_up(steps - 1):
            return []
        policy = self.sync.policy
        return [
            name
            for name, p in self.named_parameters()
            if not isinstance(policy.compressor_of(name, p.numel(), steps - 1), NoCompression)
        ]

    def _own_state(self) -> dict[str, Any]:
        return {"optimizer": type(self).__name__, "count": self._count}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._count = int(state["count"])

    def _refresh_state(self) -> None:
        """`state`, as torch has it: views of the vectors, in the parameters' shapes."""
        for name, parameter in self.named_parameters():
            kept = {
                kind: vectors[name].view(parameter.shape) for kind, vectors in self._vectors.items() if name in vectors
            }
            if kept:
                self.state[parameter] = {"step": torch.tensor(float(self._count)), **kept}


def _digest(parameter: Tensor) -> Tensor:
    """A sum in which places count, too."""
    flat = parameter.detach().double().view(-1)
    return flat @ torch.arange(flat.numel(), device=flat.device).remainder(1009).add(1).double()


def _check_order(policy: Policy) -> None:
    """Momentum differs between ranks once updates are sent: from then on no step may be taken by average gradients."""
    phases = [parsed(given) for _, given in policy.warmup]
    updates = [isinstance(given, (TopK, RandomK)) for given in phases]
    if True not in updates:
        return
    first = updates.index(True)
    final = parsed(policy.compressor)
    later = [given for given, update in list(zip(phases, updates, strict=True))[first:] if not update]
    if isinstance(final, NoCompression):
        later.append(final)
    if later:
        raise ValueError(
            f"{format_spec(phases[first])} before {format_spec(later[0])}: once updates are sent, gradients cannot be "
            "again; let the warm-up begin with what is not sparse, and end with what is"
        )


def _check_groups(saved: list[list[str]], here: list[dict[str, Any]]) -> None:
    if len(saved) != len(here):
        raise ValueError(f"the checkpoint has {len(saved)} parameter groups, here there are {len(here)}")
    for number, (names, group) in enumerate(zip(saved, here, strict=True)):
        if list(names) != list(group["param_names"]):
            differs = sorted(set(names) ^ set(group["param_names"])) or ["the same in another order"]
            raise ValueError(
                f"parameter group {number} of the checkpoint holds other parameters than here: {', '.join(differs[:3])}"
            )


def _vectors_in(state: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return {
        name: state["state"][number][kind]
        for name, number in zip(names, numbers, strict=True)
        if kind in state["state"].get(number, {})
    }


class _Transform:
    """The optimizer, as its synchronizer sees it."""

    def __init__(self, optimizer: CompressedOptimizer, max_grad_norm: float | None) -> None:
        if max_grad_norm is not None and (not isinstance(max_grad_norm, (int, float)) or not max_grad_norm > 0):
            raise ValueError(f"max_grad_norm {max_grad_norm!r}, expected a number above 0, or None")
        self.optimizer, self.max_grad_norm = optimizer, max_grad_norm
        self.whole = max_grad_norm is not None
        self.as_gradients, self._number = True, 0
        self.scale = 1.0
        """What GradScaler multiplied the loss by."""
        self._clip = 1.0

    def begin(self) -> bool:
        optimizer = self.optimizer
        if optimizer._exchanges() != optimizer._exchanged:
            raise RuntimeError(
                "a second exchange before step(): .grad holds an update by now, to which gradients cannot be added; "
                "exchange once a step, with DDP by no_sync() for all but the last backward pass"
            )
        scaler = optimizer.sync.grad_scaler
        self.scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
        self._clip = 1.0
        self._number = optimizer.sync.steps
        self.as_gradients = optimizer._warms_up(self._number)
        return self.as_gradients

    def goes_dense(self, name: str, numel: int) -> bool:
        """Whether this parameter was not to be compressed in the last exchange."""
        return isinstance(self.optimizer.sync.policy.compressor_of(name, numel, self._number), NoCompression)

    def look(self, buckets: Sequence[Bucket]) -> None:
        """Clip this rank's gradient. Of P ranks' gradients with independent noise the average is sqrt(P) shorter."""
        if self.max_grad_norm is None:
            return
        parts = {name: part for bucket in buckets for name, part in bucket.parts().items()}
        norms = [torch.linalg.vector_norm(parts[name], dtype=torch.float32).cpu() for name in sorted(parts)]
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) / self.scale  # the same in whatever buckets
        limit = self.max_grad_norm * self.optimizer.sync.world_size**0.5
        self._clip = min(1.0, limit / (norm + 1e-6)) if norm < float("inf") else 1.0

    def family(self, name: str) -> int:
        return self.optimizer._families[name]

    def gradient(self, tensor: Tensor) -> None:
        if self._clip != 1.0:
            tensor.mul_(self._clip)

    def before(self, run: Run, tensor: Tensor) -> None:
        group = self.optimizer.param_groups[run.family]  # type: ignore[call-overload]
        self.optimizer._send(run, tensor, group, self._clip / self.scale)

    def commit(self, run: Run, tensor: Tensor) -> None:
        self.optimizer._commit(run, tensor, self.optimizer.param_groups[run.family])  # type: ignore[call-overload]
