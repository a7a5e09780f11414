"""The options of `thinwire train`: their help, the recipes, and values from a file or from the run that is resumed.

A recipe sets the values, a file overrides them, and the command line overrides both. This module does not import torch,
so that `--help` is fast.
"""

import argparse
import difflib
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from tyro.conf import Suppress, arg

from . import FASHION_FOLDER

RUNS = Path("runs")
CONFIG_FILE, METRICS_FILE = "config.json", "metrics.jsonl"
FILE_ONLY = ("weight_decay", "keep", "log_every")  # Options that are seldom given, and not on the command line


@dataclass(frozen=True)
class Config:
    """Train a model between ranks that send few bytes.

    Starts ranks on this machine by itself; across machines: torchrun --nnodes ... -m thinwire train ...
    The defaults shown are those of the recipe: thinwire train --recipe text-gpt --help shows others.
    """

    recipe: Literal["digits-cnn", "text-gpt", "mnist-cnn", "fashion-cnn", "cifar10-resnet18"] = "digits-cnn"
    """A model, its data, and settings that suit them; each option below overrides it."""
    model: Annotated[str, arg(metavar="SPEC")] = "cnn:width=64,size=8"
    """A kind and its options, such as "cnn:width=32,size=28", "resnet18:width=64" or "gpt:layers=4,width=128"."""
    data: Literal["digits", "text", "mnist", "fashion-mnist", "cifar10"] = "digits"
    """digits, and text of this machine's Python sources, need no network."""
    data_dir: Annotated[Path, arg(metavar="PATH")] = Path("data")
    """Where the files of mnist, fashion-mnist and cifar10 are. fashion-cnn has the folder of Debian's package."""
    download: bool = False
    """Fetch files of mnist or cifar10 that are missing there. Needs pip install 'thinwire[data]'."""
    steps: int = 300
    """Total number of steps."""
    batch: int = 32
    """Samples for each rank and step."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """thinwire's own if the compressor is sparse or auto, which sends its update; otherwise, and with --local-steps,
    torch's."""
    lr: float = 1e-3
    """Learning rate at its highest; sgd has momentum 0.9."""
    weight_decay: Suppress[float] = 0.01
    """Weight decay."""
    compressor: Annotated[str, arg(metavar="SPEC")] = "default"
    """What is sent: none is dense, quantize:bits=8 a quarter of it, topk:ratio=1/64,bits=2 a two-hundredth; default:
    topk with a ratio for the number of ranks; auto: what is fastest is measured in the first steps."""
    warmup_steps: int = 2
    """First steps, in which a sparse compressor, or auto, sends 8 bits of everything. --local-steps has none."""
    local_steps: Annotated[int, arg(metavar="H")] = 0
    """Each rank takes H steps alone; then ranks exchange how far they have come. 0: ranks exchange at every step."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: forward and backward pass under autocast."""
    workers: int = 2
    """Ranks, which are processes on this machine; under torchrun, torchrun gives their number."""
    link: Annotated[str | None, arg(metavar="RATE[,TIME]")] = None
    """Rate of each rank's link on this machine, such as 100mbit, or with a round-trip time, 100mbit,100ms; up
    to 2gbit, because a relay holds the bytes back."""
    shard: int = 1
    """Ranks of each replica, over which FSDP shards a gpt; what is compressed is sent between replicas. 1: DDP."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is one, else the CPU."""
    seed: int = 0
    """Seed of the weights and of the sample order."""
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """The run's folder: config, metrics, checkpoints, report. runs/RECIPE by default, or runs/RECIPE-2 and so on."""
    resume: Literal["no", "auto"] = "no"
    """auto: go on from the newest good checkpoint in the folder (without --out: of the newest run) if there is one.
    Options that are not given are then those of the run."""
    checkpoint_every: int = 100
    """Steps between checkpoints; 0: only when training ends or a signal stops it."""
    keep: Suppress[int] = 2
    """Number of checkpoints to keep; the older ones are removed."""
    log_every: Suppress[int] = 10
    """Steps between lines of metrics."""
    eval_every: int = 100
    """Steps between evaluations on the validation data; the last step is always evaluated, and with 0 it alone."""
    log_to: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ("auto",)
    """Besides metrics.jsonl: auto (tensorboard, if it is installed), none, tensorboard, wandb, wandb-offline."""
    compare_dense: bool = False
    """Train once more with torch's optimizer and nothing compressed, into FOLDER/dense, and show both."""

    def record(self) -> dict[str, Any]:
        """Return the options as values for JSON."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}


RECIPES: dict[str | None, Config] = {
    "digits-cnn": Config(),
    "text-gpt": Config(
        recipe="text-gpt", model="gpt:layers=4,width=128,heads=4,context=64", data="text", batch=8, steps=600,
        eval_every=200, checkpoint_every=200,
    ),
    "mnist-cnn": Config(
        recipe="mnist-cnn", model="cnn:width=32,size=28", data="mnist", batch=64, steps=1000, eval_every=250,
        checkpoint_every=250,
    ),
    "fashion-cnn": Config(
        recipe="fashion-cnn", model="cnn:width=16,size=28", data="fashion-mnist", data_dir=FASHION_FOLDER, batch=64,
        steps=2000, optimizer="sgd", lr=0.03, weight_decay=5e-4, eval_every=500, checkpoint_every=500,
    ),
    "cifar10-resnet18": Config(
        recipe="cifar10-resnet18", model="resnet18:width=64", data="cifar10", batch=128, steps=5860, optimizer="sgd",
        lr=0.1, weight_decay=5e-4, eval_every=500, checkpoint_every=500,
    ),
}  # fmt: skip


def defaults(arguments: Sequence[str]) -> Config:
    """Return the defaults for a command line: those of the file for --config, then of the resumed run or the recipe."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("config", "recipe", "resume", "out"):
        early.add_argument(f"--{option}", nargs="?")
    seen = early.parse_known_args(arguments)[0]
    given = {} if seen.config is None else read_config(Path(seen.config))
    name, out = seen.recipe or given.get("recipe"), seen.out or given.get("out")
    if (seen.resume or given.get("resume")) == "auto":
        folder = Path(out) if out else newest_run(name)
        if folder is not None and (folder / CONFIG_FILE).exists():
            return replace(load_config(folder), **{**given, "out": folder, "resume": "auto"})
    return replace(RECIPES.get(name, Config()), **given)  # tyro reports an unknown recipe


def read_config(path: Path) -> dict[str, Any]:
    """Return the options that a file for `--config` gives; raise ValueError if it is not one.

    The config.json of a run starts another run: it gives neither its folder nor whether it was resumed.
    """
    given = _read(path)
    is_of_run = path.name == CONFIG_FILE and (path.parent / METRICS_FILE).exists()
    return {name: value for name, value in given.items() if not (is_of_run and name in ("out", "resume"))}


def load_config(folder: Path) -> Config:
    """Return the config of a run; raise ValueError if it is damaged or of another version."""
    given = _read(folder / CONFIG_FILE)
    missing = [field.name for field in fields(Config) if field.name not in given]
    if missing:
        raise ValueError(f"{folder / CONFIG_FILE}: expected all options of a run, got none for {', '.join(missing)}")
    return Config(**given)


def newest_run(recipe: str | None) -> Path | None:
    """Return the folder of the run in runs/ that was started or resumed last, of one recipe or of any; None if none."""
    named = re.compile(".*" if recipe is None else rf"{re.escape(recipe)}(-\d+)?")
    found = [path.parent for path in RUNS.glob(f"*/{CONFIG_FILE}") if named.fullmatch(path.parent.name)]
    return max(found, key=lambda folder: (folder / CONFIG_FILE).stat().st_mtime, default=None)


def _read(path: Path) -> dict[str, Any]:
    """Return the options in a file; raise ValueError, with its name, if it has anything else."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix not in (".json", ".toml"):
            raise ValueError("expected a file of TOML (steps = 100) or JSON, with a name that ends in .toml or .json")
        given = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        if not isinstance(given, dict):
            raise ValueError(f"expected options with their values, got a {type(given).__name__}")
        return {name: _value(name, value) for name, value in given.items()}
    except (ValueError, OverflowError, RecursionError, OSError) as error:
        raise ValueError(f"config {path}: {error}") from None


def _value(name: str, value: Any) -> Any:
    """Return the value of an option, given that of a file, where a path is text and a tuple a list."""
    hints = get_type_hints(Config)
    if name not in hints:
        nearest = difflib.get_close_matches(name.replace("-", "_"), hints, 1, cutoff=0.0)
        raise ValueError(f"unknown option {name!r:.80}; did you mean {nearest[0]}?")
    default, given = Config().record()[name], value
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = tuple(value)
    elif type(value) is int and isinstance(default, float):
        value = float(value)
    choices = [choice for choice in get_args(hints[name]) if isinstance(choice, str)]
    is_text_or_nothing = default is None and isinstance(value, str)
    if (type(value) is not type(default) and not is_text_or_nothing) or (choices and value not in choices):
        expected = ", ".join(choices) or f"a value such as {json.dumps(default)}"
        raise ValueError(f"{name} is {given!r:.80}, expected {expected}")
    return Path(value) if name in ("out", "data_dir") and value is not None else value
