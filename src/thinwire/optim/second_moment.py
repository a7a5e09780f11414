"""AdamW's second moments: each rank's own, in the unit of the averaged gradient, and averaged from time to time.

torch's AdamW divides by the root of E[ḡ²], of the gradient averaged over P ranks. A rank computes E[gᵢ²], of its own
gradient. Where noise dominates, it is P times as large, and steps would be too short by up to sqrt(P). So for every
tensor

    c = mean(ḡ²) / mean over ranks of mean(gᵢ²),    between 1 / P and 1,

is measured from time to time, by samples at positions that all ranks draw alike, and the averaged update is divided by
sqrt(c).

The ranks also average their second moments: often at the start of training, then every `refresh_every` steps. They span
many orders of magnitude, so their logarithms are sent, in 4 bits each.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ..compressors import NoCompression, Quantize
from ..compressors import compressor as parsed
from ..sync.checkpoint import DamagedError
from ..sync.policy import DENSE, Policy
from ..sync.step import Step
from .guard import check_first
from .rule import Rule

_FIRST_REFRESH = 16
_SMALLEST_SHARE, _SMALLEST_FROZEN_SHARE = 1e-4, 1e-2
"""Smallest share of its tensor's mean that an element's second moment has, when averaged and when frozen."""
_PIECE, _AT_ONCE = 1 << 20, 8
"""Second moments are averaged in pieces of `_PIECE` elements, a few at a time, so that there is no second copy."""
_FOUR_BITS = Quantize(bits=4)


class SecondMoments(Rule):
    """A rule with second moments, called "exp_avg_sq", and their c.

    refresh_every   number of steps between averages; the first ones are at 16, 32, 64 ... steps. 0: second moments are
                    frozen when the warm-up ends.
    policy          has the warm-up, in which second moments are those of averaged gradients. A parameter that is
                    unfrozen later is sent dense for as many steps.
    """

    def __init__(self, refresh_every: int, policy: Policy) -> None:
        if type(refresh_every) is not int or refresh_every < 0:
            raise ValueError(f"refresh_every {refresh_every!r}, expected a whole number of steps, or 0 for never")
        check_first(policy)
        self.refresh_every = refresh_every
        self.scales: dict[str, float] = {}  # c, where second moments are those of this rank
        self._found: dict[str, float] = {}  # c as measured and smoothed, also of tensors that do not need it yet
        self._measures_next = False  # True if c is measured at the next step, as after resuming with another world size
        phases = takewhile(lambda phase: not parsed(phase[1]).sparse, policy.warmup)
        self.own_warmup = sum(steps for steps, _ in phases)

    def sampled(self) -> frozenset[str]:
        """Return the compressed parameters of the step that begins, if c is measured after it."""
        sync, of, sent = self.parameters.sync, self.parameters.families.of, self.parameters.sent_as_updates
        if self.parameters.warms_up(sync.steps):
            return frozenset(sent(sync.steps + 1, self.groups))  # those that are compressed at the next step
        present = [family for family in self.parameters.families.present if family.group in self.groups]
        due = {f for f in present if self._measures_next or self._is_refresh(f.steps + 1)}
        ends = {f for f in present if f.steps + 1 == self.own_warmup}
        names = {name for name in sent(sync.steps, self.groups) if of(name) in due} if due else set()
        return frozenset(names | {name for name in sync.dense if of(name) in ends})

    def measure(self, step: Step) -> None:
        """Measure c of all tensors that this step has sampled; the result is the mean of the old and new values."""
        sync = self.parameters.sync
        # All shards measure the same parameters; a shard may have no element of one.
        names = step.samples if sync.shards is None or step.updates is None else step.updates.sampled
        if not names:
            return
        nothing = torch.zeros(0, device=self.parameters.device)
        ordered = {name: step.samples.get(name, nothing) for name in self.parameters.tensors if name in names}
        for part in ordered.values():
            if part.is_cuda:  # it was made on the stream that encodes
                part.record_stream(torch.cuda.current_stream(part.device))
        parts = list(ordered.values())
        own, averaged = _mean_squares(parts), torch.cat(parts)
        sync.average([averaged, own], DENSE)
        of_average = _mean_squares(averaged.split([part.numel() for part in parts]))
        if sync.shards is not None and sync.shards.size > 1:  # each shard counts by its number of elements
            numels = torch.tensor([(sync.numels or {})[name] for name in ordered], dtype=own.dtype, device=own.device)
            of_average, own = sync.shards.add(torch.stack([of_average, own]) * numels)
        for name, mean, each in zip(ordered, of_average.tolist(), own.tolist(), strict=True):
            if each > 0:  # otherwise it has no gradient
                c = min(1.0, max(1 / sync.world_size, mean / each))
                self._found[name] = (self._found.get(name, c) + c) / 2
        self._measures_next = False
        if not step.warms_up:  # second moments of sampled tensors are this rank's own by now, if they are compressed
            compressed = (name for name in ordered if name not in sync.dense)
            self.scales |= {name: self._found[name] for name in compressed if name in self._found}

    def refresh(self) -> None:
        """Average the second moments of ranks, where that is due."""
        sync, families = self.parameters.sync, self.parameters.families
        due = {f for f in families.present if f.group in self.groups and self._is_refresh(f.steps)}
        if not due:
            return
        sync.stats.refreshes += 1
        seconds = (v for name, v in self._compressed() if families.of(name) in due)
        pieces = [piece for v in seconds if v.numel() for piece in v.split(_PIECE)]
        mean = _mean_of(pieces)
        for start in range(0, len(pieces), _AT_ONCE):
            some = pieces[start : start + _AT_ONCE]
            logarithms = [_raise_small(piece, mean).log2() for piece in some]
            centres = torch.stack([logarithm.mean() for logarithm in logarithms])
            sync.average([centres], NoCompression())  # four bits are enough for the differences
            for logarithm, centre in zip(logarithms, centres, strict=True):
                logarithm.sub_(centre)
            sync.average(logarithms, _FOUR_BITS)
            for piece, logarithm, centre in zip(some, logarithms, centres, strict=True):
                piece.copy_(logarithm.add_(centre).exp2_())

    def _is_refresh(self, count: int) -> bool:
        early = _FIRST_REFRESH <= count < self.refresh_every and count & (count - 1) == 0
        return early or count % self.refresh_every == 0

    def forget(self, names: Collection[str]) -> None:
        for name in names:
            self.scales.pop(name, None)

    def to_updates(self, names: Collection[str]) -> None:
        """Convert second moments to those of a rank's own gradient, and raise elements that are too small."""
        seconds = {name: v for name, v in self._compressed() if name in names}
        mean = _mean_of(list(seconds.values()))
        for name, v in seconds.items():
            _raise_small(v, mean, _SMALLEST_SHARE if self.refresh_every else _SMALLEST_FROZEN_SHARE)
            if self.refresh_every and name not in self.scales:
                self.scales[name] = self._found.get(name, 1.0)
                v.div_(self.scales[name])

    def to_torch(self, name: str, moments: dict[str, Tensor]) -> None:
        family, betas = self.parameters.families.of(name), self.parameters.group_of(name)["betas"]
        for kind, beta, weight in zip(self.moments, betas, family.weights, strict=True):
            moments[kind].mul_((1 - beta**family.steps) / (weight or 1.0))  # torch divides by 1 - beta ** steps
        moments["exp_avg_sq"].mul_(self.scales.get(name, 1.0))

    def state_dict(self) -> dict[str, Any]:
        return {**self.parameters.families.state_dict(), "scales": dict(self.scales), "measured": dict(self._found)}

    def parsed(self, state: Mapping[str, Any]) -> Callable[[], None]:
        take_families = self.parameters.families.parsed(state)
        saved, here = int(state["world_size"]), self.parameters.sync.world_size
        scales, found = (
            {name: for_ranks(float(c), saved, here) for name, c in state[kind].items()}
            for kind in ("scales", "measured")
        )
        if not all(0 < c <= 1 for c in [*scales.values(), *found.values()]):
            raise DamagedError("a scale of second moments beyond 0 to 1 in a saved state: the checkpoint is damaged")

        def take() -> None:
            take_families()
            self.parameters.choose_dense(self.own_warmup, self.groups)
            self.scales, self._found, self._measures_next = scales, found, saved != here

        return take

    def begin_from_torch(self, steps: Mapping[str, int]) -> None:
        self.parameters.families.reset(steps)
        for family in self.parameters.families.all:
            if family.group in self.groups:
                beta1, beta2 = self.parameters.groups[family.group]["betas"]
                family.weights = 1 - beta1**family.steps, 1 - beta2**family.steps
        self.scales, self._found, self._measures_next = {}, {}, False
        super().begin_from_torch(steps)

    def _compressed(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the second moments of all parameters compressed from now on, in the same order on all ranks."""
        by_gradient = self.parameters.sent_as_gradients(self.parameters.sync.steps)
        for name in self.parameters.given:
            if name not in by_gradient and name in self.parameters.vectors["exp_avg_sq"]:
                yield name, self.parameters.vectors["exp_avg_sq"][name]


def _mean_squares(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.double().square().sum() / max(1, part.numel()) for part in parts])


def for_ranks(c: float, saved: int, ranks: int) -> float:
    """Return c for another number of ranks, if gradients consist of a signal and independent noise.

    A share s of E[gᵢ²] is signal, and c = s + (1 - s) / P.

    >>> round(for_ranks(0.55, 2, 4), 3)
    0.325
    """
    if saved == ranks or saved == 1:
        return c
    signal = max(0.0, (c - 1 / saved) / (1 - 1 / saved))
    return signal + (1 - signal) / ranks


def _raise_small(v: Tensor, mean_of_all: float, share: float = _SMALLEST_SHARE) -> Tensor:
    """Raise elements far below their tensor's mean, in place: they would turn a later gradient into a huge update."""
    mean = float(v.mean()) if v.numel() else 1.0
    return v.clamp_(min=share * (mean or mean_of_all))


def _mean_of(seconds: Sequence[Tensor]) -> float:
    total = sum(float(v.sum()) for v in seconds)
    return total / max(1, sum(v.numel() for v in seconds)) or 1.0
