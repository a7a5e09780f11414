"""`thinwire bench recipe`: the same model trained by different recipes: the loss beside the bytes sent.

A recipe is an optimizer and a way to exchange gradients or updates. All of them start from the same weights, see the
same data and have the same schedule; the table has the loss on validation data beside the bytes that each rank sent,
warm-up included. Workers are processes with DDP over gloo, or, with --simulate, threads of one process.

Ranks that end with different weights end in exit code 1. Losses are told, never judged.
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from thinwire.tools.bench.progress import Progress
from thinwire.tools.record import Writer, conditions


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


def run(options: Options) -> int:
    """Train and print the table; 1 if ranks ended with different weights, or a worker failed."""
    # These load torch, for which help and wrong options should not wait.
    from thinwire.tools.workers import WorkerError, Workers

    from .measured import measure_all
    from .settings import settings
    from .table import print_rows
    from .threads import Threads

    given = settings(options)
    under = conditions(**given.record())
    rows = []
    try:
        with ExitStack() as stack:
            writer = stack.enter_context(Writer(options.out))
            writer.write(under)
            workers: Threads | Workers = Threads() if given.simulate else Workers(given.workers)
            stack.enter_context(workers)
            progress = stack.enter_context(Progress(len(given.cases)))
            for row in measure_all(given, workers, progress):
                writer.write(row.record())
                rows.append(row)
    except WorkerError as error:
        print(f"thinwire bench recipe: FAILED, {error}", file=sys.stderr)
        return 1
    print("thinwire {thinwire}, torch {torch}, {cpu}, {cores} cores, device {device}, {date}".format(**under))
    print_rows(given, rows)
    faults = [row.fault for row in rows if row.fault]
    for fault in faults:
        print(f"thinwire bench recipe: FAILED, {fault}", file=sys.stderr)
    return 1 if faults else 0
