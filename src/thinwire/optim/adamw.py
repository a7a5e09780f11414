"""AdamW that compresses its update instead of the gradient.

Error feedback delivers an element late and in lumps. In the gradient this ruins Adam, because its second moment sees
the lumps. So each rank makes its update, momentum / sqrt(second moment), from its own gradients, and compresses it.

From time to time the ranks average their second moments: often at the start of training, then every `refresh_every`
steps. They span many orders of magnitude, so their logarithms are sent, in 4 bits each. A rank's own second moment is
larger than that of the averaged gradient: `second_moment.py` describes by how much, and the correction.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from .. import kernels
from ..collectives.collective import DEFAULT_COLLECTIVE, Collective
from ..collectives.groups import Group
from ..compressors import NoCompression, Quantize, format_spec
from ..compressors import compressor as parsed
from ..kernels.updates import AdamUpdate
from ..sync.buckets import Slice
from ..sync.checkpoint import DamagedError
from ..sync.policy import DEFAULT, Policy, Spec
from ..sync.step import Rule, Step, Updates
from .base import CompressedOptimizer, Piece
from .checks import check_number, check_torch_options, policy_of
from .families import Family
from .parameters import Params
from .second_moment import for_ranks, measure

_FIRST_REFRESH = 16
TOGETHER_BYTES = {"cuda": 100 << 20}
"""Smaller buckets are sent together: each operation takes time of the CPU that launches the backward pass."""
_SMALLEST_SHARE, _SMALLEST_FROZEN_SHARE = 1e-4, 1e-2
"""Smallest share of its tensor's mean that an element's second moment has, when averaged and when frozen."""
_PIECE, _AT_ONCE = 1 << 20, 8
"""Second moments are averaged in pieces of `_PIECE` elements, a few at a time, so that there is no second copy."""
_FOUR_BITS = Quantize(bits=4)


class _DeviceNumbers:
    """Numbers of a step in GPU memory, where a recording reads them: a float32 vector that keeps its address."""

    def __init__(self) -> None:
        self._vector: Tensor | None = None

    def fill(self, numbers: Sequence[float], device: torch.device) -> Tensor:
        if self._vector is None or self._vector.numel() != len(numbers) or self._vector.device != device:
            self._vector = torch.empty(len(numbers), dtype=torch.float32, device=device)
        return self._vector.copy_(torch.tensor(numbers, dtype=torch.float32, pin_memory=True), non_blocking=True)


class _StepNumbers:
    """The numbers by which a step changes the weights, in GPU memory."""

    def __init__(self, vector: Tensor, rates: Mapping[str, Tensor]) -> None:
        self.vector, self.rates = vector, rates
        self.steps, self.lr, self.keep = (row.unbind() for row in vector.view(3, -1))
        """For each family the number of steps including this one, the learning rate, and the factor of the weights."""


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

    moments = ("exp_avg", "exp_avg_sq")
    local_moments = ("exp_avg",)

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
        if type(refresh_every) is not int or refresh_every < 0:
            raise ValueError(f"refresh_every {refresh_every!r}, expected a whole number of steps, or 0 for never")
        policy = policy_of(compressor, warmup_steps, warmup)
        first = parsed(policy.warmup[0][1]) if policy.warmup else policy.final  # auto begins with dense
        if (not policy.warmup or first.sparse) and not isinstance(first, NoCompression):
            raise ValueError(
                f"the first steps would send {format_spec(first)}, but the second moment needs gradients first: set "
                "warmup_steps to 1 or more, or give a Policy whose warm-up begins with quantize:bits=8 or none"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "compressed_betas": compressed_betas,
        }
        super().__init__(
            params,
            defaults,
            policy,
            ddp=ddp,
            max_grad_norm=max_grad_norm,
            grad_scaler=grad_scaler,
            group=group,
            collective=collective,
        )
        self.refresh_every = refresh_every
        self._scales: dict[str, float] = {}  # c of `second_moment.py`, where second moments are those of this rank
        phases = takewhile(lambda phase: not parsed(phase[1]).sparse, policy.warmup)
        self._own_warmup = sum(steps for steps, _ in phases)
        """Steps of the warm-up; a parameter that is unfrozen later is sent dense for as many, as a gradient."""
        self._found: dict[str, float] = {}  # c as measured and smoothed, also of tensors that do not need it yet
        self._measures_next = False  # True if c is measured at the next step, as after resuming with another world size
        self._sent_numbers, self._step_numbers, self._rate_numbers = (_DeviceNumbers() for _ in range(3))
        self._rates: tuple[object, dict[str, Tensor]] = None, {}  # and what they were computed from
        self._on_device: _StepNumbers | None = None  # of a step that is recorded or replayed

    @property
    def second_moment_scale(self) -> dict[str, float]:
        """Return c of `second_moment.py` for every compressed tensor, as last measured and smoothed."""
        return dict(self._scales)

    def _updates(self, device: torch.device) -> Updates:
        trained = {name for name, parameter in self._given.items() if parameter.requires_grad}
        absent = self._given.keys() - (trained if self.ddp is None else self._exchanged)
        self._families.leave_out(absent)
        self._choose_dense()
        made = replace(super()._updates(device), together_bytes=TOGETHER_BYTES.get(device.type, 0))
        by_numbers = kernels.adam_by_numbers(device)
        if by_numbers is None or made.warms_up:
            return made
        families = self._families.all
        rows = [by_numbers.numbers_of(factor=1 / made.scale, **self._numbers_of(family)) for family in families]
        numbers = self._sent_numbers.fill([number for row in rows for number in row], device).view(len(rows), -1)
        rules = [self._rule(family, row) for family, row in zip(families, numbers, strict=True)]
        return replace(made, rules=rules, numbers=numbers)

    def _choose_dense(self) -> None:
        """Let parameters that were unfrozen be sent dense at the next step, if their own warm-up is not over."""
        early = {number for number, family in enumerate(self._families.all) if family.steps < self._own_warmup}
        if not early or self._warms_up(self.sync.steps):
            self.sync.dense = frozenset()
            return
        numbers, is_small = self._families.number_of, self.sync.policy.is_small
        self.sync.dense = frozenset(
            name for name, p in self._given.items() if numbers[name] in early and not is_small(name, p.numel())
        )

    def _check_settings(self, given: Mapping[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_number(name, given[name])
        for name in ("betas", "compressed_betas"):
            if not isinstance(given[name], (tuple, list)) or len(given[name]) != 2:
                raise ValueError(f"{name} {given[name]!r}, expected two numbers")
            for number, beta in enumerate(given[name], start=1):
                check_number(f"beta{number} of {name}", beta, below=1.0)

    def _recording_key(self, sent: Step) -> Hashable:
        self._on_device = None
        if sent.updates is None or sent.updates.numbers is None:
            return None
        parameters = [self._parameters[name] for name in sent.numels]
        unused = any(self._given[name].grad is None for name in sent.numels)
        if unused or any(p.dtype != torch.float32 for p in parameters) or (addresses := sent.addresses()) is None:
            return None
        self._on_device = self._numbers_of_step(sent.updates.numbers.device)
        constants = tuple((*group["betas"], group["eps"], group["weight_decay"]) for group in self.param_groups)
        moments = tuple(vectors.generation for vectors in self._vectors.values())
        places = tuple(parameter.data_ptr() for parameter in parameters)
        numbers = self._on_device.vector.data_ptr(), next(iter(self._on_device.rates.values())).data_ptr()
        return addresses, places, moments, constants, sent.updates.scale, numbers

    def _numbers_of_step(self, device: torch.device) -> _StepNumbers:
        groups = [self.param_groups[family.group] for family in self._families.all]
        steps = [family.steps + 1.0 for family in self._families.all]
        lr = [float(group["lr"]) for group in groups]
        keep = [1 - rate * group["weight_decay"] for rate, group in zip(lr, groups, strict=True)]
        return _StepNumbers(self._step_numbers.fill([*steps, *lr, *keep], device), self._rates_on(device))

    def _rates_on(self, device: torch.device) -> dict[str, Tensor]:
        """Return the rates of all parameters in GPU memory, which change only when c is measured."""
        made_from = dict(self._scales), [group["reference_lr"] for group in self.param_groups], device
        if self._rates[0] != made_from:
            rates = {name: self._rate_of(group, name) for group in self.param_groups for name in group["param_names"]}
            vector = self._rate_numbers.fill(list(rates.values()), device)
            by_name = self._rates[1]
            if not by_name or next(iter(by_name.values())).data_ptr() != vector.data_ptr():
                by_name = dict(zip(rates, vector.unbind(), strict=True))
            self._rates = made_from, by_name
        return self._rates[1]

    def _rule(self, family: Family, on_device: Tensor | None = None) -> Rule:
        """Return the rule of a family; `on_device` has its numbers, and the factor of the gradient, in GPU memory."""
        numbers = self._numbers_of(family)

        def update(_: Slice, moments: Sequence[Tensor], factor: float) -> AdamUpdate:
            m, v = moments
            return AdamUpdate(m, v, factor=factor, **numbers, on_device=on_device if m.dtype == torch.float32 else None)

        return update

    def _numbers_of(self, family: Family) -> dict[str, float]:
        """Return the numbers of the update, which divides momentum by sqrt(v) * scale + floor, as Adam corrects it."""
        group = self.param_groups[family.group]
        beta1, beta2 = group["compressed_betas"]
        first, second = family.weights
        first = beta1 * first + 1 - beta1
        return {
            "beta1": beta1,
            "beta2": beta2 if self.refresh_every else 1.0,
            "scale": first / (second or 1.0) ** 0.5,
            "floor": first * group["eps"],
            "limit": _limit(group, self.sync.world_size),
            "rate": self._rate(group),
        }

    def _step_by_gradients(self, piece: Piece) -> None:
        """Take the step of torch's AdamW; each operation handles all parameters, because they are many and small."""
        group, (number, names, parameters, gradients) = self._group_of(piece.family), piece
        beta1, beta2 = group["betas"]
        m, v = ([self._moment(kind, *named) for named in zip(names, parameters, strict=True)] for kind in self.moments)
        if self._on_device:  # all tensors are float32 then
            torch._fused_adamw_(
                parameters, gradients, m, v, [], [self._on_device.steps[number]] * len(names),
                lr=self._on_device.lr[number], beta1=beta1, beta2=beta2,
                weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
            )  # fmt: skip
            return
        torch._foreach_mul_(parameters, 1 - float(group["lr"]) * group["weight_decay"])
        torch._foreach_lerp_(m, gradients, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, 1 - beta2)
        steps = self._families.all[number].steps + 1
        first, second = 1 - beta1**steps, 1 - beta2**steps
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

    def _step_by_updates(self, piece: Piece) -> None:
        group, (number, names, parameters, updates) = self._group_of(piece.family), piece
        if self._on_device:
            by_numbers = kernels.adam_by_numbers(parameters[0].device)
            assert by_numbers is not None
            by_name, keep_on_device = self._on_device.rates, self._on_device.keep[number]
            by_numbers.step_by_numbers(parameters, updates, keep_on_device, rates=[by_name[name] for name in names])
            return
        keep = 1 - float(group["lr"]) * group["weight_decay"]
        rates = [self._rate_of(group, name) for name in names]
        kernels.adam(parameters[0].device).step(parameters, updates, keep=keep, rates=rates)

    def _rate_of(self, group: dict[str, Any], name: str) -> float:
        """Return the factor of an averaged update: it was divided by sqrt(v), and sqrt(c v) is correct."""
        return float(group["reference_lr"] / self._scales.get(name, 1.0) ** 0.5)

    def _to_gradients(self, names: Sequence[str]) -> None:
        super()._to_gradients(names)
        for name in names:
            self._scales.pop(name, None)

    def _to_torch(self, name: str, moments: dict[str, Tensor]) -> None:
        family = self._families.of(name)
        betas = self.param_groups[family.group]["betas"]
        for kind, beta, weight in zip(self.moments, betas, family.weights, strict=True):
            moments[kind].mul_((1 - beta**family.steps) / (weight or 1.0))  # torch divides by 1 - beta ** steps
        moments["exp_avg_sq"].mul_(self._scales.get(name, 1.0))

    def _steps_of(self, name: str) -> int:
        return self._families.of(name).steps

    def _begin_from_torch(self, steps: Mapping[str, int]) -> None:
        self._families.reset(steps)
        for family in self._families.all:
            beta1, beta2 = self.param_groups[family.group]["betas"]
            family.weights = 1 - beta1**family.steps, 1 - beta2**family.steps
        self._scales, self._found, self._measures_next = {}, {}, False

    def _sampled_names(self, number: int, warms_up: bool) -> frozenset[str]:
        """Return the parameters that are compressed at this step or the next, if c is measured after this step."""
        if not self.refresh_every or self.sync.world_size == 1:
            return frozenset()
        if warms_up:
            return frozenset(self._sent_as_updates(number + 1))
        family_of = self._families.number_of
        after = {number: self._families.all[number].steps + 1 for number in self._families.present}
        due = {family for family, steps in after.items() if self._measures_next or self._is_refresh(steps)}
        ends = {family for family, steps in after.items() if steps == self._own_warmup}
        sampled = {name for name in self._sent_as_updates(number) if family_of[name] in due} if due else set()
        return frozenset(sampled | {name for name in self.sync.dense if family_of[name] in ends})

    def _after_step(self, sent: Step) -> None:
        self._follow_weights(sent)
        sampled = () if sent.updates is None else sent.updates.sampled
        if sent.samples or (sampled and self.sync.shards is not None):
            self._measure(sent)
        was_dense = self.sync.dense
        self._choose_dense()
        super()._after_step(sent)
        if was_dense - self.sync.dense and not self._warms_up(self.sync.steps):
            self._to_updates(was_dense - self.sync.dense)
        due = {number for number in self._families.present if self._is_refresh(self._families.all[number].steps)}
        if due and not sent.warms_up:
            self._refresh([v for name, v in self._second_moments() if self._families.number_of[name] in due])

    def _follow_weights(self, sent: Step) -> None:
        by_gradients = sent.warms_up or not self._sent_as_updates(sent.number)
        for family in (self._families.all[number] for number in self._families.present):
            as_gradients = by_gradients or family.steps < self._own_warmup
            beta1, beta2 = self.param_groups[family.group]["betas" if as_gradients else "compressed_betas"]
            first, second = family.weights
            followed = as_gradients or self.refresh_every > 0
            family.weights = beta1 * first + 1 - beta1, beta2 * second + 1 - beta2 if followed else second
            family.steps += 1

    def _measure(self, sent: Step) -> None:
        """Measure c of all tensors that this step has sampled; the result is the mean of the old and new values."""
        assert sent.updates is not None
        # All shards measure the same parameters; a shard may have no element of one.
        names = sent.samples if self.sync.shards is None else sent.updates.sampled
        nothing = torch.zeros(0, device=next(iter(self._parameters.values())).device)
        ordered = {name: sent.samples.get(name, nothing) for name in self._parameters if name in names}
        for part in ordered.values():
            if part.is_cuda:  # it was made on the stream that encodes
                part.record_stream(torch.cuda.current_stream(part.device))
        for name, found in measure(self.sync, ordered).items():
            known = self._found.get(name)
            self._found[name] = found if known is None else (known + found) / 2
        self._measures_next = False
        if not sent.warms_up:  # second moments of sampled tensors are this rank's own by now, if they are compressed
            compressed = (name for name in ordered if name not in self.sync.dense)
            self._scales |= {name: self._found[name] for name in compressed if name in self._found}

    def _to_updates(self, names: Collection[str]) -> None:
        """Convert second moments to those of a rank's own gradient, and raise elements that are too small."""
        seconds = {name: v for name, v in self._second_moments() if name in names}
        mean = _mean_of(list(seconds.values()))
        for name, v in seconds.items():
            _raise_small(v, mean, _SMALLEST_SHARE if self.refresh_every else _SMALLEST_FROZEN_SHARE)
            if self.refresh_every and name not in self._scales:
                self._scales[name] = self._found.get(name, 1.0)
                v.div_(self._scales[name])

    def _is_refresh(self, count: int) -> bool:
        if not self.refresh_every:
            return False
        early = _FIRST_REFRESH <= count < self.refresh_every and count & (count - 1) == 0
        return early or count % self.refresh_every == 0

    def _refresh(self, seconds: Sequence[Tensor]) -> None:
        self.sync.stats.refreshes += 1
        pieces = [piece for v in seconds if v.numel() for piece in v.split(_PIECE)]
        mean = _mean_of(pieces)
        for start in range(0, len(pieces), _AT_ONCE):
            some = pieces[start : start + _AT_ONCE]
            logarithms = [_raise_small(piece, mean).log2() for piece in some]
            centres = torch.stack([logarithm.mean() for logarithm in logarithms])
            self.sync.average([centres], NoCompression())  # four bits are enough for the differences
            for logarithm, centre in zip(logarithms, centres, strict=True):
                logarithm.sub_(centre)
            self.sync.average(logarithms, _FOUR_BITS)
            for piece, logarithm, centre in zip(some, logarithms, centres, strict=True):
                piece.copy_(logarithm.add_(centre).exp2_())

    def _second_moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the second moments of all parameters compressed from now on, in the same order on all ranks."""
        by_gradient = self._sent_as_gradients(self.sync.steps)
        for name, _ in self.named_parameters():
            if name not in by_gradient and name in self._vectors["exp_avg_sq"]:
                yield name, self._vectors["exp_avg_sq"][name]

    def _own_state(self) -> dict[str, Any]:
        measured = {"scales": dict(self._scales), "measured": dict(self._found)}
        return {**super()._own_state(), **self._families.state_dict(), **measured}

    def _parse_own_state(self, state: Mapping[str, Any]) -> Callable[[], None]:
        families = self._families.parsed(state)
        saved, here = int(state["world_size"]), self.sync.world_size
        scales, found = (
            {name: for_ranks(float(c), saved, here) for name, c in state[kind].items()}
            for kind in ("scales", "measured")
        )
        if not all(0 < c <= 1 for c in [*scales.values(), *found.values()]):
            raise DamagedError("a scale of second moments beyond 0 to 1 in a saved state: the checkpoint is damaged")

        def take() -> None:
            self._families.take(families)
            self._choose_dense()
            self._scales, self._found, self._measures_next = scales, found, saved != here

        return take


def _raise_small(v: Tensor, mean_of_all: float, share: float = _SMALLEST_SHARE) -> Tensor:
    """Raise elements far below their tensor's mean, in place: they would turn a later gradient into a huge update."""
    mean = float(v.mean()) if v.numel() else 1.0
    return v.clamp_(min=share * (mean or mean_of_all))


def _mean_of(seconds: Sequence[Tensor]) -> float:
    total = sum(float(v.sum()) for v in seconds)
    return total / max(1, sum(v.numel() for v in seconds)) or 1.0


def _limit(group: dict[str, Any], ranks: int) -> float:
    """Return the largest part of Adam's update; a rank's could be larger if the second moment lags behind."""
    beta1, beta2 = group["compressed_betas"]
    return float(ranks * max(1.0, (1 - beta1) / max(1 - beta2, 1e-12) ** 0.5))
