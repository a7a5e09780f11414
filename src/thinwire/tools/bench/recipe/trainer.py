"""Trains by a method on each rank, a few steps at a time, and makes a row of what came of it."""

import gc
import math
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from thinwire.collectives import cost
from thinwire.collectives.local import LocalGroup
from thinwire.sync.buckets import Bucket, shaped
from thinwire.tools.train.data import Data, evaluate_batch
from thinwire.tools.train.images import Digits, load_data
from thinwire.tools.train.models import GPTConfig, ModelConfig
from thinwire.tools.train.schedule import schedule
from thinwire.tools.workers import Workers

from ..harness import Progress, Row
from ..methods import Method
from ..training import Setup, Training, build
from .gradients import Gradients, Threads

Ranks = Workers | Threads
_STEPS_AT_ONCE = 10
_EVALUATIONS, _CURVE = 5, 20
"""Number of evaluations, evenly spread over the steps; the second one behind links, where loss over time is drawn.

The last one is the result, the others are only recorded.
"""


@dataclass(frozen=True)
class Settings:
    """The checked options."""

    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    config: ModelConfig
    data: str
    data_dir: Path
    workers: int
    batch: int
    steps: int
    warmup_steps: int
    lr: dict[str, float]
    """Learning rate of each family of optimizers."""
    device: str
    simulate: bool
    bf16: bool
    link: str | None = None
    """Rate of each rank's link, and its round-trip time if there is one."""

    def load_data(self) -> Data:
        """Load the data onto the device. Digits get noise, because trainings would otherwise end too much alike."""
        if self.data == "digits":
            return Digits(noise=0.5, device=self.device)
        context = self.config.context if isinstance(self.config, GPTConfig) else None
        return load_data(self.data, self.data_dir, context, device=self.device)

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.config.build(0).parameters())

    def record(self) -> dict[str, object]:
        """Return the settings for the conditions of a record."""
        kept = {"workers", "batch", "steps", "warmup_steps", "lr", "simulate", "bf16", "link"}
        return {
            "model": self.config.name,
            "config": asdict(self.config),
            "parameters": self.parameters,
            "data": self.data_dir.name if self.data == "text" and self.data_dir.is_file() else self.data,
            "worker_threads": None if self.simulate else 1,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            **{name: value for name, value in vars(self).items() if name in kept},
        }


def measure(settings: Settings, ranks: Ranks, progress: Progress) -> Iterator[Row]:
    """Train by every method with every seed and yield a row for each."""
    ranks.form(settings.workers, Trainer, settings)
    for method in settings.methods:
        for seed in settings.seeds:
            row = _measure(method, seed=seed, settings=settings, ranks=ranks, progress=progress)
            progress.start(f"{method.text}, seed {seed}")
            sent = f"{row['bytes_total'] / 1e6:,.3f} MB sent per rank"
            progress.finish(f"loss {row['losses'][-1][1]}, {sent}, {row['seconds']:.0f} s")
            yield row


def _measure(method: Method, seed: int, settings: Settings, ranks: Ranks, progress: Progress) -> Row:
    steps, title = settings.steps, f"{method.text}, seed {seed}"
    warmup = min(method.warmup(settings.warmup_steps), steps - 1)
    points = _EVALUATIONS if settings.link is None else _CURVE
    evaluated = {min(steps, method.whole_rounds(steps * part // points)) for part in range(1, points + 1)} - {0}
    stops = sorted({0, *range(0, steps, _STEPS_AT_ONCE), warmup, *evaluated})
    sent, losses, times, accuracy, seconds = {0: 0.0}, [], [], 0.0, 0.0
    progress.start(title)
    if settings.link is not None:  # time counts: kernels are compiled before
        ranks.ask("start", method, seed)
        ranks.ask("advance", min(warmup + 2, steps))
    ranks.ask("start", method, seed)
    for _, stop in pairwise(stops):
        started = time.perf_counter()
        answers: list[float] = ranks.ask("advance", stop)
        if stop in evaluated:
            answers = ranks.ask("synchronize")
        seconds += time.perf_counter() - started
        sent[stop] = sum(answers) / len(answers)
        progress.start(f"{title}, step {stop} of {steps}")
        if stop in evaluated:
            loss, accuracy = ranks.ask("evaluate")[0]
            losses.append([stop, loss if math.isfinite(loss) else None])
            times.append(seconds)
            progress.note(f"{title}, step {stop} of {steps}: loss {loss:.4f} after {seconds:.0f} s")
    same = len(set(ranks.ask("checksum"))) == 1
    dense = cost.ring(4 * settings.parameters, settings.workers)
    return {
        **row_of(
            sent[steps],
            (sent[steps] - sent[warmup]) / (steps - warmup),
            dense_total=dense * steps,
            dense_per_step=dense,
        ),
        "method": method.text,
        "family": method.family,
        "warmup_steps": warmup,
        "seed": seed,
        "loss": losses[-1][1],
        "accuracy": accuracy,
        "losses": losses,
        "sent": [sent[stop] for stop, _ in losses],
        "seconds": seconds,
        "times": times,
        "fault": None if same else f"{title}: ranks ended with different weights, expected the same bits on all",
    }


def row_of(total: float, per_step: float, *, dense_total: float, dense_per_step: float) -> Row:
    """Return the part of a row that has the bytes sent by a rank, as the mean over ranks, and the reductions.

    total      in all steps.
    per_step   mean of a step after the warm-up.
    """
    return {
        "kind": "recipe",
        "bytes_total": total,
        "bytes_per_step": per_step,
        "dense_total": dense_total,
        "dense_per_step": dense_per_step,
        "reduction": dense_total / total if total else None,
        "reduction_per_step": dense_per_step / per_step if per_step else None,
    }


class Trainer:
    """Runs on each rank and does one training at a time.

    group   group of a rank that is a thread. None stands for the default group of torch.distributed.
    ranks   the trainers of all ranks, if ranks are threads.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        settings: Settings,
        group: LocalGroup | None = None,
        ranks: "Sequence[Trainer]" = (),
    ) -> None:
        self._rank, self._size, self._settings, self._group, self._ranks = rank, size, settings, group, ranks
        self._device = torch.device(settings.device)
        if group is None:  # this benchmark shows it on purpose; threads leave the filters of their process alone
            warnings.filterwarnings("ignore", ".*AdamW on gradients compressed by")
        # Rank 0 loads the batches of all threads.
        self._data = settings.load_data() if group is None or rank == 0 else None
        self._model: nn.Module | None = None
        self._training: Training | None = None
        self.gradients: Gradients | None = None
        """Gradients of all ranks that are threads. Only rank 0 has them."""

    def start(self, method: Method, seed: int) -> None:
        """Build the model and what the method needs."""
        self._model = self._training = self.gradients = None  # free their memory before the next ones are built
        gc.collect()
        settings = self._settings
        model = settings.config.build(seed).to(self._device)
        self._seed, self._step = seed, 0
        self._model = model
        bucket = None if self._group is None else self._take_gradients(self._group, is_local=method.is_local)
        self._training = build(
            method,
            Setup(
                model, settings.lr[method.family], warmup_steps=settings.warmup_steps, group=self._group, bucket=bucket
            ),
        )
        self._base_lr = [group["lr"] for group in self._training.optimizer.param_groups]

    def advance(self, until: int) -> float:
        """Train up to step `until` and return the bytes that this rank has sent so far."""
        assert self._training is not None
        while self._step < until:
            self._train_step(self._training)
        return self._training.bytes_sent(self._step)

    def synchronize(self) -> float:
        """Make the weights of all ranks the same, and return the bytes that this rank has sent so far."""
        assert self._training is not None
        self._training.before_evaluation()
        return self._training.bytes_sent(self._step)

    def evaluate(self) -> tuple[float, float] | None:
        """Return loss and accuracy on validation data on rank 0, None on others: all ranks have the same weights."""
        if self._rank:
            return None
        assert self._model is not None
        assert self._data is not None
        self._model.eval()
        parts = [evaluate_batch(self._model, batch, self._device) for batch in self._data.validation(64)]
        self._model.train()
        loss, right, count = (sum(part) for part in zip(*parts, strict=True))
        return loss / count, right / count

    def checksum(self) -> int:
        """Return a checksum of all weights."""
        assert self._model is not None
        total = 0
        for parameter in self._model.parameters():
            total = zlib.crc32(parameter.detach().cpu().numpy().tobytes(), total)
        return total

    def _take_gradients(self, group: LocalGroup, *, is_local: bool) -> Bucket:
        """Make the gradient of every parameter a view of this rank's row of the gradients of all ranks.

        is_local   each rank has weights of its own between two exchanges.
        """
        group.barrier()  # all ranks have their models
        if self._rank == 0:
            models = [rank._model for rank in (self._ranks if is_local else self._ranks[:1]) if rank._model is not None]
            self.gradients = Gradients(models, self._size, bf16=self._settings.bf16)
        group.barrier()
        gradients, model = self._ranks[0].gradients, self._model
        assert gradients is not None
        assert model is not None
        bucket = gradients.bucket(self._rank)
        for name, part in bucket.parts().items():
            parameter = model.get_parameter(name)
            parameter.grad = shaped(part, parameter)
        return bucket

    def _train_step(self, training: Training) -> None:
        factor = schedule(self._step, self._settings.steps)
        for group, lr in zip(training.optimizer.param_groups, self._base_lr, strict=True):
            group["lr"] = lr * factor
        size, first = self._settings.batch, self._step * self._size * self._settings.batch
        if self._group is not None:
            self._group.barrier()  # no rank needs the gradients of the last step any more
            if self.gradients is not None and self._data is not None:
                self.gradients.compute(self._data.batch(first, self._size * size, self._seed))
            self._group.barrier()
        else:
            assert self._data is not None
            inputs, targets = (
                part.to(self._device) for part in self._data.batch(first + self._rank * size, size, self._seed)
            )
            scores = training.module(inputs)
            loss = F.cross_entropy(scores.float().flatten(0, -2), targets.flatten())
            training.optimizer.zero_grad()
            loss.backward()
        training.after_backward()
        training.optimizer.step()
        self._step += 1
