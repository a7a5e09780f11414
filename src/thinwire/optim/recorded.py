"""Steps of an optimizer as CUDA graphs: the numbers of a step in GPU memory, and the recording of what `step` does.

A recording (`kernels/recording.py`) has numbers and addresses in it. So everything that changes from step to step is
written to vectors that keep their addresses, and recorded work reads it there: the numbers of updates when a step
begins, those of the step itself when its payloads have arrived. No other module of this folder knows of recordings.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..collectives.algorithms.leg import Span
from ..kernels.recording import Recording
from ..kernels.updates import Update
from ..sync.buckets import Slice
from ..sync.step import Maker, Step, Updates
from .families import Parameters
from .rule import Rule, StepNumbers


class _DeviceNumbers:
    """Numbers of a step in GPU memory, where a recording reads them: a float32 vector that keeps its address."""

    def __init__(self) -> None:
        self._vector: Tensor | None = None

    def fill(self, numbers: Sequence[float], device: torch.device) -> Tensor:
        if self._vector is None or self._vector.numel() != len(numbers) or self._vector.device != device:
            self._vector = torch.empty(len(numbers), dtype=torch.float32, device=device)
        return self._vector.copy_(torch.tensor(numbers, dtype=torch.float32, pin_memory=True), non_blocking=True)


class Recorder:
    """Records the steps of an optimizer on a GPU, where its rule has kernels that read numbers from GPU memory.

    rules   of each parameter group.
    """

    def __init__(self, parameters: Parameters, rules: Sequence[Rule]) -> None:
        self.recording: Recording | None = None
        self._parameters, self._rules = parameters, rules
        self._sent_numbers, self._step_numbers, self._rate_numbers = (_DeviceNumbers() for _ in range(3))
        self._rates: dict[str, Tensor] = {}
        self._rates_of: tuple[object, ...] = ()  # what they were written from

    def with_numbers(self, updates: Updates, numbers: Sequence[dict[str, Any]], device: torch.device) -> Updates:
        """Return the settings of a step that begins with the numbers of each family's update in GPU memory, too."""
        kernels = {rule.by_numbers(device) for rule in self._rules}
        kernel = kernels.pop()
        if kernel is None or kernels or updates.warms_up:
            return updates
        made = [kernel.numbers_of(factor=1 / updates.scale, **given) for given in numbers]
        rows = self._sent_numbers.fill([number for row in made for number in row], device).view(len(made), -1)
        rules = [_reading(rule, row) for rule, row in zip(updates.rules, rows, strict=True)]
        return replace(updates, rules=rules, numbers=rows)

    def run(self, sent: Step, numbers: StepNumbers, apply: Callable[[StepNumbers], None]) -> None:
        """Apply a step; by a recording, once the work has been the same for a few steps."""
        assert sent.updates is not None
        assert sent.updates.numbers is not None
        tensors = [self._parameters.tensors[name] for name in sent.numels]
        unused = any(self._parameters.given[name].grad is None for name in sent.numels)
        if unused or any(p.dtype != torch.float32 for p in tensors) or (addresses := sent.addresses()) is None:
            return apply(numbers)
        device = sent.updates.numbers.device
        vector = self._step_numbers.fill([*numbers.steps, *numbers.lr, *numbers.keep], device)
        steps, lr, keep = (row.unbind() for row in vector.view(3, -1))
        there = StepNumbers(steps, lr, keep, self._rates_on(device, numbers.rates))
        settings = zip(self._rules, self._parameters.groups, strict=True)
        constants = tuple(group[name] for rule, group in settings for name in rule.settings if name != "lr")
        moments = tuple(vectors.generation for vectors in self._parameters.vectors.values())
        places = tuple(parameter.data_ptr() for parameter in tensors)
        at = vector.data_ptr(), next(iter(there.rates.values())).data_ptr()
        key: Hashable = addresses, places, moments, constants, sent.updates.scale, at
        if self.recording is None:
            recorder = self._parameters.sync.recorder
            assert recorder is not None
            self.recording = recorder.new_recording()
        started = time.perf_counter()
        if self.recording.run(key, lambda: apply(there)):
            sent.reports[-1].spans.append(Span("decode", started, time.perf_counter()))

    def _rates_on(self, device: torch.device, rates: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the rates of all parameters in GPU memory, which are written only when one has changed."""
        if self._rates_of != (rates, device):
            vector = self._rate_numbers.fill(list(rates.values()), device)
            if not self._rates or next(iter(self._rates.values())).data_ptr() != vector.data_ptr():
                self._rates = dict(zip(rates, vector.unbind(), strict=True))
            self._rates_of = rates, device
        return self._rates


def _reading(maker: Maker, row: Tensor) -> Maker:
    """Return a maker whose updates read its numbers, and the factor of the gradient, from a row in GPU memory."""

    def update(slice_: Slice, moments: Sequence[Tensor], factor: float) -> Update:
        made: Any = maker(slice_, moments, factor)
        return replace(made, on_device=row) if made.m.dtype == torch.float32 else made  # type: ignore[no-any-return]

    return update
