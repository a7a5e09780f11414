"""The training loop of one rank, from the first step, or a checkpoint, to the end or a signal."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from thinwire.sync.checkpoint import DamagedError
from thinwire.sync.synchronizer import SKIPPED_IN_A_ROW
from thinwire.tools import loopback
from thinwire.tools.loopback import Counter

from .checkpoints import Checkpoints, Loaded, write_file
from .config import Config
from .control import Control
from .data import Data
from .folder import write_config
from .learner import Learner
from .metrics import Metrics
from .place import Place
from .schedule import schedule
from .view import PHASES, Result, View

PATIENCE = 20
"""Number of steps in a row without a finite loss after which training fails."""
_EVALUATION_BATCH = 256
_MOST_UNDER_WAY = 16
"""Most messages with losses that are under way, so that a signal is seen soon."""
_LARGEST = 1 << 53
"""Bound of the numbers in a checkpoint: of bytes, steps, samples."""


@dataclass
class Counts:
    """Totals of the whole run, also from before a resume. Checkpoints contain all of them."""

    step: int = 0
    samples: int = 0
    """Samples consumed by all ranks: the position in the data."""
    seconds: float = 0.0
    bytes_sent: int = 0
    bytes_dense: int = 0
    skipped: int = 0
    """Steps that were skipped because of a NaN or Inf on some rank."""
    split: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


@dataclass(frozen=True)
class Ended:
    """The outcome of a training."""

    result: Result
    finished: bool
    """False if a signal stopped it."""


@dataclass(frozen=True)
class Setup:
    """What a training is given on one rank."""

    config: Config
    """The same on all ranks."""
    folder: Path
    place: Place
    control: Control
    device: torch.device
    data: Data
    counter: Counter | None
    """Counts the bytes that this rank sends; None if they cannot be counted."""
    compile_seconds: float
    """Seconds that the kernels took to compile or load."""


def train(setup: Setup, should_stop: Callable[[], bool]) -> Ended:
    """Train from the first step, or from a checkpoint. All ranks call this."""
    view = View(setup.config.steps, shown=setup.place.rank == 0)
    try:
        run = _Run(setup, view)
        try:
            return run.train(should_stop)
        except BaseException:
            with suppress(OSError):  # the disk may be the cause of the failure
                run.end("failed")
            raise
        finally:
            run.close()
    finally:
        view.close()


class _Run:
    def __init__(self, setup: Setup, view: View) -> None:
        config, folder, place, control = setup.config, setup.folder, setup.place, setup.control
        self.config, self.folder, self.place, self.control = config, folder, place, control
        self.data, self.view = setup.data, view
        self.learner = Learner(config, setup.device)
        self.counts = Counts()
        self.evaluated: dict[str, Any] | None = None
        self.checkpoints = Checkpoints(folder, place=place, control=control, keep=config.keep, say=view.say)
        loaded = self.checkpoints.load(self._go_on_from) if config.resume == "auto" else None
        parameters = sum(parameter.numel() for parameter in self.learner.model.parameters())
        self.resumed = loaded is not None
        self.metrics: Metrics | None = None
        if self.checkpoints.leads:
            write_config(folder, config)
        if place.rank == 0:
            facts = {
                "world_size": place.world_size,
                "parameters": parameters,
                "device": str(setup.device),
                "compile_seconds": setup.compile_seconds,
            }
            self.metrics = Metrics(folder=folder, config=config, first_step=self.counts.step, more=facts)
        view.say(
            f"{config.recipe}: {config.model}, {parameters:,} parameters, {self.learner.describe_compressor()}, "
            f"{place.world_size} rank{'s' * (place.world_size > 1)} on {setup.device.type}, in {folder}"
        )
        if loaded is not None:
            view.say(f"resuming from step {loaded.step}")
        self.counter = setup.counter if loopback.is_counted() and not self.resumed else None
        self.interface_bytes = self.counter.sent_bytes() if self.counter is not None else 0
        self.last_sent = self.last_dense = self.last_skipped = 0
        self.last_blocked: dict[str, float] = {}
        self.last_warmup = self.last_refreshes = 0
        self.events: dict[str, None] = {"resume": None} if self.resumed else {}
        """What has sent further bytes since the last line of metrics, in order and once."""
        self.last_loss, self.not_finite = 0.0, 0
        self.ranks: list[dict[str, int]] = []
        """What each rank has sent; known at the end."""
        self.choice = self.learner.sync.choice
        self.saved = self.counts.step if loaded is not None else -1
        self.clock = time.perf_counter()

    def train(self, should_stop: Callable[[], bool]) -> Ended:
        config, counts = self.config, self.counts
        logged = Logged(counts)
        stops, first = False, True
        while counts.step < config.steps and not stops:
            started = time.perf_counter()
            start = counts.samples + self.place.rank * config.batch
            batch = self.data.batch(start, config.batch, config.seed)
            self.learner.learn(
                batch, schedule(counts.step, config.steps), lambda loss: self.control.send_message(loss, should_stop())
            )
            counts.step += 1
            last = counts.step == config.steps
            evaluates, saves = last or _due(counts.step, config.eval_every), _due(counts.step, config.checkpoint_every)
            later = 0 if evaluates or saves else min(self.learner.delay, _MOST_UNDER_WAY)
            messages = self.control.read_messages(leave=later)
            stops = any(message.stops for message in messages)
            if stops:
                messages += self.control.read_messages()
            counts.samples += config.batch * self.place.world_size
            seconds = time.perf_counter() - started
            self._count(seconds)
            self._show_choice()
            for number, message in enumerate(messages, start=1):
                self._check_loss(message.loss, is_last=last and number == len(messages))
                logged.add(message.loss)
            self._note_events()
            self.view.advance(counts.step)
            if logged.losses and (first or last or stops or _due(counts.step, config.log_every)):
                self._log(logged)
                logged, first = Logged(counts), False
            if evaluates:
                self._evaluate()
            if not last and (stops or saves):
                self._save(is_extra=not saves)
        if not stops and (self.evaluated is None or self.evaluated["step"] != counts.step):
            self._evaluate()  # resumed at the last step, from a checkpoint without an evaluation of it
        self._save()
        if not stops:
            self._write_weights()
        self.ranks = self.control.gather(self._sent_here())
        self.end("stopped" if stops else "finished")
        return Ended(self._result(), not stops)

    def end(self, reason: str) -> None:
        self.counts.bytes_sent += self.control.take_bytes_sent()  # of the last checkpoint
        if self.metrics is not None:
            ranks = {"ranks": self.ranks} if self.ranks else {}
            self.metrics.write("end", {**self._so_far(), **self._after_warmup(), "reason": reason, **ranks})

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()

    def _go_on_from(self, loaded: Loaded) -> None:
        """Continue from a checkpoint; raise ValueError if it is another run's, DamagedError if no run wrote it."""
        shared = loaded.shared
        counts, evaluated = _checked_counts(shared["counts"], loaded.step), _checked_scores(shared["evaluated"])
        _check_same_run(self.config, shared["config"])
        if loaded.step > self.config.steps:
            raise ValueError(
                f"--steps {self.config.steps}, but the run has done {loaded.step}: give more, or another --out"
            )
        try:
            self.learner.load(shared["learner"], [state["learner"] for state in loaded.own], loaded.same_world)
        except ValueError as error:  # its config is that of this run, so its states should fit
            raise DamagedError(str(error)) from None
        self.counts, self.evaluated = counts, evaluated

    def _count(self, seconds: float) -> None:
        """Add the time and the bytes of the last step to the totals."""
        counts, blocked = self.counts, self._count_exchange()
        parts = {"compress": "encode", "wait": "exchange", "decode": "decode"}
        split = {phase: blocked.get(name, 0.0) for phase, name in parts.items()}
        split["compute"] = max(0.0, seconds - sum(split.values()))
        for phase in PHASES:
            counts.split[phase] += split[phase]

    def _count_exchange(self) -> dict[str, float]:
        """Add what was sent since the last call to the totals, and return the seconds for which it blocked."""
        counts, stats = self.counts, self.learner.sync.stats
        sent, dense = stats.bytes_sent, stats.bytes_dense
        counts.bytes_sent += sent - self.last_sent + self.control.take_bytes_sent()
        counts.bytes_dense += dense - self.last_dense
        counts.skipped += stats.skipped - self.last_skipped
        self.last_sent, self.last_dense, self.last_skipped = sent, dense, stats.skipped
        blocked = {name: total - self.last_blocked.get(name, 0.0) for name, total in stats.blocked.items()}
        self.last_blocked = dict(stats.blocked)
        return blocked

    def _synchronize(self) -> None:
        """Let all ranks have the same weights, in the middle of a round of local steps too."""
        if self.config.local_steps:
            self.learner.synchronize()
            self._count_exchange()

    def _note_events(self) -> None:
        """Note whether the last step was one of the warm-up, and whether the second moments were averaged after it."""
        stats = self.learner.sync.stats
        if stats.warmup_bytes_sent > self.last_warmup:
            self.events["warm-up"] = None
        if stats.refreshes > self.last_refreshes:
            self.events["refresh"] = None
        self.last_warmup, self.last_refreshes = stats.warmup_bytes_sent, stats.refreshes

    def _show_choice(self) -> None:
        """Show the choice of the auto compressor once, when it is made. A resumed run does not show it again."""
        choice = self.learner.sync.choice
        if choice is self.choice:
            return
        self.choice = choice
        if choice is not None and self.metrics is not None:
            self.metrics.write("choice", {**self._so_far(), **choice.record()})
            self.view.say(choice.describe())

    def _check_loss(self, loss: float, *, is_last: bool) -> None:
        self.last_loss = loss
        self.not_finite = 0 if math.isfinite(loss) else self.not_finite + 1
        kept = f"the last checkpoint is that of step {self.saved}" if self.saved >= 0 else "no checkpoint was written"
        skipped = self.learner.sync.stats.skipped_in_a_row
        if skipped > SKIPPED_IN_A_ROW:
            raise ValueError(
                f"the last {skipped} steps, up to step {self.counts.step}, were skipped, because a gradient was not "
                f"finite or too large to be squared: try a lower --lr than {self.config.lr:g}; {kept}"
            )
        lasts = self.config.local_steps  # a rank whose weights are not finite is left out when the round ends
        if self.not_finite == PATIENCE + lasts or (self.not_finite > lasts and is_last):
            raise ValueError(
                f"the loss has not been finite for {self.not_finite} steps, up to step {self.counts.step}: try a lower "
                f"--lr than {self.config.lr:g}; {kept}"
            )

    def _log(self, logged: "Logged") -> None:
        counts, config = self.counts, self.config
        seconds, split = logged.since(counts)
        steps = max(1, counts.step - logged.step)
        line = {
            **self._so_far(),
            "loss": logged.loss / logged.losses,
            "lr": config.lr * schedule(counts.step - 1, config.steps),
            "samples_per_second": steps * config.batch * self.place.world_size / seconds,
            "split": {phase: split[phase] / steps for phase in PHASES},
            "skipped": counts.skipped,
            "events": list(self.events),
            **self._after_warmup(),
        }
        self.events = {}
        if self.metrics is not None:
            self.metrics.write("step", line)
            self.view.step(line)

    def _evaluate(self) -> None:
        """Evaluate the model on the validation data. Each rank takes a share of the batches."""
        self.events["evaluation"] = None
        self._synchronize()
        totals = [0.0, 0.0, 0.0]
        with self.learner.evaluating(self.control.total):
            for index, batch in enumerate(self.data.validation(_EVALUATION_BATCH)):
                if index % self.place.world_size == self.place.rank:
                    totals = [total + part for total, part in zip(totals, self.learner.evaluate(batch), strict=True)]
        loss, right, count = self.control.total(totals)
        self.evaluated = {**self._so_far(), "loss": loss / count, "accuracy": right / count}
        if self.metrics is not None:
            self.metrics.write("evaluation", self.evaluated)
            self.view.evaluation(self.evaluated)

    def _save(self, *, is_extra: bool = False) -> None:
        """Write a checkpoint, unless there is one of this step or the last loss was not finite.

        With local steps, ranks synchronize first: only so can another number of ranks load it.

        is_extra   it is due to a signal, and training stops. A run without the signal does not synchronize here, so the
                   checkpoint has both states, before it and after it.
        """
        if self.saved == self.counts.step or not math.isfinite(self.last_loss):
            return
        self.events["checkpoint"] = None
        if not is_extra:
            self._synchronize()
        own = self.learner.own_state()
        if self.config.local_steps and is_extra:
            self._count_exchange()  # own_state() has waited for an exchange that was under way
            dense = self.counts.bytes_dense
            own = self.learner.add_common_state(own)
            self._count_exchange()
            self.counts.bytes_dense = dense  # these steps count when the resumed run ends the round
        counts = {**vars(self.counts), "seconds": self._seconds()}
        shared = {
            "config": self.config.record(),
            "counts": counts,
            "evaluated": self.evaluated,
            "learner": self.learner.shared_state(),
        }
        self.checkpoints.save(self.counts.step, shared, {"learner": own})
        self.saved = self.counts.step

    def _write_weights(self) -> None:
        """Write the state_dict of the model alone, for torch.load(path, weights_only=True)."""
        with self.learner.evaluating(self.control.total):
            weights = self.learner.weights()
            if self.place.rank == 0:
                write_file(self.folder / "weights.pt", weights)

    def _so_far(self) -> dict[str, Any]:
        counts = self.counts
        return {
            "step": counts.step,
            "seconds": self._seconds(),
            "bytes_sent": counts.bytes_sent,
            "bytes_dense": counts.bytes_dense,
        }

    def _after_warmup(self) -> dict[str, float]:
        """Return the reduction of this process's steps after the warm-up, if there are any."""
        stats = self.learner.sync.stats
        return (
            {"reduction_after_warmup": stats.reduction_after_warmup}
            if stats.bytes_sent > stats.warmup_bytes_sent
            else {}
        )

    def _sent_here(self) -> dict[str, int]:
        """Return what this rank has sent in exchanges, and which part of the model it holds if that is sharded."""
        stats, shard = self.learner.sync.stats, self.config.shard
        replica = {"replica": self.place.rank // shard, "shard": self.place.rank % shard} if shard > 1 else {}
        return {
            "rank": self.place.rank,
            **replica,
            "bytes_between_nodes": stats.bytes_between_nodes,
            "bytes_inside_nodes": stats.bytes_inside_nodes,
            "bytes_dense": stats.bytes_dense,
        }

    def _seconds(self) -> float:
        return self.counts.seconds + time.perf_counter() - self.clock

    def _result(self) -> Result:
        counts, score = self.counts, self.evaluated or {"loss": math.nan, "accuracy": None}
        interface = None if self.counter is None else self.counter.sent_bytes() - self.interface_bytes
        split = {phase: counts.split[phase] / max(1, counts.step) for phase in PHASES}
        return Result(
            name=self.config.compressor
            + (f" every {self.config.local_steps} steps" if self.config.local_steps else ""),
            steps=counts.step,
            loss=score["loss"],
            accuracy=score["accuracy"],
            bytes_sent=counts.bytes_sent,
            bytes_dense=counts.bytes_dense,
            reduction_after_warmup=self._after_warmup().get("reduction_after_warmup"),
            interface_bytes=interface,
            seconds=self._seconds(),
            split=split,
            ranks=self.ranks,
        )


class Logged:
    """The totals when the last line of metrics was written, and the sum and number of losses that came since then."""

    def __init__(self, counts: Counts) -> None:
        self.step, self.split = counts.step, dict(counts.split)
        self.loss, self.losses = 0.0, 0

    def add(self, loss: float) -> None:
        """Add the loss of a step."""
        self.loss += loss
        self.losses += 1

    def since(self, counts: Counts) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last line, in total and by phase."""
        split = {phase: counts.split[phase] - self.split[phase] for phase in PHASES}
        return max(sum(split.values()), 1e-9), split


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _checked_counts(saved: object, step: int) -> Counts:
    """Return the totals of a checkpoint; raise DamagedError if a value has another type than in `Counts`."""
    if not isinstance(saved, dict) or saved.keys() != vars(Counts()).keys() or saved["step"] != step:
        raise DamagedError("its counts do not match its step")
    for name, default in vars(Counts()).items():
        values, kind = [saved[name]], type(default)
        if kind is dict:
            if not isinstance(saved[name], dict) or saved[name].keys() != default.keys():
                raise DamagedError(f"counts.{name} is of type {type(saved[name]).__name__}")
            values, kind = list(saved[name].values()), float
        if not all(_is_number(value, kind) and value >= 0 for value in values):
            raise DamagedError(f"counts.{name} is not a number of at least 0")
    return Counts(**saved)


def _checked_scores(saved: object) -> dict[str, Any] | None:
    """Return the evaluation of a checkpoint, or None if it has none; raise DamagedError if it is something else."""
    if saved is None:
        return None
    names = ("step", "seconds", "bytes_sent", "bytes_dense", "loss", "accuracy")
    if not isinstance(saved, dict) or not all(_is_number(saved.get(name), float) for name in names):
        raise DamagedError("its evaluation is incomplete")
    return saved


def _is_number(value: object, kind: type) -> bool:
    """Return whether a value is of the kind, finite, and not so large that a float would not hold it exactly."""
    return (type(value) is int or (kind is float and type(value) is float)) and abs(value) < _LARGEST


def _check_same_run(config: Config, saved: object) -> None:
    """Raise ValueError if an option differs that a resumed run cannot change. Others, such as steps, may differ."""
    here = config.record()
    if not isinstance(saved, dict) or not saved.keys() >= here.keys():
        raise DamagedError("its config is incomplete")
    for name in ("recipe", "model", "data", "optimizer", "compressor", "warmup_steps", "local_steps", "seed"):
        if type(here[name]) is not type(saved[name]):
            raise DamagedError(f"its config has a {type(saved[name]).__name__} as {name}")
        if here[name] != saved[name]:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag} {here[name]}, but the run that is resumed has {saved[name]!s:.80}: leave --{flag} out, or "
                "start anew with another --out"
            )
