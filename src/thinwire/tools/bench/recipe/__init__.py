"""`thinwire bench recipe`: trains the same model by different methods and compares loss and bytes sent.

All methods start from the same weights and have the same data and the same schedule. Those with one optimizer have the
same learning rate; for a method that does better with other options, dense ones too, write them behind its name. The
table shows the validation loss and the bytes that each rank sent, warm-up included. thinwire and textbook top-k have a
warm-up in 8 bits. That of PowerSGD has as many steps, at least 2, and is dense. Local steps have none, and are
evaluated when a round has ended and all ranks have the same weights. Ranks are processes with DDP over gloo,
or, with --simulate, threads of one process.

If ranks end with different weights, the exit code is 1. Losses never change the exit code.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from thinwire.tools.links.network import network, prepare
from thinwire.tools.units import parse_link

from ..harness import File, Line, Model, Names, Numbers, Progress, Row, arg, at_least, check_world, print_table
from ..harness import run as run_benchmark
from ..methods import BY_LOSS, FAMILIES

if TYPE_CHECKING:
    from .trainer import Ranks, Settings

LEARNING_RATES = {"gpt": (1e-3, 0.2), "cnn": (1e-3, 0.02), "resnet18": (1e-3, 0.1)}
"""Learning rates of AdamW and SGD, by model.

At 2e-3, the losses of dense runs of the default size differ by 0.2 between seeds, at 1e-3 by 0.01.
"""


@dataclass(frozen=True)
class Options:
    """Train one model by many methods: loss and bytes sent.

    A method is a name, or a name and options of its optimizer or compressor: "adamw thinwire;betas=0.7,0.999;lr=2e-3".
    Besides those of "all" there are muon dense, and local steps with a compressor after adamw, sgd or muon: "muon local
    steps 8 quantize:bits=2;delay=4".
    """

    methods: Names = ("all",)
    """all, or some of: adamw dense, adamw fp16 hook, adamw powersgd rank 1, adamw powersgd rank 4, adamw textbook topk,
    adamw thinwire 8-bit, adamw thinwire, sgd dense, sgd textbook topk, sgd thinwire."""
    model: Model = "gpt:layers=2,width=128,heads=4,context=64"
    """gpt, on bytes of Python's standard library; cnn:width=32, on noisy digits; or on other --data."""
    data: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Other data that fits the model: mnist, fashion-mnist or cifar10."""
    data_dir: Annotated[Path, arg(metavar="PATH")] = Path("data")
    """Where its files are; for a gpt, a file whose bytes are its text."""
    workers: int = 2
    """Ranks."""
    batch: int = 4
    """Samples for each rank and step."""
    steps: int = 600
    """Number of training steps."""
    warmup_steps: int | None = None
    """First steps, which send 8 bits; 2 by default."""
    lr: Annotated[tuple[float, float] | None, arg(metavar="ADAMW SGD")] = None
    """Learning rates of AdamW, which Muon has too, and of SGD, at their highest; by default 1e-3 and 0.2, for the cnn
    1e-3 and 0.02."""
    seeds: Numbers = (0,)
    """Each method runs once with each: other weights, other batches."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model is."""
    simulate: bool = False
    """Ranks are threads of one process, so that many fit on one device. fp16 and PowerSGD follow the rules of torch's
    hooks, which need processes."""
    bf16: bool = False
    """The model computes in bfloat16 (autocast); with --simulate."""
    link: Annotated[str | None, arg(metavar="RATE[,TIME]", help_behavior_hint="")] = None
    """Rate of each rank's link, such as 1gbit, or with a round-trip time, such as 100mbit,100ms: network namespaces, or
    a relay if there are none."""
    out: File = None
    """Write JSON lines to this file: the conditions, then a row for each method and seed."""


def run(options: Options) -> int:
    """Train and print the table. Return 0, or 1 if ranks ended with different weights or a rank failed."""
    why_relay = None
    if options.link is not None:
        parse_link(options.link)
        if options.simulate or options.device != "cpu":
            raise ValueError("--link with --simulate or --device cuda, expected ranks that are processes on the CPU")
        why_relay = prepare()  # before torch is loaded
    # These load torch; --help and errors in options should not wait for that.
    from . import trainer
    from .gradients import Threads

    given = settings(options)

    def measure(progress: Progress) -> Iterator[Row]:
        with Threads() if given.simulate else workers_behind_links(given, why_relay) as ranks:
            yield from trainer.measure(given, ranks, progress)

    return run_benchmark(
        options,
        measure,
        show,
        name="bench recipe",
        progress_steps=len(given.methods) * len(given.seeds),
        **given.record(),
    )


@contextmanager
def workers_behind_links(given: "Settings", why_relay: str | None) -> "Iterator[Ranks]":
    """Start processes, behind links if the settings have a rate.

    why_relay   why the links need a relay; None if they can be network namespaces.
    """
    from thinwire.tools.workers import Workers

    relay = why_relay is not None
    links = nullcontext() if given.link is None else network(given.workers, *parse_link(given.link), relay=relay)
    with links as net, Workers(given.workers, links=None if net is None else net.links) as workers:
        yield workers


def settings(options: Options) -> "Settings":
    """Return the checked options. Raises ValueError for options that cannot be run."""
    import torch

    from thinwire.tools.train.images import check_fit
    from thinwire.tools.train.models import GPTConfig, model_config

    from ..training import check
    from .trainer import Settings

    texts = BY_LOSS if options.methods == ("all",) else options.methods
    if not texts:
        raise ValueError("--methods without a method, expected all, or one or more names")
    methods = tuple(check(text) for text in texts)
    possible = ("dense", "fp16 hook", "powersgd rank 1", "powersgd rank 4")
    for method in methods:
        if not method.is_ours and method.name not in possible:
            raise ValueError(
                f"--methods {method.text!r} cannot be trained by bench recipe; choose another method, such as dense"
            )
    check_world("workers", options.workers)
    at_least(options, batch=1, steps=1)
    if not options.seeds:
        raise ValueError("--seeds without a seed, expected one or more whole numbers")
    warmup = max(1, min(2, options.steps // 2)) if options.warmup_steps is None else options.warmup_steps
    if not 0 <= warmup < options.steps:
        raise ValueError(f"--warmup-steps {warmup}, expected 0 or more, and fewer than the {options.steps} steps")
    config = model_config(options.model)
    data = options.data or ("text" if isinstance(config, GPTConfig) else "digits")
    check_fit(config, data)
    lr = options.lr or LEARNING_RATES[config.name]
    if not all(0 < rate < math.inf for rate in lr):
        raise ValueError(f"--lr {lr[0]:g} {lr[1]:g}, expected two numbers above 0")
    if options.bf16 and not options.simulate:
        raise ValueError("--bf16 without --simulate, which alone computes so; add --simulate, or leave --bf16 out")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch finds no CUDA device here; use --device cpu")
    return Settings(
        methods=methods,
        seeds=options.seeds,
        config=config,
        data=data,
        data_dir=options.data_dir,
        workers=options.workers,
        batch=options.batch,
        steps=options.steps,
        warmup_steps=warmup,
        lr=dict(zip(FAMILIES, (*lr, lr[0]), strict=True)),  # Muon's is scaled to the updates of AdamW
        device=options.device,
        simulate=options.simulate,
        bf16=options.bf16,
        link=options.link,
    )


def show(rows: list[Row], under: Line) -> None:
    """Print the table, with one line for each method and the mean over its seeds, and what its columns mean."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    dense = {
        group[0]["family"]: _mean(group, "loss") for text, group in by_method.items() if text.split()[-1] == "dense"
    }
    seeds = len({row["seed"] for row in rows})
    cells = [_cells(text, rows=group, dense=dense, with_range=seeds > 1) for text, group in by_method.items()]
    print_table(
        f"{under['model']}, {under['parameters']:,} parameters, {under['workers']} ranks "
        f"({'threads of one process' if under['simulate'] else 'processes'}), {under['steps']} steps, the first "
        f"{under['warmup_steps']} warm-up",
        cells[0].keys(),
        [line.values() for line in cells],
        text=("method",),
        spare=("s", "accuracy"),
    )
    print(
        "reduction: bytes of a dense ring all-reduce of float32, 2 (P - 1) / P times 4 for each parameter, over the "
        "bytes sent; first of all steps, warm-up included.\n"
        "vs dense: loss against that of torch's optimizer, uncompressed, with the same learning rate, which need "
        "not be the best for either.\n"
        "Bytes of torch's own all-reduce and hooks are by the ring's formula, those of thinwire are counted."
    )
    if seeds == 1:
        print("One seed: a small difference between losses may be chance; --seeds 0 1 2 shows how much of it is.")


def _cells(text: str, rows: list[Row], dense: dict[str, float], with_range: bool) -> dict[str, str]:
    loss, reference = _mean(rows, "loss"), dense.get(rows[0]["family"])
    losses = [math.nan if row["loss"] is None else row["loss"] for row in rows]
    return {
        "method": text,
        "val loss": _or_diverged(loss),
        **({"min-max": f"({_or_diverged(min(losses))}-{_or_diverged(max(losses))})"} if with_range else {}),
        "vs dense": f"{loss / reference - 1:+.1%}" if reference and math.isfinite(loss) else "",
        "accuracy": f"{_mean(rows, 'accuracy'):.1%}",
        "MB sent per rank": f"{_mean(rows, 'bytes_total') / 1e6:,.3f}",
        "reduction": f"{_mean(rows, 'reduction'):.1f}",
        "MB/step after warm-up": f"{_mean(rows, 'bytes_per_step') / 1e6:,.4f}",
        "reduction after warm-up": f"{_mean(rows, 'reduction_per_step'):.1f}",
        "s": f"{sum(row['seconds'] for row in rows):.0f}",
    }


def _mean(rows: Sequence[Row], key: str) -> float:
    """Return the mean of a field, NaN if one is None: a loss that diverged, or a reduction of nothing sent."""
    values = [math.nan if row[key] is None else row[key] for row in rows]
    return sum(values) / len(values)


def _or_diverged(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"
