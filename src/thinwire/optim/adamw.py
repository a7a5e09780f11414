"""AdamW that compresses its update instead of the gradient.

Error feedback delivers an element late and in lumps. In the gradient this ruins Adam, because its second moment sees
the lumps. So each rank makes its update, momentum / sqrt(second moment), from its own gradients, and compresses it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from .. import kernels
from ..collectives.collective import DEFAULT_COLLECTIVE, Collective
from ..collectives.groups import Group
from ..kernels.reference.adam import step_by_gradients
from ..kernels.updates import AdamUpdate
from ..sync.buckets import Slice
from ..sync.policy import DEFAULT, Policy, Spec
from .base import CompressedOptimizer, policy_of
from .families import Family
from .guard import check_first, check_number, check_torch_options
from .parameters import Params
from .rule import Piece, Rule
from .second_moment import SecondMoments


class AdamW(CompressedOptimizer):
    """AdamW for slow networks: it exchanges compressed updates instead of gradients.

    params            a DDP model (exchanges overlap with the backward pass), another module, or parameters or groups of
                      them as for any optimizer. The DDP model of parameters is found; `ddp` names it if several models
                      share them. Without DDP, `step` exchanges.
    lr, betas, eps, weight_decay   as in torch. `betas` apply to everything that is sent as a gradient: the warm-up, and
                      small and excluded tensors.
    compressed_betas  the betas of compressed updates. beta1 is 0.5, not 0.9: error feedback delays an element, which
                      acts as momentum by itself, and more momentum overshoots.
    compressor        a spec, a `Compressor` or a `Policy` with all its rules. "default" is a top-k that keeps less of
                      each rank with more ranks (`default_compressor`). "auto" chooses dense, 8 bits or top-k by the
                      times of the first steps; `sync.choice` has the reason.
    warmup_steps      number of steps that send gradients, compressed by `warmup`, and do the same as torch's AdamW.
    refresh_every     number of steps between averages of the ranks' second moments; the first ones are at 16, 32, 64
                      ... steps. 0: the second moment is frozen after the warm-up, which should then have 100 steps or
                      more.
    max_grad_norm     the gradient of each rank is clipped to this times the square root of the number of ranks.
    grad_scaler       the `GradScaler` in use, if any.
    group             as for `Synchronizer`.
    collective        algorithm, memory and time-out of an exchange.
    torch_options     foreach and fused, which select one of torch's implementations of the same step, have no effect;
                      amsgrad, maximize, capturable and differentiable are accepted if they are off.

    In a process without a process group nothing is compressed, and each step is that of torch's AdamW.

    If any rank's gradient holds NaN or Inf, or is so large that its square would be infinite, `step` changes nothing on
    any rank, and `skipped` counts the step.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(200, 100)
    >>> optimizer = AdamW(model, lr=1e-3)
    >>> for _ in range(20):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 200)).square().mean().backward()
    ...     _ = optimizer.step()
    >>> optimizer.sync.steps
    20
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        compressed_betas: tuple[float, float] = (0.5, 0.999),
        compressor: Spec | Policy = DEFAULT,
        warmup_steps: int = 2,
        warmup: Spec = "quantize:bits=8",
        refresh_every: int = 500,
        max_grad_norm: float | None = None,
        ddp: DistributedDataParallel | None = None,
        group: Group = None,
        collective: Collective = DEFAULT_COLLECTIVE,
        grad_scaler: GradScaler | None = None,
        **torch_options: Any,
    ) -> None:
        check_torch_options({"amsgrad": amsgrad, **torch_options})
        policy = policy_of(compressor, warmup_steps, warmup)
        rule = AdamRule(refresh_every, policy)
        check_first(policy)
        adam = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options: dict[str, Any] = {"group": group, "collective": collective, "grad_scaler": grad_scaler}
        defaults = {**adam, "compressed_betas": compressed_betas}
        super().__init__(params, defaults, rule, policy, ddp=ddp, max_grad_norm=max_grad_norm, **options)
        self._seconds = rule.upkeep

    @property
    def second_moment_scale(self) -> dict[str, float]:
        """Return c of `second_moment.py` for every compressed tensor, as last measured and smoothed."""
        return dict(self._seconds.scales)


class AdamRule(Rule):
    """Sends m / (sqrt(v) + eps), as Adam corrects it, times lr / reference_lr; divides the average by sqrt(c)."""

    moments = ("exp_avg", "exp_avg_sq")
    local_moments = ("exp_avg",)  # v differs, too, but each rank's is an estimate of the same
    settings = ("betas", "lr", "eps", "weight_decay")
    takes_joined = True
    by_numbers = staticmethod(kernels.adam_by_numbers)

    def __init__(self, refresh_every: int, policy: Policy) -> None:
        self.upkeep: SecondMoments = SecondMoments(refresh_every, policy)

    def check(self, group: Mapping[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_number(name, group[name])
        for name in ("betas", "compressed_betas"):
            if not isinstance(group[name], (tuple, list)) or len(group[name]) != 2:
                raise ValueError(f"{name} {group[name]!r}, expected two numbers")
            for number, beta in enumerate(group[name], start=1):
                check_number(f"beta{number} of {name}", beta, below=1.0)

    def numbers(self, family: Family, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["compressed_betas"]
        first, second = family.weights  # the update divides momentum by sqrt(v) * scale + floor, as Adam corrects it
        first = beta1 * first + 1 - beta1
        # The largest part of Adam's update. A rank's could be larger if the second moment lags behind.
        limit = self.parameters.sync.world_size * max(1.0, (1 - beta1) / max(1 - beta2, 1e-12) ** 0.5)
        return {
            "beta1": beta1,
            "beta2": beta2 if self.upkeep.refresh_every else 1.0,
            "scale": first / (second or 1.0) ** 0.5,
            "floor": first * group["eps"],
            "limit": float(limit),
            "rate": float(group["lr"]) / float(group["reference_lr"]),
        }

    def update(self, slice_: Slice, moments: Sequence[Tensor], factor: float, **numbers: Any) -> AdamUpdate:
        m, v = moments
        return AdamUpdate(m, v, factor=factor, **numbers)

    def step_by_gradients(self, piece: Piece) -> None:
        m, v = (self.parameters.moments(kind, piece.names) for kind in self.moments)
        settings = {name: piece.group[name] for name in ("betas", "eps", "weight_decay")}
        step_by_gradients(piece.parameters, piece.tensors, m, v, steps=piece.steps, lr=piece.lr, **settings)

    def step_by_updates(self, piece: Piece) -> None:
        step = kernels.adam(piece.parameters[0].device).step
        step(piece.parameters, piece.tensors, keep=piece.keep, rates=piece.rates)

    def rate(self, group: Mapping[str, Any], name: str) -> float:
        """Return the factor of an averaged update: it was divided by sqrt(v), and sqrt(c v) is correct."""
        return float(group["reference_lr"] / self.upkeep.scales.get(name, 1.0) ** 0.5)

    def to_updates(self, names: Collection[str]) -> None:
        self.upkeep.to_updates(names)

    def to_torch(self, name: str, moments: dict[str, Tensor]) -> None:
        family, betas = self.parameters.families.of(name), self.parameters.group_of(name)["betas"]
        for kind, beta, weight in zip(self.moments, betas, family.weights, strict=True):
            moments[kind].mul_((1 - beta**family.steps) / (weight or 1.0))  # torch divides by 1 - beta ** steps
        moments["exp_avg_sq"].mul_(self.upkeep.scales.get(name, 1.0))
