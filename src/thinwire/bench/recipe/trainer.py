"""What a rank does: a plain training loop, some steps at a time, so that nobody waits for an answer for long."""

import gc
import warnings
import zlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from thinwire.collectives.local import LocalGroup
from thinwire.train.schedule import schedule

from .exchanges import Exchange, Setup
from .settings import Case, Settings


@dataclass(frozen=True)
class Score:
    """On validation data."""

    loss: float
    accuracy: float


class Trainer:
    """On each rank: one training at a time."""

    def __init__(self, rank: int, size: int, settings: Settings, group: LocalGroup | None = None) -> None:
        self._rank, self._size, self._settings, self._group = rank, size, settings, group
        self._device = torch.device(settings.device)
        if group is None:  # of what is to be shown here; this process is ours, where ranks are threads it is not
            warnings.filterwarnings("ignore", ".*AdamW on gradients compressed by")
        self._data = settings.data()
        self._model: nn.Module | None = None
        self._exchange: Exchange | None = None

    def start(self, case: Case) -> None:
        self._model = self._exchange = None  # before the next ones take their memory
        gc.collect()
        settings, recipe = self._settings, case.recipe.recipe
        model = settings.build(case.seed).to(self._device)
        self._seed, self._step = case.seed, 0
        self._exchange = recipe.build(
            Setup(
                model,
                recipe.optimizer(),
                settings.lr[recipe.family] * recipe.lr_factor,
                case.recipe.options,
                settings.warmup_steps,
                self._size,
                self._group,
            )
        )
        self._model = model
        self._base_lr = [group["lr"] for group in self._exchange.optimizer.param_groups]

    def advance(self, until: int) -> float:
        """Train up to this step; the bytes that this rank has sent so far."""
        assert self._exchange is not None
        while self._step < until:
            self._train_step(self._exchange)
        return self._exchange.bytes_sent(self._step)

    def evaluate(self) -> Score | None:
        """By the first rank; all have the same weights."""
        if self._rank:
            return None
        assert self._model is not None
        loss = right = count = 0.0
        with torch.no_grad():
            for batch in self._data.validation(64):
                inputs, targets = (part.to(self._device) for part in batch)
                scores, wanted = self._model(inputs).flatten(0, -2), targets.flatten()
                loss += F.cross_entropy(scores, wanted, reduction="sum").item()
                right += (scores.argmax(dim=-1) == wanted).sum().item()
                count += wanted.numel()
        return Score(loss / count, right / count)

    def checksum(self) -> int:
        """Of all weights."""
        assert self._model is not None
        total = 0
        for parameter in self._model.parameters():
            total = zlib.crc32(parameter.detach().cpu().numpy().tobytes(), total)
        return total

    def _train_step(self, exchange: Exchange) -> None:
        factor = schedule(self._step, self._settings.steps)
        for group, lr in zip(exchange.optimizer.param_groups, self._base_lr, strict=True):
            group["lr"] = lr * factor
        size = self._settings.batch
        batch = self._data.batch((self._step * self._size + self._rank) * size, size, self._seed)
        inputs, targets = (part.to(self._device) for part in batch)
        loss = F.cross_entropy(exchange.module(inputs).flatten(0, -2), targets.flatten())
        exchange.optimizer.zero_grad()
        loss.backward()
        exchange.after_backward()
        exchange.optimizer.step()
        self._step += 1
