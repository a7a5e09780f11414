"""Metrics of a run: as JSON lines, in what rank 0 prints, and optionally for TensorBoard or Weights & Biases.

Lines of metrics.jsonl, after the conditions that they were measured under (which are written again after each resume):

    step         loss (mean over ranks, and over the steps since the last line), lr, samples_per_second, split (seconds
                 per step of compute, compress, wait and decode, which add up), skipped (steps with a NaN or Inf),
                 events (what sent further bytes since the last line: warm-up, refresh of the second moments,
                 evaluation, checkpoint, resume); of the first step after a start, and every log_every steps
    evaluation   loss and accuracy on validation data
    choice       the choice of --compressor auto, its measurements (candidates, step_seconds) and the reason; once
    end          reason: finished, stopped by a signal, or failed; ranks: what each has sent in exchanges since the
                 start or the last resume, and with --shard its replica and shard
    step, end    reduction_after_warmup: that of the steps after the warm-up, since then

Each line has the step, the seconds of training so far, bytes_sent, what rank 0 has sent in exchanges so far, and
bytes_dense, what a dense ring all-reduce would have sent.
"""

import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.tools.files import replace_text
from thinwire.tools.record import Writer, conditions

from .config import METRICS_FILE, Config

PHASES = ("compute", "compress", "wait", "decode")
SINKS = ("auto", "none", "tensorboard", "wandb", "wandb-offline")

Sink = tuple[Callable[[Mapping[str, float], int], object], Callable[[], None]]
"""A destination of metrics besides metrics.jsonl: writes numbers by name for a step, and closes."""


class Metrics:
    """Writes the metrics of a run, on rank 0. On other ranks the folder is None, and nothing is written."""

    def __init__(self, folder: Path | None, config: Config, first_step: int, more: Mapping[str, object]) -> None:
        self._lines, self._sinks = Writer(None), list[Sink]()
        if folder is None:
            return
        _cut(folder / METRICS_FILE, first_step, config.steps)
        self._lines = Writer(folder / METRICS_FILE, append=True)
        self._lines.write(conditions(config=config.record(), first_step=first_step, **more))
        modes = {"wandb": os.environ.get("WANDB_MODE", "online"), "wandb-offline": "offline"}
        self._sinks = [
            _open_wandb(folder, config, modes[name]) if name in modes else _open_tensorboard(folder, first_step)
            for name in chosen_sinks(config.log_to)
        ]

    def write(self, kind: str, line: Mapping[str, Any]) -> None:
        """Write a line to metrics.jsonl, with null for NaN, and its numbers to other sinks under the name kind/name."""
        self._lines.write({"kind": kind, **json.loads(json.dumps(line), parse_constant=lambda _: None)})
        scalars = {f"{kind}/{name}": value for name, value in _flat(line).items() if name != "step"}
        for write, _ in self._sinks:
            write(scalars, int(line["step"]))

    def close(self) -> None:
        for _, close in self._sinks:
            close()
        self._lines.close()


def chosen_sinks(names: Sequence[str]) -> list[str]:
    """Return the names of the sinks to open besides metrics.jsonl; raise ValueError for names that are not possible."""
    chosen = list(dict.fromkeys(name for name in names if name not in ("auto", "none")))
    is_alone = len(names) == 1 or "none" not in names
    if not names or not is_alone or {*names} - {*SINKS} or {"wandb", "wandb-offline"} <= {*chosen}:
        raise ValueError(f"--log-to {' '.join(names)}, expected none, or some of {', '.join(SINKS)}, wandb in one way")
    for name in chosen:
        package = name.partition("-")[0]
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--log-to {name}, but {package} is not installed: pip install {package}")
    if "auto" in names and "tensorboard" not in chosen and importlib.util.find_spec("tensorboard") is not None:
        chosen.append("tensorboard")
    return chosen


def _open_tensorboard(folder: Path, first_step: int) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder / "tensorboard", purge_step=first_step + 1)
    add: Any = writer.add_scalar
    return lambda scalars, step: [add(*scalar, step) for scalar in scalars.items()], writer.close


def _open_wandb(folder: Path, config: Config, mode: str) -> Sink:
    """Open the run with the folder's name at Weights & Biases. A resumed run continues it, by an id in its folder."""
    wandb: Any = importlib.import_module("wandb")
    name, path = folder.resolve().name, folder / "wandb-id"
    if not path.exists():
        path.write_text(f"{re.sub('[^A-Za-z0-9_-]', '-', name)}-{os.urandom(4).hex()}", encoding="utf-8")
    given = {"resume": "allow", "dir": str(folder), "mode": mode, "config": config.record()}
    try:
        run: Any = wandb.init(project="thinwire", name=name, id=path.read_text(encoding="utf-8"), **given)
    except Exception as error:  # for example without a login; wandb raises many kinds
        raise ValueError(f"--log-to wandb: {error}; log in with `wandb login`, or use wandb-offline") from None
    return lambda scalars, step: run.log(dict(scalars), step=step), run.finish


def _cut(path: Path, first_step: int, last_step: int) -> None:
    """Remove the lines that will be written again: those of later steps, and a line that was cut off by a crash."""
    if not path.exists():
        return
    kept = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            line = json.loads(text)
            step = line.get("step", line.get("first_step"))
            # A run that goes on has not finished, and evaluates its last step again; that it was stopped before stays.
            comes_again = line.get("reason") == "finished" or (line["kind"] == "evaluation" and step == last_step)
            if step <= first_step and not comes_again and text.endswith("\n"):
                kept.append(text)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):  # it was cut off
            continue
    replace_text(path, "".join(kept))


def _flat(line: Mapping[str, Any]) -> dict[str, float]:
    parts = {f"{name}/{part}": value for name, of in line.items() if isinstance(of, dict) for part, value in of.items()}
    return {name: value for name, value in {**line, **parts}.items() if isinstance(value, int | float)}


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def describe_step(line: Mapping[str, Any]) -> str:
    """Return the figures of a step, from its line of metrics.jsonl."""
    split = "  ".join(f"{phase} {1000 * line['split'][phase]:.1f}" for phase in PHASES)
    speed = f"{line['samples_per_second']:,.0f} samples/s"
    return f"loss {line['loss']:.4f}  {speed}  {_sent(line)}  ms: {split}"


def describe_end(name: str, end: Mapping[str, Any]) -> str:
    """Return a line about a training, from the last line of its metrics with its score."""
    score = f"validation loss {end['loss']:.4f}, accuracy {end['accuracy']:.2%}"
    return f"{name}: {end['step']:,} steps in {end['seconds']:.1f} s, {score}, {_sent(end)} by each rank"


def compare(ours: Mapping[str, Any], dense: Mapping[str, Any]) -> str:
    """Return a sentence that compares two trainings."""
    return (
        f"Compared with dense training: {reduction(ours['seconds'], dense['seconds'])} as fast, "
        f"{100 * ours['bytes_sent'] / dense['bytes_sent']:.1f} % of the bytes, "
        f"accuracy {ours['accuracy']:.1%} (dense {dense['accuracy']:.1%})."
    )


def reduction(sent: float, dense: float) -> str:
    """Return the bytes of a dense all-reduce divided by those sent, as text; empty if nothing was sent.

    >>> reduction(10, 375), reduction(10, 15), reduction(10, 10), reduction(3, 2), reduction(0, 0)
    ('38x', '1.5x', '1.0x', '0.7x', '')
    """
    if not sent or not dense:
        return ""
    return f"{dense / sent:.1f}x" if dense < 10 * sent else f"{dense / sent:.0f}x"


def _sent(line: Mapping[str, Any]) -> str:
    ratio = reduction(line["bytes_sent"], line["bytes_dense"])
    return f"{line['bytes_sent'] / 1e6:,.2f} MB sent{f' (reduction {ratio})' if ratio else ''}"
