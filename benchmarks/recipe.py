"""`python -m benchmarks recipe`: trains the same model by different methods and compares loss and bytes sent.

All methods start from the same weights and have the same data and the same schedule. Those with one optimizer have the
same learning rate; for a method that does better with other options, dense ones too, write them behind its name. The
table shows the validation loss and the bytes that each rank sent, warm-up included. thinwire and textbook top-k have a
warm-up in 8 bits. That of PowerSGD has as many steps, at least 2, and is dense. Local steps have none, and are
evaluated when a round has ended and all ranks have the same weights. Ranks are processes with DDP over gloo,
or, with --simulate, threads of one process.

If ranks end with different weights, the exit code is 1. Losses never change the exit code.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from thinwire.tools.units import parse_link

from . import results_recipe
from .harness import File, Line, Model, Names, Numbers, Progress, Row, arg, at_least, check_world
from .harness import run as run_benchmark
from .methods import BY_LOSS, FAMILIES, NO_COMMUNICATION, Method, parse
from .namespaces import network, why_not

if TYPE_CHECKING:
    from thinwire.tools.train.images import Data
    from thinwire.tools.train.models import ModelConfig

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
    """gpt, on bytes of Python's standard library; cnn:width=32, on digits; or on other --data."""
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
    """Ranks are threads of one process, so that many fit on one device; without torch's hooks, which need processes."""
    bf16: bool = False
    """The model computes in bfloat16 (autocast)."""
    link: Annotated[str | None, arg(metavar="RATE[,TIME]", help_behavior_hint="")] = None
    """Rate of each rank's link, such as 1gbit, or with a round-trip time, such as 100mbit,100ms: network namespaces, or
    a relay if there are none."""
    out: File = None
    """Write JSON lines to this file: the conditions, then a row for each method and seed."""

    @property
    def chosen(self) -> list[Method]:
        texts = [text for text in BY_LOSS if not (self.simulate and parse(text).is_hook)]
        return [parse(text) for text in (texts if self.methods == ("all",) else self.methods)]

    @property
    def config(self) -> "ModelConfig":
        from thinwire.tools.train.models import model_config

        return model_config(self.model)

    @property
    def data_name(self) -> str:
        return self.data or ("text" if hasattr(self.config, "context") else "digits")

    @property
    def warmup(self) -> int:
        return max(1, min(2, self.steps // 2)) if self.warmup_steps is None else self.warmup_steps

    @property
    def rates(self) -> Mapping[str, float]:
        """Return the learning rate of each family of optimizers. Muon's is scaled to the updates of AdamW."""
        lr = self.lr or LEARNING_RATES[self.config.name]
        return dict(zip(FAMILIES, (*lr, lr[0]), strict=True))

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.config.build(0).parameters())

    def load_data(self) -> "Data":
        from thinwire.tools.train.images import load_data

        return load_data(self.data_name, self.data_dir, getattr(self.config, "context", None), device=self.device)

    def record(self) -> dict[str, Any]:
        import torch

        kept = ("workers", "batch", "steps", "simulate", "bf16", "link")
        is_file = self.data_name == "text" and self.data_dir.is_file()
        return {
            "model": self.config.name,
            "config": asdict(self.config),
            "parameters": self.parameters,
            "data": self.data_dir.name if is_file else self.data_name,
            "worker_threads": None if self.simulate else 1,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "warmup_steps": self.warmup,
            "lr": self.rates,
            **{name: getattr(self, name) for name in kept},
        }


def check(options: Options) -> None:
    """Raise ValueError for options that cannot be run."""
    import torch

    from thinwire.tools.train.images import check_fit

    from . import training

    if not options.methods:
        raise ValueError("--methods without a method, expected all, or one or more names")
    for method in options.chosen:
        training.check(method.text)
        if method.name == NO_COMMUNICATION:
            raise ValueError(f"--methods {method.text!r}, expected methods that train, such as dense")
        if options.simulate and method.is_hook:
            raise ValueError(
                f"--methods {method.text!r} with --simulate, expected no hook of torch's: it needs processes"
            )
    check_world("workers", options.workers)
    at_least(batch=(options.batch, 1), steps=(options.steps, 1))
    if not options.seeds:
        raise ValueError("--seeds without a seed, expected one or more whole numbers")
    if not 0 <= options.warmup < options.steps:
        raise ValueError(
            f"--warmup-steps {options.warmup}, expected 0 or more, and fewer than the {options.steps} steps"
        )
    check_fit(options.config, options.data_name)
    if options.lr is not None and not all(0 < rate < math.inf for rate in options.lr):
        raise ValueError(f"--lr {options.lr[0]:g} {options.lr[1]:g}, expected two numbers above 0")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch finds no CUDA device here; use --device cpu")


def run(options: Options) -> int:
    """Train and print the table. Return 0, or 1 if ranks ended with different weights or a rank failed."""
    if options.link is not None:
        parse_link(options.link)
        if options.simulate or options.device != "cpu":
            raise ValueError("--link with --simulate or --device cuda, expected ranks that are processes on the CPU")
    # These load torch; --help and errors in options should not wait for that.
    from thinwire.testing.pool import Workers

    from . import trainer
    from .gradients import Threads

    check(options)

    def measure(progress: Progress) -> Iterator[Row]:
        with ExitStack() as stack:
            ranks: Workers | Threads = Threads()
            if not options.simulate:
                links = None
                if options.link is not None:
                    net = network(options.workers, *parse_link(options.link), relay=why_not() is not None)
                    stack.enter_context(net)
                    links = net.links
                ranks = stack.enter_context(Workers(options.workers, links=links))
            yield from trainer.measure(options, ranks, progress)

    steps = len(options.chosen) * len(options.seeds)
    return run_benchmark(options, measure, show, name="recipe", progress_steps=steps, **options.record())


def show(rows: list[Row], under: Line) -> None:
    """Print the tables of `python -m benchmarks results`, and what their bytes are."""
    lines = [{**row, "conditions": under} for row in rows]
    for one in results_recipe.group({Path(): lines}):
        print("\n\n".join(["", results_recipe.title(one), results_recipe.table(one)]))
    print("\nBytes of torch's own all-reduce and hooks are by the ring's formula, those of thinwire are counted.")
