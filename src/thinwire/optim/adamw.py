"""AdamW whose update, not whose gradient, is compressed.

Error feedback delivers an entry late and in lumps. In the gradient that ruins Adam: its second moment sees the lumps.
So each rank makes its update, momentum / sqrt(second moment), from its own gradients, and that is what is compressed.

The second moment is dense and cannot be sent every step. Each rank follows its own gradients with it, which costs no
bytes, and now and then the ranks average theirs: often while the training is young, then every `refresh_every` steps.
Second moments span many orders of magnitude, so it is their logarithms that are sent, in 4 bits each.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..buckets import Run
from ..compressors import NoCompression, Quantize, format_spec
from ..compressors import compressor as parsed
from ..kernels.updates import AdamUpdate, Update
from ..policy import Policy, Spec
from .base import CompressedOptimizer
from .settings import checked, policy_of

_BETAS, _DENSE_BETA1 = (0.5, 0.999), 0.9
_FIRST_REFRESH = 16
_SMALLEST_SHARE, _SMALLEST_FROZEN_SHARE = 1e-4, 1e-2
"""Of the mean second moment of its tensor that an entry has at least, when it is averaged; when it is frozen."""
_PIECE, _AT_ONCE = 1 << 20, 8
"""Second moments are averaged in pieces of so many entries, so many at a time: there is no second copy of all."""
_FOUR_BITS = Quantize(bits=4)


class AdamW(CompressedOptimizer):
    """torch's AdamW for slow networks: it exchanges compressed updates, not gradients.

    params         a DDP model (exchanges overlap with the backward pass), another module, or parameters and groups of
                   them as for any optimizer; with those of a DDP model give `ddp` too. Without DDP, `step` exchanges.
    lr, eps, weight_decay   as torch's. What was not sent keeps the lr of its own step.
    betas          (0.5, 0.999) by default. beta1 is not 0.9: error feedback delays an entry, which acts as momentum by
                   itself, and more on top of it overshoots. (What "auto" leaves dense has 0.9, unless betas are given.)
    compressor     a spec, a `Compressor`, a `Policy` with all its rules, or "auto": dense, 8 bits or this class's
                   default, for each bucket, by what the first steps show to be quickest; `sync.choice` says why.
    warmup_steps   steps in which gradients are sent by `warmup`, and which are those of torch's AdamW.
    refresh_every  steps from one average of the ranks' second moments to the next, but the first few come at 16, 32,
                   64 ... steps; 0: the second moment is frozen after the warm-up, which should be 100 steps or more.
    max_grad_norm  clip the gradient of each rank to this times the root of the number of ranks.
    grad_scaler    the `GradScaler` in use, if any.
    group, algorithm, second, max_bytes, timeout   as for `Synchronizer`.

    If any rank's gradient holds NaN or Inf, `step` changes nothing on any rank, and `skipped` counts it.

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

    moments = ("exp_avg", "exp_avg_sq")
    local_moments = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        compressor: Spec | Policy = "topk:ratio=1/64,bits=2",
        warmup_steps: int = 10,
        warmup: Spec = "quantize:bits=8",
        refresh_every: int = 200,
        max_grad_norm: float | None = None,
        ddp: Any = None,
        group: Any = None,
        algorithm: str = "auto",
        second: Spec | None = None,
        grad_scaler: Any = None,
        max_bytes: int | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        checked("lr", lr, 0.0, float("inf"))
        self._is_default = betas is None
        betas = _BETAS if betas is None else betas
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"betas {betas!r}, expected two numbers")
        checked("beta1", betas[0], 0.0, 1.0)
        checked("beta2", betas[1], 0.0, 1.0)
        checked("eps", eps, 0.0, float("inf"))
        checked("weight_decay", weight_decay, 0.0, float("inf"))
        if type(refresh_every) is not int or refresh_every < 0:
            raise ValueError(f"refresh_every {refresh_every!r}, expected a whole number of steps, or 0 for never")
        policy = policy_of(compressor, warmup_steps, warmup)
        first = parsed(policy.warmup[0][1]) if policy.warmup else policy.final  # auto begins with what is dense
        if (not policy.warmup or first.sparse) and not isinstance(first, NoCompression):
            raise ValueError(
                f"the first steps are those of {format_spec(first)}, but the second moment begins with gradients as "
                "they are: give warmup_steps, 10 or more, or a Policy whose warm-up begins with quantize:bits=8 or none"
            )
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, defaults, policy, ddp=ddp, max_grad_norm=max_grad_norm, grad_scaler=grad_scaler, group=group,
            algorithm=algorithm, second=second, max_bytes=max_bytes, timeout=timeout,
        )  # fmt: skip
        self.refresh_every = refresh_every
        self._squares = 0
        """Steps that the second moment has seen."""

    def _send(self, run: Run, tensor: Tensor, group: dict[str, Any], factor: float) -> Update:
        m, v = self._moments_of(run, tensor)
        scale, floor = self._divisor(group)
        limit = _limit(group, self.sync.world_size)
        beta1, beta2 = group["betas"]
        kept = beta2 if self.refresh_every else 1.0
        return AdamUpdate(m, v, beta1, factor, scale, floor, limit, self._rate(group), kept)

    def _divisor(self, group: dict[str, Any]) -> tuple[float, float]:
        """(scale, floor): momentum is divided by sqrt(v) scale + floor, with the corrections for a short past."""
        beta1, beta2 = group["betas"]
        first, second = 1 - beta1 ** (self._count + 1), 1 - beta2 ** max(1, self._squares)
        return first / second**0.5, first * group["eps"]

    def _step_by_gradients(
        self, group: dict[str, Any], names: list[str], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """torch's AdamW, operation by operation: each for all parameters, which are many and small."""
        beta1, beta2 = self._betas_of_gradients(group)
        m, v = ([self._moment(kind, *named) for named in zip(names, parameters, strict=True)] for kind in self.moments)
        torch._foreach_mul_(parameters, 1 - float(group["lr"]) * group["weight_decay"])
        torch._foreach_lerp_(m, gradients, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, 1 - beta2)
        first, second = 1 - beta1**self._count, 1 - beta2**self._count
        denominators = torch._foreach_sqrt(v)
        torch._foreach_div_(denominators, second**0.5)
        torch._foreach_add_(denominators, group["eps"])
        rate = float(group["lr"]) / first
        vectors = list(zip(parameters, m, denominators, strict=True))
        wide = [each for each in vectors if each[0].dtype == each[1].dtype]
        if wide:
            torch._foreach_addcdiv_([p for p, _, _ in wide], [m for _, m, _ in wide], [d for *_, d in wide], -rate)
        for parameter, momentum, denominator in vectors:
            if parameter.dtype != momentum.dtype:
                parameter.sub_((momentum / denominator).mul_(rate).to(parameter.dtype))

    def _betas_of_gradients(self, group: dict[str, Any]) -> tuple[float, float]:
        """What auto leaves dense is not delayed by error feedback, so nothing acts as momentum but momentum."""
        beta1, beta2 = group["betas"]
        if self.sync.choice is not None and self._is_default and group["betas"] == _BETAS:
            beta1 = _DENSE_BETA1
        return beta1, beta2

    def _step_by_updates(self, group: dict[str, Any], parameters: list[Tensor], updates: list[Tensor]) -> None:
        keep = 1 - float(group["lr"]) * group["weight_decay"]
        kernels.adam(parameters[0].device).step(parameters, updates, keep, group["reference_lr"])

    def _add(self, group: dict[str, Any], parameters: list[Tensor], updates: list[Tensor]) -> None:
        torch._foreach_add_(parameters, updates, alpha=-group["reference_lr"])

    def _after_step(self) -> None:
        warms_up = self._transform.as_gradients
        self._squares += warms_up or self.refresh_every > 0
        if warms_up and not self._warms_up(self._count):
            seconds = list(self._second_moments())
            mean = _mean_of(seconds)
            for v in seconds:
                _raise_small(v, mean, _SMALLEST_SHARE if self.refresh_every else _SMALLEST_FROZEN_SHARE)
        elif not warms_up and self._is_refresh(self._count):
            self._refresh()

    def _is_refresh(self, count: int) -> bool:
        if not self.refresh_every:
            return False
        early = _FIRST_REFRESH <= count < self.refresh_every and count & (count - 1) == 0
        return early or count % self.refresh_every == 0

    def _refresh(self) -> None:
        """Average the logarithms of the second moments over ranks."""
        pieces = [piece for v in self._second_moments() for piece in v.split(_PIECE)]
        mean = _mean_of(pieces)
        for start in range(0, len(pieces), _AT_ONCE):
            some = pieces[start : start + _AT_ONCE]
            logarithms = [_raise_small(piece, mean).log2() for piece in some]
            centres = torch.stack([logarithm.mean() for logarithm in logarithms])
            self.sync.average([centres], NoCompression())  # around which four bits are enough
            for logarithm, centre in zip(logarithms, centres, strict=True):
                logarithm.sub_(centre)
            self.sync.average(logarithms, _FOUR_BITS)
            for piece, logarithm, centre in zip(some, logarithms, centres, strict=True):
                piece.copy_(logarithm.add_(centre).exp2_())

    def _second_moments(self) -> Iterator[Tensor]:
        """Those of all parameters that are compressed from now on: the same, in the same order, on all ranks."""
        for name, parameter in self.named_parameters():
            dense = self.sync.sends_dense(name, parameter.numel(), self.sync.steps)
            if not dense and name in self._vectors["exp_avg_sq"]:
                yield self._vectors["exp_avg_sq"][name]

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "squares": self._squares}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        super()._load_own_state(state)
        self._squares = int(state["squares"])


def _raise_small(v: Tensor, mean_of_all: float, share: float = _SMALLEST_SHARE) -> Tensor:
    """Entries far below their tensor's mean, in place: near 0, they would make any later gradient a huge update.

    As those of an embedding's row whose token has not been seen. A tensor without any gradient so far is taken to be
    like the others.
    """
    mean = float(v.mean()) if v.numel() else 1.0
    return v.clamp_(min=share * (mean or mean_of_all))


def _mean_of(seconds: Sequence[Tensor]) -> float:
    total = sum(float(v.sum()) for v in seconds)
    return total / max(1, sum(v.numel() for v in seconds)) or 1.0


def _limit(group: dict[str, Any], ranks: int) -> float:
    """What a rank's part of Adam's own update cannot exceed: with a second moment that lags behind, ours could."""
    beta1, beta2 = group["betas"]
    return float(ranks * max(1.0, (1 - beta1) / max(1 - beta2, 1e-12) ** 0.5))
