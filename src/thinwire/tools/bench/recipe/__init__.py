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
from contextlib import ExitStack
from statistics import fmean

from thinwire.tools.links.network import network, prepare
from thinwire.tools.units import parse_link

from ..harness import Line, Progress, Row, print_table
from ..harness import run as run_benchmark
from .options import Options, check


def run(options: Options) -> int:
    """Train and print the table. Return 0, or 1 if ranks ended with different weights or a rank failed."""
    why_relay = None
    if options.link is not None:
        parse_link(options.link)
        if options.simulate or options.device != "cpu":
            raise ValueError("--link with --simulate or --device cuda, expected ranks that are processes on the CPU")
        why_relay = prepare()  # before torch is loaded
    # These load torch; --help and errors in options should not wait for that.
    from thinwire.testing.pool import Workers

    from . import trainer
    from .gradients import Threads

    check(options)

    def measure(progress: Progress) -> Iterator[Row]:
        with ExitStack() as stack:
            ranks: Workers | Threads
            if options.simulate:
                ranks = stack.enter_context(Threads())
            else:
                links = None
                if options.link is not None:
                    net = network(options.workers, *parse_link(options.link), relay=why_relay is not None)
                    stack.enter_context(net)
                    links = net.links
                ranks = stack.enter_context(Workers(options.workers, links=links))
            yield from trainer.measure(options, ranks, progress)

    return run_benchmark(
        options,
        measure,
        show,
        name="bench recipe",
        progress_steps=len(options.chosen) * len(options.seeds),
        **options.record(),
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
        cells,
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
    return fmean(math.nan if row[key] is None else row[key] for row in rows)


def _or_diverged(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"
