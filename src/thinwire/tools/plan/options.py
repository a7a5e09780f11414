"""The options of `thinwire plan`, and their checks, which need no torch."""

import importlib.util
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from thinwire.tools.units import format_count, parse_bytes, parse_count, parse_rate, parse_seconds

from .cluster import Cluster

DEFAULT_SPECS = ("quantize:bits=8", "quantize:bits=4", "topk:ratio=1/64,bits=2")
LARGEST_WORLD = 1 << 20
WIRED_LATENCY, SLOW_LATENCY, SLOW_RATE = 50e-6, 2e-3, 1e9
"""Seconds of latency that are assumed from `SLOW_RATE` bits per second on (Ethernet), and below (Wi-Fi, long lines)."""
_PLOTS = (".svg", ".png", ".pdf")
FLOPS = {
    "b200": 2250e12, "h200": 989e12, "h100": 989e12, "a100": 312e12, "l40s": 362e12, "l4": 121e12, "a10": 125e12,
    "v100": 125e12, "t4": 65e12, "rtx4090": 165e12, "rtx3090": 71e12,
}  # fmt: skip
"""Peak of each device in operations per second, for dense matrices of 16 bits, as its data sheet says."""
USED_SHARE = 0.4
"""Share of the peak that training is assumed to use: 0.3 to 0.5 is usual for transformers."""
_FLOPS_PER_TOKEN = 6
"""Operations for each parameter and token: two in the forward pass, four in the backward pass."""


PRESETS: dict[str, dict[str, Any]] = {
    "wifi": {"rate": 300e6, "latency": 3e-3, "is_shared": True},
    "wan": {"rate": 100e6, "latency": 30e-3},
    "home": {"rate": 20e6, "latency": 20e-3},
}
"""Links by name: one access point of Wi-Fi 5 or 6 for all ranks (what arrives, not what it says on the box); a leased
line or cloud regions; the uplink of a home. Your own may differ by a factor of three."""


@dataclass(frozen=True)
class Options:
    """Step time, bytes and memory of training with and without compression, and which method to use, if any.

    By numbers: thinwire plan --params 7e9 --world 64 --bandwidth 1Gbps --step-compute 2s

    Estimated: thinwire plan --params 7e9 --world 64 --bandwidth 1Gbps --tokens 8192 --device h100 --gpu-memory 80GB

    Measured here: thinwire plan --model gpt:layers=4,width=256 --world 8 --bandwidth wifi

    Measured on a cluster: torchrun --nnodes 2 ... -m thinwire plan --model gpt:layers=4,width=256
    """

    params: Annotated[str | None, arg(metavar="COUNT", help_behavior_hint="")] = None
    """Parameters of the model: 7e9, 350M, 7B."""
    world: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Ranks, each with a link of its own. With several GPUs per node, count nodes."""
    shard: Annotated[int, arg(metavar="INT")] = 1
    """Ranks of each replica of a model that fully_shard shards: each holds and sends its share over a link of its own,
    and --world counts replicas."""
    bandwidth: Annotated[str | None, arg(metavar="RATE", help_behavior_hint="")] = None
    """Bandwidth of each rank's link, in each direction: 100M, 25gbit, 1Gbps; or a preset with its latency: wifi (half
    duplex, one channel for all ranks), wan, home."""
    latency: Annotated[str | None, arg(metavar="TIME", help_behavior_hint="")] = None
    """From sending a message to its arrival: half of what ping shows. Without it the preset's, or 50us from 1 Gbit/s
    on, 2ms on slower links."""
    step_compute: Annotated[str | None, arg(metavar="TIME", help_behavior_hint="")] = None
    """A step without communication, forward, backward and optimizer: 2s, 150ms. Without it: --tokens and --device, or
    --model."""
    tokens: Annotated[str | None, arg(metavar="COUNT", help_behavior_hint="")] = None
    """Tokens of a rank and step: --step-compute is then estimated, from them and --device."""
    device: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """What trains, if --step-compute is estimated: h100, a100, l4, rtx4090 and so on, or its peak in FLOPS, such as
    300T. 40 % of it are assumed to be used."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """dtype of the gradients, which is that of the parameters."""
    cores: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """CPU cores of a rank, if the model runs on a CPU; without it, the model runs on an accelerator."""
    gpu_memory: Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="")] = None
    """Memory of a rank, such as 80GB. A method that does not fit is marked, and never recommended."""
    specs: Annotated[tuple[str, ...], arg(metavar="SPEC ...")] = DEFAULT_SPECS
    """Compressors to compare."""
    codec: Annotated[str, arg(metavar="SPEED")] = "auto"
    """Elements that a rank compresses per second, such as 20e9; here: measure it on this machine; auto: as measured on
    an H200, or with --cores on one core, times the cores."""
    model: Annotated[str | None, arg(metavar="MODEL", help_behavior_hint="")] = None
    """What to measure in place of --params and --step-compute: a spec of thinwire train's or FILE.py:FUNCTION, which
    returns a module and a function that makes its loss. Here, or by all ranks of torchrun, which measure links too."""
    plot: Annotated[Path | None, arg(metavar="FILE.svg", help_behavior_hint="")] = None
    """Draw the speed-up against bandwidth and world size. Needs pip install 'thinwire[plot]'."""


def parse_cluster(options: Options) -> Cluster:
    """Parse the options of ranks and links; raise ValueError if one is missing or invalid."""
    world, text = options.world or 0, str(options.bandwidth)
    if not 2 <= world <= LARGEST_WORLD:
        raise ValueError(f"--world {world}, expected 2 to {LARGEST_WORLD:,} ranks: one has nobody to exchange with")
    link = PRESETS.get(text.strip().lower().replace("-", ""))
    if link is None:
        try:
            rate = parse_rate(text)
        except ValueError as error:
            raise ValueError(f"--bandwidth: {error}; or one of {', '.join(PRESETS)}") from None
        link = {"rate": rate, "latency": WIRED_LATENCY if rate >= SLOW_RATE else SLOW_LATENCY}
    if options.latency is not None:
        link = {**link, "latency": parse_seconds("--latency", options.latency, zero=True)}
    memory = None if options.gpu_memory is None else parse_bytes("--gpu-memory", options.gpu_memory)
    return Cluster(world, memory=memory, **link)


def parse_numbers(options: Options) -> tuple[Cluster, int, float, str]:
    """Parse the options of a plan by numbers; raise ValueError if one is missing or invalid.

    Return the cluster, the parameters of a rank, which are a share of the model if it is sharded, the seconds of a step
    without communication, and where they come from, as text for the user.
    """
    missing = missing_options(options, ("params", "world", "bandwidth"))
    if options.step_compute is None and (options.tokens is None or options.device is None):
        missing.append("--step-compute (or --tokens and --device)")
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not given: expected such as --params 7e9 --world 64 --bandwidth 1Gbps "
            "--step-compute 2s; or measure them: torchrun ... -m thinwire plan --model gpt:layers=4,width=256"
        )
    cluster, cores = parse_cluster(options), options.cores
    if cores is not None and not 1 <= cores <= 1 << 16:
        raise ValueError(f"--cores {cores}, expected 1 to {1 << 16:,}; leave it out if an accelerator trains")
    if not 1 <= options.shard <= 1 << 16:
        raise ValueError(f"--shard {options.shard}, expected 1 to {1 << 16:,} ranks of a replica")
    params = parse_count("--params", str(options.params))
    cluster = replace(cluster, codec_slows=0.0, nccl=True) if cores is None else replace(cluster, wire_slows=1 / cores)
    return cluster, -(-params // options.shard), *_parse_step(options, params)


def missing_options(options: Options, names: tuple[str, ...]) -> list[str]:
    """Return those of the options that are not given, as they are written on the command line."""
    return [_flag(name) for name in names if getattr(options, name) is None]


def _parse_step(options: Options, params: int) -> tuple[float, str]:
    """Return the seconds of a step without communication, and where they come from."""
    if options.step_compute is not None:
        for name in ("tokens", "device"):
            if getattr(options, name) is not None:
                raise ValueError(f"{_flag(name)} {getattr(options, name)}: --step-compute is given; leave one out")
        return parse_seconds("--step-compute", options.step_compute), "as given"
    tokens, device = parse_count("--tokens", str(options.tokens), 1e9), str(options.device).strip().lower()
    peak = FLOPS.get(device.replace(" ", "").replace("-", ""))
    if peak is None:
        try:
            peak = parse_count("--device", device.removesuffix("flops").strip(), 1e18)
        except ValueError:
            raise ValueError(
                f"--device {options.device!r}, expected one of {', '.join(FLOPS)}, or operations per second, such as "
                "300T"
            ) from None
    seconds = _FLOPS_PER_TOKEN * params * tokens / (USED_SHARE * peak)
    return seconds, (
        f"estimated: {_FLOPS_PER_TOKEN} x {format_count(params)} parameters x {tokens:,} tokens at {USED_SHARE:.0%} of "
        f"{format_count(peak / 1e12)} TFLOPS"
    )


def check_plot(path: Path | None) -> None:
    """Raise ValueError unless `path` is None, or a picture in an existing folder that matplotlib can write."""
    if path is None:
        return
    if path.suffix.lower() not in _PLOTS:
        raise ValueError(f"--plot {path}, expected a file that ends in {', '.join(_PLOTS)}")
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"--plot {path}, expected a file in an existing folder")
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
