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
from ..sync.step import Step
from .base import CompressedOptimizer, Params, policy_of
from .families import Family
from .guard import check_betas, check_numbers, check_torch_options
from .rule import Piece, sent_rate
from .second_moment import SecondMoments


class AdamW(CompressedOptimizer):
    """AdamW for slow networks: it exchanges compressed updates instead of gradients.

    params            a DDP model, whose backward pass sends; another module; or parameters or groups of them, whose DDP
                      model is found, or named by `ddp` if several share them. Without DDP, `step` exchanges.
    lr, betas, eps, weight_decay   as in torch; betas are for gradients: the warm-up, small and excluded tensors.
    compressed_betas  those of compressed updates. beta1 is lower: error feedback delays, as momentum does.
    compressor        a spec, a `Compressor` or a `Policy` with all its rules. "default" is `default_compressor`; "auto"
                      chooses dense, 8 bits or top-k by the times of the first steps, and `sync.choice` says why.
    warmup_steps      number of steps that send gradients, compressed by `warmup`, and do the same as torch's AdamW.
    refresh_every     number of steps between averages of the ranks' second moments; the first ones are at 16, 32, 64
                      ... 0: they are frozen after the warm-up, which should then have 100 steps or more.
    max_grad_norm     the gradient of each rank is clipped to this times the square root of the number of ranks.
    group, collective, grad_scaler   as for `Synchronizer`.
    torch_options     foreach and fused have no effect; amsgrad, maximize, capturable and differentiable must be off.

    Without a process group nothing is compressed, and each step is that of torch's AdamW. If a rank's gradient holds
    NaN or Inf, or its square would be infinite, `step` changes nothing on any rank, and `skipped` counts it.

    >>> import torch
    >>> model = torch.nn.Linear(200, 100)
    >>> optimizer = AdamW(model, lr=1e-3)
    >>> for _ in range(20):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 200)).square().mean().backward()
    ...     optimizer.step()
    >>> optimizer.sync.steps
    20
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
        self._rule, self.refresh_every = AdamRule(refresh_every, policy), refresh_every
        adam = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults = {**adam, "compressed_betas": compressed_betas}
        options: dict[str, Any] = {"group": group, "collective": collective, "grad_scaler": grad_scaler}
        super().__init__(params, defaults, self._rule, policy, ddp=ddp, max_grad_norm=max_grad_norm, **options)

    @property
    def second_moment_scale(self) -> dict[str, float]:
        """Return c of `second_moment.py` for every compressed tensor, as last measured and smoothed."""
        return dict(self._rule.scales)


class AdamRule(SecondMoments):
    """Sends m / (sqrt(v) + eps), as Adam corrects it, times lr / reference_lr; divides the average by sqrt(c)."""

    moments = ("exp_avg", "exp_avg_sq")
    local_moments = ("exp_avg",)  # v differs, too, but each rank's is an estimate of the same
    settings = ("betas", "lr", "eps", "weight_decay")
    takes_joined = True
    by_numbers = staticmethod(kernels.adam_by_numbers)

    def check(self, group: Mapping[str, Any]) -> None:
        check_numbers(group, "lr", "eps", "weight_decay")
        check_betas(group, "betas", "compressed_betas")

    def numbers(self, family: Family, group: dict[str, Any]) -> dict[str, Any]:
        (beta1, beta2), (first, second) = group["compressed_betas"], family.weights
        first = beta1 * first + 1 - beta1
        return {
            "beta1": beta1,
            "beta2": beta2 if self.refresh_every else 1.0,
            "scale": first / (second or 1.0) ** 0.5,  # Adam's corrections: momentum / (scale * sqrt(v) + floor)
            "floor": first * group["eps"],
            # Adam's largest update of all ranks; that of one could be larger, if its second moment lags behind.
            "limit": float(self.parameters.sync.world_size * max(1.0, (1 - beta1) / max(1 - beta2, 1e-12) ** 0.5)),
            "rate": sent_rate(group),
        }

    def update(self, slice_: Slice, moments: Sequence[Tensor], factor: float, **numbers: Any) -> AdamUpdate:
        m, v = moments
        return AdamUpdate(m, v, factor=factor, **numbers)

    def step_by_gradients(self, piece: Piece) -> None:
        m, v = (self.parameters.moments(kind, piece.names) for kind in self.moments)
        settings = {name: piece.group[name] for name in self.settings if name != "lr"}
        step_by_gradients(piece.parameters, piece.tensors, m, v, steps=piece.steps, lr=piece.lr, **settings)

    def step_by_updates(self, piece: Piece) -> None:
        kernel = kernels.adam(piece.parameters[0].device)
        kernel.step(piece.parameters, piece.tensors, keep=piece.keep, rates=piece.rates)

    def rate(self, group: Mapping[str, Any], name: str) -> float:
        return float(group["reference_lr"] / self.scales.get(name, 1.0) ** 0.5)  # of sqrt(c v), not sqrt(v)

    def begin(self, absent: Collection[str]) -> frozenset[str]:
        self.parameters.families.leave_out(absent)
        self.parameters.choose_dense(self.own_warmup, self.groups)
        return self.sampled() if self.refresh_every and self.parameters.sync.world_size > 1 else frozenset()

    def finish(self, step: Step) -> None:
        self.parameters.follow_weights(step, self.groups, self.own_warmup, freezes=not self.refresh_every)
        if self.refresh_every:
            self.measure(step)
        if unfrozen := self.parameters.choose_dense(self.own_warmup, self.groups):
            self.to_updates(unfrozen)
        if self.refresh_every and not step.warms_up:
            self.refresh()
