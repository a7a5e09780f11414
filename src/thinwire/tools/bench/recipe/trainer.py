"""What a rank does: a plain training loop, some steps at a time, so that nobody waits for an answer for long."""

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
    """On validation data."""

    loss: float
    accuracy: float


class Trainer:
    """On each rank: one training at a time."""

    def __init__(
        self,
        rank: int,
        size: int,
        settings: Settings,
        group: LocalGroup | None = None,
        ranks: "Sequence[Trainer]" = (),
    ) -> None:
        """
        group   of a rank that is a thread; else the default group of torch.distributed.
        ranks   those of all ranks that are threads.
        """
        self._rank, self._size, self._settings, self._group, self._ranks = rank, size, settings, group, ranks
        self._device = torch.device(settings.device)
        if group is None:  # of what is to be shown here; this process is ours, where ranks are threads it is not
            warnings.filterwarnings("ignore", ".*AdamW on gradients compressed by")
        self._data = (
            settings.load_data() if group is None or rank == 0 else None
        )  # the first rank has all ranks' batches
        self._model: nn.Module | None = None
        self._exchange: Exchange | None = None
        self.gradients: Gradients | None = None
        """Of all ranks that are threads; the first one has it."""

    def start(self, case: Case) -> None:
        self._model = self._exchange = self.gradients = None  # before the next ones take their memory
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
        """Train up to this step; the bytes that this rank has sent so far."""
        assert self._exchange is not None
        while self._step < until:
            self._train_step(self._exchange)
        return self._exchange.bytes_sent(self._step)

    def _take_gradients(self, model: nn.Module, group: LocalGroup) -> Bucket:
        """Let every parameter's gradient be a part of this rank's row of the gradients of all ranks."""
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
        """By the first rank; all have the same weights."""
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
        size, first = self._settings.batch, self._step * self._size * self._settings.batch
        if self._group is not None:
            self._group.barrier()  # nobody needs the gradients of the last step any more
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
