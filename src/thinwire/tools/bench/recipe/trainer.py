"""Trains on each rank: a plain training loop, run for a few steps at a time so that each call returns soon."""

import gc
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from thinwire.collectives.local import LocalGroup
from thinwire.sync.buckets import Bucket, shaped
from thinwire.tools.train.schedule import schedule

from .exchanges import Exchange, Setup
from .gradients import Gradients
from .settings import Case, Settings


@dataclass(frozen=True)
class Score:
    """Loss and accuracy on validation data."""

    loss: float
    accuracy: float


class Trainer:
    """Runs on each rank and does one training at a time."""

    def __init__(
        self,
        rank: int,
        size: int,
        settings: Settings,
        group: LocalGroup | None = None,
        ranks: "Sequence[Trainer]" = (),
    ) -> None:
        """Load the data.

        group   group of a rank that is a thread. None stands for the default group of torch.distributed.
        ranks   the trainers of all ranks, if ranks are threads.
        """
        self._rank, self._size, self._settings, self._group, self._ranks = rank, size, settings, group, ranks
        self._device = torch.device(settings.device)
        if group is None:  # this benchmark shows it on purpose; threads leave the filters of their process alone
            warnings.filterwarnings("ignore", ".*AdamW on gradients compressed by")
        self._data = (
            settings.load_data() if group is None or rank == 0 else None
        )  # rank 0 loads the batches of all threads
        self._model: nn.Module | None = None
        self._exchange: Exchange | None = None
        self.gradients: Gradients | None = None
        """Gradients of all ranks that are threads. Only rank 0 has them."""

    def start(self, case: Case) -> None:
        """Start the training of a case: build the model and its exchange."""
        self._model = self._exchange = self.gradients = None  # free their memory before the next ones are built
        gc.collect()
        settings, recipe = self._settings, case.recipe.recipe
        model = settings.build(case.seed).to(self._device)
        self._seed, self._step = case.seed, 0
        bucket = None
        if self._group is not None:
            bucket = self._take_gradients(model, self._group)
        self._exchange = recipe.build(
            Setup(
                model,
                recipe.optimizer(),
                settings.lr[recipe.family],
                {**recipe.options, **case.recipe.options},
                settings.warmup_steps,
                self._size,
                self._group,
                bucket,
            )
        )
        self._model = model
        self._base_lr = [group["lr"] for group in self._exchange.optimizer.param_groups]

    def advance(self, until: int) -> float:
        """Train up to step `until` and return the bytes that this rank has sent so far."""
        assert self._exchange is not None
        while self._step < until:
            self._train_step(self._exchange)
        return self._exchange.bytes_sent(self._step)

    def _take_gradients(self, model: nn.Module, group: LocalGroup) -> Bucket:
        """Make the gradient of every parameter a view of this rank's row of the gradients of all ranks."""
        if self._rank == 0:
            self.gradients = Gradients(model, self._size, bf16=self._settings.bf16)
        group.barrier()
        gradients = self._ranks[0].gradients
        assert gradients is not None
        bucket = gradients.bucket(self._rank)
        for name, part in bucket.parts().items():
            parameter = model.get_parameter(name)
            parameter.grad = shaped(part, parameter)
        return bucket

    def evaluate(self) -> Score | None:
        """Return the score on rank 0 and None on all others, because all ranks have the same weights."""
        if self._rank:
            return None
        assert self._model is not None
        assert self._data is not None
        loss = right = count = 0.0
        self._model.eval()
        with torch.no_grad():
            for batch in self._data.validation(64):
                inputs, targets = (part.to(self._device) for part in batch)
                scores, wanted = self._model(inputs).flatten(0, -2), targets.flatten()
                loss += F.cross_entropy(scores, wanted, reduction="sum").item()
                right += (scores.argmax(dim=-1) == wanted).sum().item()
                count += wanted.numel()
        self._model.train()
        return Score(loss / count, right / count)

    def checksum(self) -> int:
        """Return a checksum of all weights."""
        assert self._model is not None
        total = 0
        for parameter in self._model.parameters():
            total = zlib.crc32(parameter.detach().cpu().numpy().tobytes(), total)
        return total

    def _train_step(self, exchange: Exchange) -> None:
        factor = schedule(self._step, self._settings.steps)
        for group, lr in zip(exchange.optimizer.param_groups, self._base_lr, strict=True):
            group["lr"] = lr * factor
        size, first = self._settings.batch, self._step * self._size * self._settings.batch
        if self._group is not None:
            self._group.barrier()  # no rank needs the gradients of the last step any more
            if self.gradients is not None and self._data is not None:
                self.gradients.compute(self._data.batch(first, self._size * size, self._seed))
            self._group.barrier()
        else:
            assert self._data is not None
            batch = self._data.batch(first + self._rank * size, size, self._seed)
            inputs, targets = (part.to(self._device) for part in batch)
            loss = F.cross_entropy(exchange.module(inputs).flatten(0, -2), targets.flatten())
            exchange.optimizer.zero_grad()
            loss.backward()
        exchange.after_backward()
        exchange.optimizer.step()
        self._step += 1
