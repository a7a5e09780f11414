"""Trains by a method on each rank, a few steps at a time, and makes a row of what came of it."""

import gc
import math
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from thinwire.collectives import cost
from thinwire.collectives.local import LocalGroup
from thinwire.sync.buckets import Bucket, shaped
from thinwire.testing.pool import Workers
from thinwire.tools.train.data import evaluate_batch
from thinwire.tools.train.learner import schedule

from .gradients import Gradients, Threads, cross_entropy, precision
from .harness import Progress, Row
from .methods import Method
from .recipe import Options
from .training import Setup, Training, build, take_step

Ranks = Workers | Threads
_STEPS_AT_ONCE = 10
_EVALUATIONS, _CURVE = 5, 20
"""Number of evaluations, evenly spread over the steps; the second one behind links, where loss over time is drawn.

The last one is the result, the others are only recorded.
"""


def measure(options: Options, ranks: Ranks, progress: Progress) -> Iterator[Row]:
    """Train by every method with every seed and yield a row for each."""
    ranks.form(options.workers, Trainer, options)
    for method in options.chosen:
        for seed in options.seeds:
            row = _measure(method, seed=seed, options=options, ranks=ranks)
            sent = f"{row['bytes_total'] / 1e6:,.3f} MB sent per rank"
            summary = f"loss {row['losses'][-1][1]}, {sent}, {row['seconds']:.0f} s"
            progress.finish(f"{method.text}, seed {seed}", summary)
            yield row


def _measure(method: Method, seed: int, options: Options, ranks: Ranks) -> Row:
    steps, title = options.steps, f"{method.text}, seed {seed}"
    warmup = min(method.warmup(options.warmup), steps - 1)
    points = _EVALUATIONS if options.link is None else _CURVE
    evaluated = {min(steps, method.whole_rounds(steps * part // points)) for part in range(1, points + 1)} - {0}
    stops = sorted({0, *range(0, steps, _STEPS_AT_ONCE), warmup, *evaluated})
    sent, losses, times, accuracy, seconds = {0: 0.0}, [], [], 0.0, 0.0
    if options.link is not None:  # time counts: kernels are compiled before
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
        if stop in evaluated:
            loss, accuracy = ranks.ask("evaluate")[0]
            losses.append([stop, loss if math.isfinite(loss) else None])
            times.append(seconds)
    same = len(set(ranks.ask("checksum"))) == 1
    dense = cost.ring(4 * options.parameters, options.workers)
    total, per_step = sent[steps], (sent[steps] - sent[warmup]) / (steps - warmup)
    return {
        "kind": "recipe",
        "bytes_total": total,  # sent by a rank, as the mean over ranks
        "bytes_per_step": per_step,  # after the warm-up
        "dense_total": dense * steps,
        "dense_per_step": dense,
        "reduction": dense * steps / total if total else None,
        "reduction_per_step": dense / per_step if per_step else None,
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


class Trainer:
    """Runs on each rank and does one training at a time. Ranks that are threads have a group, and all trainers."""

    def __init__(
        self, rank: int, size: int, options: Options, group: LocalGroup | None = None, ranks: "Sequence[Trainer]" = ()
    ) -> None:
        self._rank, self._size, self._options, self._group, self._ranks = rank, size, options, group, ranks
        self._device = torch.device(options.device)
        if group is None:  # this benchmark shows it on purpose; threads leave the filters of their process alone
            warnings.filterwarnings("ignore", ".*AdamW on gradients compressed by")
        # Rank 0 loads the batches of all threads.
        self._data = options.load_data() if group is None or rank == 0 else None
        self.gradients: Gradients | None = None
        """Gradients of all ranks that are threads. Only rank 0 has them."""

    def start(self, method: Method, seed: int) -> None:
        self.gradients = None
        for name in ("_model", "_training"):  # frees their memory before the next ones are built
            vars(self).pop(name, None)
        gc.collect()
        options = self._options
        self._seed, self._step = seed, 0
        self._model: nn.Module = options.config.build(seed).to(self._device)
        bucket = None if self._group is None else self._take_gradients(self._group, is_local=method.is_local)
        self._training: Training = build(
            method,
            Setup(
                self._model, options.rates[method.family], warmup_steps=options.warmup, group=self._group, bucket=bucket
            ),
        )
        self._base_lr = [group["lr"] for group in self._training.optimizer.param_groups]

    def advance(self, until: int) -> float:
        """Train up to this step and return the bytes that this rank has sent so far."""
        while self._step < until:
            self._train_step()
        return self._training.bytes_sent(self._step)

    def synchronize(self) -> float:
        """Make the weights of all ranks the same, and return the bytes that this rank has sent so far."""
        self._training.before_evaluation()
        return self._training.bytes_sent(self._step)

    def evaluate(self) -> tuple[float, float] | None:
        """Return loss and accuracy on validation data on rank 0, None on others: all ranks have the same weights."""
        if self._rank:
            return None
        assert self._data is not None
        self._model.eval()
        parts = [evaluate_batch(self._model, batch, self._device) for batch in self._data.validation(64)]
        self._model.train()
        loss, right, count = (sum(part) for part in zip(*parts, strict=True))
        return loss / count, right / count

    def checksum(self) -> int:
        return zlib.crc32(b"".join(p.detach().cpu().numpy().tobytes() for p in self._model.parameters()))

    def _take_gradients(self, group: LocalGroup, *, is_local: bool) -> Bucket:
        """Make the gradient of every parameter a view of this rank's row of the gradients of all ranks.

        is_local   each rank has weights of its own between two exchanges.
        """
        group.barrier()  # all ranks have their models
        if self._rank == 0:
            models = [rank._model for rank in (self._ranks if is_local else self._ranks[:1])]
            self.gradients = Gradients(models, self._size, bf16=self._options.bf16)
        group.barrier()
        gradients = self._ranks[0].gradients
        assert gradients is not None
        bucket = gradients.bucket(self._rank)
        for name, part in bucket.parts().items():
            parameter = self._model.get_parameter(name)
            parameter.grad = shaped(part, parameter)
        return bucket

    def _train_step(self) -> None:
        training = self._training
        factor = schedule(self._step, self._options.steps)
        for group, lr in zip(training.optimizer.param_groups, self._base_lr, strict=True):
            group["lr"] = lr * factor
        size, first = self._options.batch, self._step * self._size * self._options.batch
        if self._group is None:
            assert self._data is not None
            batch = self._data.batch(first + self._rank * size, size, self._seed)
            inputs, targets = (part.to(self._device) for part in batch)

            def loss(module: nn.Module) -> Tensor:
                with precision(self._device, bf16=self._options.bf16):
                    return cross_entropy(module(inputs), targets)

            take_step(training, loss)
        else:
            self._group.barrier()  # no rank needs the gradients of the last step any more
            if self.gradients is not None and self._data is not None:
                self.gradients.compute(self._data.batch(first, self._size * size, self._seed))
            self._group.barrier()
            training.after_backward()
            training.optimizer.step()
        self._step += 1
