"""Runs on each rank behind its link: takes timed steps."""

import gc
import warnings
from collections.abc import Callable
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ..methods import parse
from ..training import Setup, Training, build, take_step
from .settings import Model
from .timeline import Timeline, timeline


class LinkRank:
    """A rank behind a link that takes steps by one method after the other."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        # The time is measured here, and not the loss.
        warnings.filterwarnings("ignore", ".*AdamW on gradients compressed by")

    def start(self, name: str, model: Model) -> None:
        """Build the model and start to train it by the method of this name."""
        vars(self).pop("_training", None)  # frees its memory
        gc.collect()
        torch.manual_seed(0)
        # All ranks have the same weights. Sending them would take longer than the steps.
        method = parse(name)
        self._every = method.every
        self._training: Training = build(method, Setup(build_model(model), lr=1e-5, ddp={"init_sync": False}))
        torch.manual_seed(1 + self._rank)
        self._loss = make_loss(model)

    def warm_up(self, count: int) -> float:
        """Take `count` steps, then more until "auto" has chosen, and return the milliseconds of the last step.

        "auto" chooses at the same step on all ranks. With local steps it is the mean over the last round.
        """
        sync, taken = self._training.sync, self.steps(count)
        while sync is not None and sync.policy.auto and sync.choice is None:
            taken = self.steps(1)
        return fmean(taken[-self._every :])

    def steps(self, count: int) -> list[float]:
        """Take `count` steps and return the milliseconds of each."""
        marks = [take_step(self._training, self._loss) for _ in range(count)]
        return [1e3 * (one.end - one.begin) for one in marks]

    def timeline(self) -> Timeline | None:
        """Take one more step by a method of thinwire, which all ranks begin together, and return its timeline.

        Return None if torch's own all-reduce was used, which is not recorded.
        """
        assert self._training.sync is not None
        dist.barrier()
        marks, step = take_step(self._training, self._loss), self._training.sync.last_step
        assert step is not None
        if step.is_sent_by_torch:
            return None
        spans = (handle.report.spans for handle in step.handles)
        return timeline(marks, zip(step.labels, spans, strict=True), step.closed_at)


def build_model(model: Model) -> nn.Module:
    """Build a model of a given number of parameters. The bytes sent depend on this number and on little else."""
    width = model.width
    if model.kind == "gpt":
        return nn.Sequential(*(Block(width) for _ in range(6)))
    layers = (nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()) for _ in range(8))
    return nn.Sequential(*layers)


def make_loss(model: Model) -> Callable[[nn.Module], Tensor]:
    """Return a function of a built model that makes its loss, of a random batch of inputs."""
    batch = torch.randn(model.batch_size, *([model.width] if model.kind == "gpt" else [model.width, 16, 16]))
    return lambda module: F.mse_loss(module(batch), torch.zeros(()).expand_as(batch))


class Block(nn.Module):
    """The four linear layers of a GPT block. Attention itself is left out, because it has no parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers, with an elementwise gate in place of attention."""
        query, key, value = self.attention(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.project(value * torch.sigmoid(query * key))
        thought: Tensor = self.contract(nn.functional.gelu(self.expand(self.norm2(x))))
        return x + thought
