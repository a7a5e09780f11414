"""`thinwire bench step`: measures the time and memory of a training step and compares them with plain DDP.

Time: processes train with DDP over gloo on this machine, with one thread each. The methods are measured in turns.
Memory: each method runs in processes of its own. The result is the peak resident memory over a few steps, minus the
memory before the model was built, in units of the model's float32 parameters.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from .harness import File, Line, Model, Progress, Row, at_least, print_table
from .harness import run as run_benchmark
from .methods import BY_STEP, parse

if TYPE_CHECKING:
    from thinwire.testing.pool import Workers

_RANKS, _BATCH, _WARM_UP_STEPS, _STEPS_IN_TURN = 2, 4, 12, 3
"""The batch is that of a rank and step, for the time."""


@dataclass(frozen=True)
class Options:
    """Time and memory of a training step, compared with torch's own."""

    model: Model = "gpt:layers=4,width=256,heads=4,context=128"
    """Model whose step is timed."""
    large_model: Model = "gpt:layers=6,width=512,heads=8,context=16"
    """Model whose memory is measured, with one sample in a step: parameters outweigh what else there is."""
    rounds: int = 30
    """In each, every method takes three steps."""
    out: File = None
    """Write JSON lines to this file."""


class Stepper:
    """Runs on each rank and trains by several methods, each with its own model."""

    def __init__(self, rank: int, size: int, spec: str, batch: int, methods: list[str]) -> None:
        import warnings

        import torch
        from torch.nn import functional as F

        from thinwire.tools.train.models import model_config

        from .training import Setup, build

        warnings.simplefilter("ignore")
        self._before = _loaded()
        config: Any = model_config(spec)
        tokens = torch.randint(256, (batch, config.context + 1), generator=torch.Generator().manual_seed(rank))
        targets = tokens[:, 1:].flatten()
        self._loss = lambda module: F.cross_entropy(module(tokens[:, :-1]).flatten(0, -2), targets)
        self._trainings = {
            text: build(parse(text), Setup(config.build(0), lr=1e-4, ddp={"gradient_as_bucket_view": True}))
            for text in methods
        }

    def step(self, method: str, times: int) -> list[float]:
        """Take `times` training steps and return the milliseconds of each."""
        from .training import take_step

        marks = [take_step(self._trainings[method], self._loss) for _ in range(times)]
        return [1e3 * (one.end - one.begin) for one in marks]

    def peak(self) -> int:
        """Return the peak resident memory over a few steps in bytes, beyond the memory before the model was built."""
        from .measure import peak_resident

        (method,) = self._trainings
        self.step(method, 4)
        gc.collect()
        return peak_resident(lambda: self.step(method, 4)) - self._before


def run(options: Options) -> int:
    """Measure and print the table. Return 0, or 1 if a rank failed."""
    from thinwire.tools.train.models import GPTConfig, model_config

    configs = [model_config(spec) for spec in (options.model, options.large_model)]
    for option, config in zip(("--model", "--large-model"), configs, strict=True):
        if not isinstance(config, GPTConfig):
            raise ValueError(f"{option} {config.name}, expected a gpt: this benchmark has text alone")
    small, large = (sum(parameter.numel() for parameter in config.build(0).parameters()) for config in configs)
    at_least(options, rounds=1)
    return run_benchmark(
        options,
        lambda progress: _measure(options, small=small, large=large, progress=progress),
        _show,
        name="bench step",
        progress_steps=1 + len(BY_STEP),
        workers=_RANKS,
        batch=_BATCH,
        model=options.model,
        large_model=options.large_model,
        rounds=options.rounds,
    )


def _measure(options: Options, small: int, large: int, progress: Progress) -> Iterator[Row]:
    """Yield a row for each method: its time, and its peak memory in copies of the parameters.

    Ratios of times are medians over rounds. `times_dense` and `more_memory` are those to dense with the same optimizer.
    `small` and `large` are the numbers of parameters of the two models.
    """
    from thinwire.testing.pool import Workers

    progress.start("time, all in turns")
    with Workers(_RANKS) as workers:
        workers.form(_RANKS, Stepper, options.model, _BATCH, list(BY_STEP))
        times = _times(workers, options.rounds)
    progress.finish(f"{small:,} parameters")
    peaks: dict[str, float] = {}
    for text in BY_STEP:
        progress.start(f"memory, {text}")
        with Workers(_RANKS) as workers:
            workers.form(_RANKS, Stepper, options.large_model, 1, [text])
            peaks[text] = max(workers.ask("peak")) / (4 * large)
        dense = f"{parse(text).family} dense"
        progress.finish(f"{peaks[text]:.2f} copies of the parameters")
        yield {
            "kind": "step",
            "method": text,
            "ms": median(times[text]),
            "times_dense": median(mine / theirs for mine, theirs in zip(times[text], times[dense], strict=True)),
            "memory": peaks[text],
            "more_memory": peaks[text] - peaks[dense],
            "parameters": small,
            "large_parameters": large,
        }


def _times(workers: "Workers", rounds: int) -> dict[str, list[float]]:
    """Return the time of a step for each method and round: the maximum over ranks, as the median of three steps."""
    for text in BY_STEP:
        workers.ask("step", text, _WARM_UP_STEPS)
    taken: dict[str, list[float]] = {text: [] for text in BY_STEP}
    for number in range(rounds):
        for text in BY_STEP if number % 2 == 0 else reversed(BY_STEP):
            by_rank = workers.ask("step", text, _STEPS_IN_TURN)
            taken[text].append(median(map(max, zip(*by_rank, strict=True))))
    return taken


def _show(rows: list[Row], under: Line) -> None:
    cells = [
        {
            "method": row["method"],
            "ms": f"{row['ms']:.1f}",
            "x dense": f"{row['times_dense']:.3f}",
            "memory, copies of the parameters": f"{row['memory']:.2f}",
            "more than dense": f"{row['more_memory']:+.2f}",
        }
        for row in rows
    ]
    print_table(
        f"{under['workers']} ranks; time with {rows[0]['parameters']:,} parameters, memory with "
        f"{rows[0]['large_parameters']:,}",
        cells,
        text=("method",),
    )
    print("dense: DDP and torch's optimizer. Ratios are medians over rounds in which the methods take turns.")


def _loaded() -> int:
    """Return the resident memory after the compiled kernels are loaded, because they take as much as a small model."""
    import torch

    import thinwire
    from thinwire.kernels.updates import AdamUpdate

    from .measure import peak_resident
    from .methods import EIGHT_BITS, TOPK

    tensor = torch.randn(1 << 18)
    for spec in (TOPK, EIGHT_BITS):
        thinwire.compressor(spec).compress(tensor, torch.zeros_like(tensor)).decompress()
    m, v, out = (torch.ones_like(tensor) for _ in range(3))
    update = AdamUpdate(m, v, beta1=0.5, factor=1.0, scale=1.0, floor=1e-8, limit=10.0, rate=1.0, beta2=0.999)
    update.write(tensor, out)
    update.advance(tensor, None)
    del tensor, m, v, out, update
    gc.collect()
    return peak_resident(lambda: None)
