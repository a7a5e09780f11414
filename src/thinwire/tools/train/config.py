"""The options of `thinwire train`, with a help text under each.

A recipe sets the values, a file overrides them (`options.py`), and the command line overrides both. This module
does not import torch, so that `--help` is fast.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Suppress, arg

RUNS = Path("runs")
CONFIG_FILE = "config.json"
FILE_ONLY = ("weight_decay", "keep", "log_every")
"""Options that are seldom given: they have a place in a file for --config, and none on the command line."""

RecipeName = Literal["digits-cnn", "text-gpt", "mnist-cnn", "fashion-cnn", "cifar10-resnet18"]


@dataclass(frozen=True)
class Config:
    """Train a model between ranks that send few bytes.

    Starts ranks on this machine by itself; across machines: torchrun --nnodes ... -m thinwire train ...
    The defaults shown are those of the recipe: thinwire train --recipe text-gpt --help shows others.
    """

    recipe: RecipeName = "digits-cnn"
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
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: CUDA if there is one, else MPS, else the CPU."""
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


def option(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of one option in a command line that is not parsed yet, or None if it is not given.

    >>> option(["--steps", "3", "--recipe=text-gpt"], "recipe")
    'text-gpt'
    """
    found = None
    for position, argument in enumerate(arguments):
        head, equals, value = argument.partition("=")
        if head.replace("_", "-") == f"--{name}":
            found = value if equals else next(iter(arguments[position + 1 :]), None)
    return found


def newest_run(recipe: str | None) -> Path | None:
    """Return the folder of the run in runs/ that was started or resumed last, of one recipe or of any; None if none."""
    named = re.compile(".*" if recipe is None else rf"{re.escape(recipe)}(-\d+)?")
    found = [path.parent for path in RUNS.glob(f"*/{CONFIG_FILE}") if named.fullmatch(path.parent.name)]
    return max(found, key=lambda folder: (folder / CONFIG_FILE).stat().st_mtime, default=None)
