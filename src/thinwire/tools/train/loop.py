"""The training loop of one rank, from the first step, or a checkpoint, to the end or a signal."""

import copy
import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from thinwire.sync.checkpoint import DamagedError
from thinwire.sync.statistics import SyncStats
from thinwire.sync.synchronizer import SKIPPED_IN_A_ROW
from thinwire.tools.files import replace_text

from .checkpoints import Checkpoints, State, write_file
from .config import CONFIG_FILE, Config
from .control import Control
from .images import Data
from .learner import Learner, delay, schedule
from .metrics import PHASES, Metrics, describe_step, say

PATIENCE = 20  # Number of steps in a row without a finite loss after which training fails
_EVALUATION_BATCH = 256
_SENT = ("bytes_between_nodes", "bytes_inside_nodes", "bytes_dense")
_MOST_UNDER_WAY = 16  # Most messages with losses that are under way, so that a signal is seen soon
_LARGEST = 1 << 53  # Bound of the numbers in a checkpoint: of bytes, steps, samples


@dataclass
class Counts:
    """Totals of the whole run, also from before a resume. Checkpoints contain all of them."""

    step: int = 0
    samples: int = 0  # Samples consumed by all ranks: the position in the data
    seconds: float = 0.0
    bytes_sent: int = 0
    bytes_dense: int = 0
    skipped: int = 0  # Steps that were skipped because of a NaN or Inf on some rank
    split: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


class Training:
    """The training of one rank. All ranks make one with the same config, of which `out` is the folder of the run."""

    def __init__(self, config: Config, control: Control, data: Data) -> None:
        assert config.out is not None
        self._config, self._folder, self._control, self._data = config, config.out, control, data
        self._place = place = control.place
        self._say: Callable[[str], None] = say if place.rank == 0 else lambda text: None
        self._learner = Learner(config, control.device)
        self._counts = Counts()
        self._score: dict[str, float] = {}
        self._checkpoints = Checkpoints(self._folder, control, config.keep, self._say)
        loaded = self._checkpoints.load(self._go_on_from) if config.resume == "auto" else None
        if self._checkpoints.leads:
            replace_text(self._folder / CONFIG_FILE, json.dumps(config.record(), indent=2) + "\n")
        parameters = sum(parameter.numel() for parameter in self._learner.model.parameters())
        facts = {"world_size": place.world_size, "parameters": parameters, "device": str(control.device)}
        self._metrics = Metrics(self._folder if place.rank == 0 else None, config, self._counts.step, facts)
        self._say(
            f"{config.recipe}: {config.model}, {parameters:,} parameters, {self._learner.describe_compressor()}, "
            f"{place.world_size} ranks on {control.device.type}, in {self._folder}"
        )
        if loaded is not None:
            self._say(f"resuming from step {loaded}")
        self._seen = SyncStats()  # The statistics of the exchange that are in the counts
        self._events: dict[str, None] = {} if loaded is None else {"resume": None}  # Since the last line of metrics
        self._last_loss, self._not_finite = 0.0, 0
        self._choice = self._learner.sync.choice
        self._saved = -1 if loaded is None else loaded
        self._clock = time.perf_counter()

    def run(self, should_stop: Callable[[], bool]) -> dict[str, Any]:
        """Train until the last step, or until a rank should stop; return the last line of metrics with the score."""
        try:
            return self._train(should_stop)
        except BaseException:
            with suppress(OSError):  # the disk may be the cause of the failure
                self._end("failed")
            raise
        finally:
            self._metrics.close()

    def _train(self, should_stop: Callable[[], bool]) -> dict[str, Any]:
        config, counts = self._config, self._counts
        logged, losses = copy.deepcopy(counts), list[float]()  # as of the last line of metrics, and since then
        stops, first = False, True
        while counts.step < config.steps and not stops:
            started = time.perf_counter()
            start = counts.samples + self._place.rank * config.batch
            batch = self._data.batch(start, config.batch, config.seed)
            self._learner.learn(
                batch, schedule(counts.step, config.steps), lambda loss: self._control.send_message(loss, should_stop())
            )
            counts.step += 1
            last = counts.step == config.steps
            evaluates, saves = last or _due(counts.step, config.eval_every), _due(counts.step, config.checkpoint_every)
            later = 0 if evaluates or saves else min(delay(config), _MOST_UNDER_WAY)
            messages = self._control.read_messages(leave=later)
            stops = any(is_stop for _, is_stop in messages)
            if stops:
                messages += self._control.read_messages()
            counts.samples += config.batch * self._place.world_size
            seconds, blocked = time.perf_counter() - started, self._count_exchange()
            parts = [blocked.get(name, 0.0) for name in ("encode", "exchange", "decode")]
            for phase, part in zip(PHASES, (max(0.0, seconds - sum(parts)), *parts), strict=True):
                counts.split[phase] += part
            self._show_choice()
            for number, (loss, _) in enumerate(messages, start=1):
                self._check_loss(loss, is_last=last and number == len(messages))
                losses.append(loss)
            if losses and (first or last or stops or _due(counts.step, config.log_every)):
                self._log(losses, logged)
                logged, losses, first = copy.deepcopy(counts), [], False
            if evaluates:
                self._evaluate()
            if not last and (stops or saves):
                self._save(is_extra=not saves)
        if not stops and first:
            self._evaluate()  # resumed at the last step
        self._save()
        if not stops:
            with self._learner.evaluating(self._control.total):
                weights = self._learner.weights()
                if self._place.rank == 0:
                    write_file(self._folder / "weights.pt", weights)
        stats, shard, rank = self._learner.sync.stats, config.shard, self._place.rank
        sent = {"rank": rank, **({"replica": rank // shard, "shard": rank % shard} if shard > 1 else {})}
        sent |= {name: getattr(stats, name) for name in _SENT}
        return {**self._end("stopped" if stops else "finished", ranks=self._control.gather(sent)), **self._score}

    def _end(self, reason: str, **more: Any) -> dict[str, Any]:
        line = {**self._so_far(), **self._after_warmup(), "reason": reason, **more}
        self._metrics.write("end", line)
        return line

    def _go_on_from(self, step: int, shared: State, own: list[State]) -> None:
        """Continue from a checkpoint; raise DamagedError if this run has not written it."""
        counts = shared["counts"]
        if not _fits(counts, vars(Counts())) or counts["step"] != step:
            raise DamagedError("its counts are not those of its step")
        if step > self._config.steps:
            raise ValueError(f"--steps {self._config.steps}, but the run has done {step}: give more, or another --out")
        try:
            self._learner.load(shared["learner"], [state["learner"] for state in own])
        except ValueError as error:  # its config is that of this run, so its states should fit
            raise DamagedError(str(error)) from None
        self._counts = Counts(**counts)

    def _count_exchange(self) -> dict[str, float]:
        """Add what was sent since the last call to the totals, and return the seconds for which it blocked."""
        counts, stats, seen = self._counts, self._learner.sync.stats, self._seen
        counts.bytes_sent += stats.bytes_sent - seen.bytes_sent
        counts.bytes_dense += stats.bytes_dense - seen.bytes_dense
        counts.skipped += stats.skipped - seen.skipped
        if stats.warmup_bytes_sent > seen.warmup_bytes_sent:
            self._events["warm-up"] = None
        if stats.refreshes > seen.refreshes:
            self._events["refresh"] = None
        self._seen = replace(stats, blocked=dict(stats.blocked))
        return {name: total - seen.blocked.get(name, 0.0) for name, total in stats.blocked.items()}

    def _show_choice(self) -> None:
        """Show the choice of the auto compressor when it is made. A resumed run does not show it again."""
        choice = self._learner.sync.choice
        if choice is not None and choice is not self._choice:
            self._metrics.write("choice", {**self._so_far(), **choice.record()})
            self._say(choice.describe())
        self._choice = choice

    def _check_loss(self, loss: float, *, is_last: bool) -> None:
        """Raise ValueError if too many steps in a row were skipped or had a loss that is not finite."""
        skipped, step, config = self._learner.sync.stats.skipped_in_a_row, self._counts.step, self._config
        self._last_loss = loss
        self._not_finite = 0 if math.isfinite(loss) else self._not_finite + 1
        lasts = config.local_steps  # a rank whose weights are not finite is left out when the round ends
        if skipped > SKIPPED_IN_A_ROW:
            fault = f"the last {skipped} steps were skipped, because a gradient was not finite or too large"
        elif self._not_finite == PATIENCE + lasts or (self._not_finite > lasts and is_last):
            fault = f"the loss has not been finite for {self._not_finite} steps"
        else:
            return
        kept = f"the last checkpoint is that of step {self._saved}" if self._saved >= 0 else "no checkpoint was written"
        raise ValueError(f"{fault}, up to step {step}: try a lower --lr than {config.lr:g}; {kept}")

    def _log(self, losses: list[float], before: Counts) -> None:
        """Write a line about the steps since the last one, of which these are the losses."""
        counts, config = self._counts, self._config
        split = {phase: counts.split[phase] - before.split[phase] for phase in PHASES}
        seconds, steps = max(sum(split.values()), 1e-9), max(1, counts.step - before.step)
        line = {
            **self._so_far(),
            "loss": sum(losses) / len(losses),
            "lr": config.lr * schedule(counts.step - 1, config.steps),
            "samples_per_second": steps * config.batch * self._place.world_size / seconds,
            "split": {phase: split[phase] / steps for phase in PHASES},
            "skipped": counts.skipped,
            "events": list(self._events),
            **self._after_warmup(),
        }
        self._events = {}
        self._metrics.write("step", line)
        self._say(f"step {counts.step}/{config.steps}  {describe_step(line)}")

    def _evaluate(self) -> None:
        """Evaluate the model on the validation data. Each rank takes a share of the batches."""
        self._events["evaluation"] = None
        self._learner.synchronize()
        self._count_exchange()
        own = islice(self._data.validation(_EVALUATION_BATCH), self._place.rank, None, self._place.world_size)
        with self._learner.evaluating(self._control.total):
            totals = self._learner.evaluate(own)
        loss, right, count = self._control.total(totals)
        self._score = {"loss": loss / count, "accuracy": right / count}
        self._metrics.write("evaluation", {**self._so_far(), **self._score})
        done = f"step {self._counts.step}/{self._config.steps}"
        self._say(f"{done}  validation loss {loss / count:.4f}, accuracy {right / count:.2%}")

    def _save(self, *, is_extra: bool = False) -> None:
        """Write a checkpoint, unless there is one of this step or the last loss was not finite.

        With local steps, ranks synchronize first: only so can another number of ranks load it. If it is due to a signal
        (`is_extra`), which must not change the bits of the run, it has both states, from before that and after it.
        """
        if self._saved == self._counts.step or not math.isfinite(self._last_loss):
            return
        self._events["checkpoint"] = None
        if not is_extra:
            self._learner.synchronize()
        own = self._learner.own_state()
        self._count_exchange()  # own_state() has waited for an exchange that was under way
        if self._config.local_steps and is_extra:
            dense = self._counts.bytes_dense
            own = self._learner.add_common_state(own)
            self._count_exchange()
            self._counts.bytes_dense = dense  # these steps count when the resumed run ends the round
        shared = {"counts": {**vars(self._counts), **self._so_far()}, "learner": self._learner.shared_state()}
        self._checkpoints.save(self._counts.step, shared, {"learner": own})
        self._saved = self._counts.step

    def _so_far(self) -> dict[str, Any]:
        counts, seconds = vars(self._counts), self._counts.seconds + time.perf_counter() - self._clock
        return {name: counts[name] for name in ("step", "bytes_sent", "bytes_dense")} | {"seconds": seconds}

    def _after_warmup(self) -> dict[str, float]:
        """Return the reduction of this process's steps after the warm-up, if there are any."""
        stats = self._learner.sync.stats
        has_any = stats.bytes_sent != stats.warmup_bytes_sent
        return {"reduction_after_warmup": stats.reduction_after_warmup} if has_any else {}


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _fits(saved: object, like: object) -> bool:
    """Return whether a saved value has this form, with numbers from 0 on that a float holds exactly."""
    if isinstance(like, dict) and isinstance(saved, dict):
        return saved.keys() == like.keys() and all(_fits(saved[name], part) for name, part in like.items())
    return (type(saved) is int or type(saved) is type(like) is float) and 0 <= saved < _LARGEST
