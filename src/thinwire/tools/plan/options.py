"""The options of `thinwire plan`, and their checks, which need no torch."""

import importlib.util
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from thinwire.tools.bench.harness import check_file
from thinwire.tools.units import parse_bytes, parse_count, parse_rate, parse_seconds

DEFAULT_SPECS = ("quantize:bits=8", "quantize:bits=4", "topk:ratio=1/64,bits=2")
LARGEST_WORLD = 1 << 20
WIRED_LATENCY, SLOW_LATENCY, SLOW_RATE = 50e-6, 2e-3, 1e9
"""Seconds of latency that are assumed from `SLOW_RATE` bits per second on (Ethernet), and below (Wi-Fi, long lines)."""
_PLOTS = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class Options:
    """Step time, bytes and memory of training with and without compression, and which method to use, if any.

    By numbers: thinwire plan --params 7e9 --world 64 --bandwidth 1Gbps --step-compute 2s

    Measured: torchrun --nnodes 2 ... -m thinwire plan --model gpt:layers=4,width=256
    """

    params: Annotated[str | None, arg(metavar="COUNT", help_behavior_hint="")] = None
    """Parameters of the model: 7e9, 350M, 7B."""
    world: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Ranks, each with a link of its own. With several GPUs per node, count nodes."""
    shard: Annotated[int, arg(metavar="INT")] = 1
    """Ranks of each replica of a model that fully_shard shards: each holds and sends its share over a link of its own,
    and --world counts replicas."""
    bandwidth: Annotated[str | None, arg(metavar="RATE", help_behavior_hint="")] = None
    """Bandwidth of each rank's link, in each direction: 100M, 25gbit, 1Gbps."""
    step_compute: Annotated[str | None, arg(metavar="TIME", help_behavior_hint="")] = None
    """A step without communication, forward, backward and optimizer: 2s, 150ms."""
    latency: Annotated[str | None, arg(metavar="TIME", help_behavior_hint="")] = None
    """From sending a message to its arrival. Without it, 50us from 1 Gbit/s on, and 2ms on slower links."""
    cores: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """CPU cores of a rank, if the model runs on a CPU; without it, the model runs on an accelerator."""
    memory: Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="")] = None
    """Memory of a rank, such as 80GB. A method that does not fit is not recommended."""
    specs: Annotated[tuple[str, ...], arg(metavar="SPEC ...")] = DEFAULT_SPECS
    """Compressors to compare."""
    codec: Annotated[str, arg(metavar="SPEED")] = "auto"
    """Elements that a rank compresses per second, such as 20e9; here: measure it on this machine; auto: as measured on
    an H200, or with --cores on one core, times the cores."""
    model: Annotated[str | None, arg(metavar="MODEL", help_behavior_hint="")] = None
    """Under torchrun: what to measure, a spec of thinwire train's or FILE.py:FUNCTION, which returns a module and a
    function that makes its loss."""
    plot: Annotated[Path | None, arg(metavar="FILE.svg", help_behavior_hint="")] = None
    """Draw the speed-up against bandwidth and world size. Needs pip install 'thinwire[plot]'."""
    check: Annotated[Path | None, arg(metavar="ROWS", help_behavior_hint="")] = None
    """Predict what is in this file of thinwire bench link --out, and print predicted beside measured."""


@dataclass(frozen=True)
class Numbers:
    """Parsed options of a plan by numbers."""

    params: int
    """Parameters of a rank: a share of the model if it is sharded."""
    world: int
    shard: int
    rate: float
    latency: float
    step_seconds: float
    cores: int | None
    memory: int | None


def parse_numbers(options: Options) -> Numbers:
    """Parse the options of a plan by numbers; raise ValueError if one is missing or invalid."""
    missing = [name for name in ("params", "world", "bandwidth", "step_compute") if getattr(options, name) is None]
    if missing:
        raise ValueError(
            f"{', '.join(map(_flag, missing))} not given: expected such as --params 7e9 --world 64 --bandwidth 1Gbps "
            "--step-compute 2s; or measure them: torchrun ... -m thinwire plan --model gpt:layers=4,width=256"
        )
    world, cores = options.world or 0, options.cores
    if not 2 <= world <= LARGEST_WORLD:
        raise ValueError(f"--world {world}, expected 2 to {LARGEST_WORLD:,} ranks: one has nobody to exchange with")
    if cores is not None and not 1 <= cores <= 1 << 16:
        raise ValueError(f"--cores {cores}, expected 1 to {1 << 16:,}; leave it out if an accelerator trains")
    if not 1 <= options.shard <= 1 << 16:
        raise ValueError(f"--shard {options.shard}, expected 1 to {1 << 16:,} ranks of a replica")
    try:
        rate = parse_rate(str(options.bandwidth))
    except ValueError as error:
        raise ValueError(f"--bandwidth: {error}") from None
    if options.latency is not None:
        latency = parse_seconds("--latency", options.latency, zero=True)
    else:
        latency = WIRED_LATENCY if rate >= SLOW_RATE else SLOW_LATENCY
    return Numbers(
        params=-(-parse_count("--params", str(options.params)) // options.shard),
        world=world,
        shard=options.shard,
        rate=rate,
        latency=latency,
        step_seconds=parse_seconds("--step-compute", str(options.step_compute)),
        cores=cores,
        memory=None if options.memory is None else parse_bytes("--memory", options.memory),
    )


def check_plot(path: Path | None) -> None:
    """Raise ValueError unless `path` is None, or a picture in an existing folder that matplotlib can write."""
    if path is None:
        return
    if path.suffix.lower() not in _PLOTS:
        raise ValueError(f"--plot {path}, expected a file that ends in {', '.join(_PLOTS)}")
    check_file("plot", path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot {path} needs matplotlib, which is not installed: pip install 'thinwire[plot]'")


def refuse_others(options: Options, allowed: set[str], why: str) -> None:
    """Raise ValueError if an option that is not in `allowed` is given, because it would have no effect."""
    for field in fields(options):
        given = getattr(options, field.name)
        if field.name not in allowed and given != field.default:
            raise ValueError(f"{_flag(field.name)} {given}: {why}; leave it out")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
