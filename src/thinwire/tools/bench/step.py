"""`thinwire bench step`: measures the time and memory of a training step and compares them with plain DDP.

Time: processes train with DDP over gloo on this machine, with one thread each. The ways are measured in turns. Memory:
each way runs in processes of its own. The result is the peak resident memory over a few steps, minus the memory before
the model was built, in units of the model's float32 parameters.
"""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from thinwire.tools.record import Writer, conditions

from .measure import peak_resident
from .progress import Progress


@dataclass(frozen=True)
class Options:
    """Time and memory of a training step, beside torch's own."""

    model: Annotated[str, arg(metavar="SPEC")] = "gpt:layers=4,width=256,heads=4,context=128"
    """For the time."""
    large_model: Annotated[str, arg(metavar="SPEC")] = "gpt:layers=6,width=512,heads=8,context=16"
    """For the memory, with one sample a step: parameters outweigh what else there is."""
    workers: int = 2
    """Ranks."""
    batch: int = 4
    """Samples for each worker and step, for the time."""
    rounds: int = 30
    """In each, every way takes three steps."""
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write JSON lines to this file."""


@dataclass(frozen=True)
class Row:
    """Results of one way to train."""

    way: str
    ms: float
    """Median time of a step."""
    over_plain: float
    """Time of a step divided by that of the way in `BESIDE`, as the median over rounds."""
    memory: float
    """Peak memory, in copies of the float32 parameters."""
    beyond: float
    """`memory` minus that of the way in `BESIDE`."""


BESIDE = {
    "DDP, torch AdamW": "DDP, torch AdamW",
    "attach none, torch AdamW": "DDP, torch AdamW",
    "attach quantize:bits=8, torch AdamW": "DDP, torch AdamW",
    "thinwire.AdamW": "DDP, torch AdamW",
    "thinwire.AdamW, sharded": "DDP, torch AdamW",
    "DDP, torch SGD": "DDP, torch SGD",
    "thinwire.SGD": "DDP, torch SGD",
}
"""Maps each way to the plain DDP way that it is compared with."""


class Stepper:
    """Runs on each rank and trains by several ways, each with its own model."""

    def __init__(self, rank: int, size: int, spec: str, batch: int, ways: list[str]) -> None:
        import torch

        from thinwire.tools.train.models import model_config

        self._before = _loaded()
        config: Any = model_config(spec)
        self._tokens = torch.randint(256, (batch, config.context + 1), generator=torch.Generator().manual_seed(rank))
        self._ways = {way: _made(way, config.build(0)) for way in ways}
        self._parameters = sum(int(p.numel()) for p in config.build(0).parameters())

    def count(self) -> int:
        """Return the number of parameters of the model."""
        return self._parameters

    def step(self, way: str, times: int) -> list[float]:
        """Take `times` training steps and return the milliseconds of each."""
        module, optimizer = self._ways[way]
        taken = []
        for _ in range(times):
            started = time.perf_counter()
            optimizer.zero_grad()
            _loss(module, self._tokens).backward()
            optimizer.step()
            taken.append(1e3 * (time.perf_counter() - started))
        return taken

    def peak(self) -> int:
        """Return the peak resident memory over a few steps in bytes, beyond the memory before the model was built."""
        (way,) = self._ways
        self.step(way, 4)
        gc.collect()
        return peak_resident(lambda: self.step(way, 4)) - self._before


def run(options: Options) -> int:
    """Measure and print the table. Return 0, or 1 if a rank failed."""
    from thinwire.tools.train.models import model_config
    from thinwire.tools.workers import WorkerError, Workers

    for spec in (options.model, options.large_model):
        model_config(spec)
    for name in ("workers", "batch", "rounds"):
        if getattr(options, name) < (2 if name == "workers" else 1):
            raise ValueError(f"--{name} {getattr(options, name)} is too few")
    try:
        with Writer(options.out) as writer, Progress(1 + len(BESIDE)) as progress:
            progress.start("time, all in turns")
            with Workers(options.workers) as workers:
                workers.form(options.workers, Stepper, options.model, options.batch, list(BESIDE))
                small = workers.ask("count")[0]
                times = _times(workers, options.rounds)
            progress.finish(f"{small:,} parameters")
            peaks, large = {}, 0
            for way in BESIDE:
                progress.start(f"memory, {way}")
                with Workers(options.workers) as workers:
                    workers.form(options.workers, Stepper, options.large_model, 1, [way])
                    large = workers.ask("count")[0]
                    peaks[way] = max(workers.ask("peak")) / (4 * large)
                progress.finish(f"{peaks[way]:.2f} copies of the parameters")
            rows = _rows(times, peaks)
            writer.write(conditions(**{**asdict(options), "out": None, "parameters": small, "large_parameters": large}))
            for row in rows:
                writer.write(asdict(row))
    except WorkerError as error:
        print(f"thinwire bench step: FAILED, {error}", file=sys.stderr)
        return 1
    _print(rows, options, small, large)
    return 0


def _times(workers: Any, rounds: int) -> dict[str, list[float]]:
    """Return the time of a step for each way and round: the maximum over ranks, as the median of three steps."""
    for way in BESIDE:
        workers.ask("step", way, 12)  # the warm-up, and a few steps after it
    taken: dict[str, list[float]] = {way: [] for way in BESIDE}
    for number in range(rounds):
        order = list(BESIDE) if number % 2 == 0 else list(reversed(BESIDE))
        for way in order:
            by_rank = workers.ask("step", way, 3)
            taken[way].append(sorted(map(max, zip(*by_rank, strict=True)))[1])
    return taken


def _rows(times: dict[str, list[float]], peaks: dict[str, float]) -> list[Row]:
    from statistics import median

    return [
        Row(
            way,
            median(times[way]),
            median(mine / theirs for mine, theirs in zip(times[way], times[beside], strict=True)),
            peaks[way],
            peaks[way] - peaks[beside],
        )
        for way, beside in BESIDE.items()
    ]


def _print(rows: list[Row], options: Options, small: int, large: int) -> None:
    from .tables import print_table

    print_table(
        f"{options.workers} workers; time with {small:,} parameters, memory with {large:,}",
        ("way", "ms a step", "x torch's own", "memory, copies of the parameters", "beyond torch's own"),
        [
            [row.way, f"{row.ms:.1f}", f"{row.over_plain:.3f}", f"{row.memory:.2f}", f"{row.beyond:+.2f}"]
            for row in rows
        ],
        text=("way",),
    )
    print("Ratios are medians over rounds in which the ways take turns.")


def _made(way: str, model: Any) -> tuple[Any, Any]:
    import warnings

    import torch
    from torch.nn.parallel import DistributedDataParallel

    import thinwire

    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if way.startswith("attach"):
        warnings.simplefilter("ignore")
        thinwire.attach(module, way.split(",")[0].split()[1])
    made: dict[str, Callable[[], Any]] = {
        "thinwire.AdamW": lambda: thinwire.AdamW(module, lr=1e-4, warmup_steps=2),
        "thinwire.AdamW, sharded": lambda: thinwire.AdamW(module, lr=1e-4, warmup_steps=2, algorithm="sharded"),
        "thinwire.SGD": lambda: thinwire.SGD(module, lr=1e-4, warmup_steps=2),
        "DDP, torch SGD": lambda: torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9),
    }
    return module, made.get(way, lambda: torch.optim.AdamW(module.parameters(), lr=1e-4))()


def _loss(module: Any, tokens: Any) -> Any:
    from torch.nn import functional as F

    return F.cross_entropy(module(tokens[:, :-1]).flatten(0, -2), tokens[:, 1:].flatten())


def _loaded() -> int:
    """Return the resident memory after the compiled kernels are loaded, because they take as much as a small model."""
    import torch

    import thinwire

    tensor = torch.randn(1 << 18)
    for spec in ("topk:ratio=1/64,bits=2", "quantize:bits=8"):
        thinwire.compressor(spec).compress(tensor, torch.zeros_like(tensor)).decompress()
    kernel = thinwire.kernels.adam(tensor.device)
    m, v, out = (torch.ones_like(tensor) for _ in range(3))
    kernel.write(tensor, m, v, beta1=0.5, factor=1.0, scale=1.0, floor=1e-8, limit=10.0, rate=1.0, out=out)
    kernel.advance(tensor, m, v, None, beta1=0.5, beta2=0.999, factor=1.0, scale=1.0, floor=1e-8, limit=10.0, rate=1.0)
    del tensor, m, v, out
    gc.collect()
    return peak_resident(lambda: None)
