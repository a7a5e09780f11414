"""The options of `thinwire bench recipe`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg


@dataclass(frozen=True)
class Options:
    """Train one model by many recipes: loss beside bytes sent.

    A recipe is a name, or a name and options of its optimizer or compressor: "adamw thinwire;betas=0.7,0.999;lr=2e-3".
    """

    recipes: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ("all",)
    """all, or some of: adamw dense, adamw fp16 hook, adamw powersgd rank 1, adamw powersgd rank 4, adamw textbook topk,
    adamw thinwire 8-bit, adamw thinwire, sgd dense, sgd textbook topk, sgd thinwire."""
    model: Annotated[str, arg(metavar="SPEC")] = "gpt:layers=2,width=128,heads=4,context=64"
    """gpt, on bytes of Python's standard library; cnn:width=32, on noisy digits of scikit-learn; or on other --data."""
    data: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Other data that fits the model: mnist, fashion-mnist or cifar10."""
    data_dir: Annotated[Path, arg(metavar="PATH")] = Path("data")
    """Where its files are; for a gpt, a file whose bytes are its text."""
    workers: int = 2
    """Ranks."""
    batch: int = 4
    """Samples for each worker and step."""
    steps: int = 600
    """Of training."""
    warmup_steps: int | None = None
    """In which little is compressed; 2 by default."""
    lr: Annotated[tuple[float, float] | None, arg(metavar="ADAMW SGD")] = None
    """Learning rates of AdamW and of SGD, at their highest; by default 1e-3 and 0.2, for the cnn 1e-3 and 0.02."""
    seeds: Annotated[tuple[int, ...], arg(metavar="INT ...")] = (0,)
    """Each recipe runs once with each: other weights, other batches."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model is."""
    simulate: bool = False
    """Ranks are threads of one process, so that many fit on one device. fp16 and PowerSGD follow the rules of torch's
    hooks, which need processes."""
    bf16: bool = False
    """The model computes in bfloat16 (autocast); with --simulate."""
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write JSON lines to this file: the conditions, then a row for each recipe and seed."""
