"""The options of `thinwire plan`, and their checks, which need no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from thinwire.tools.units import parse_bytes, parse_count, parse_rate, parse_seconds

DEFAULT_SPECS = ("quantize:bits=8", "quantize:bits=4", "topk:ratio=1/64,bits=2")
LARGEST_WORLD = 1 << 20
WIRED_LATENCY, SLOW_LATENCY, SLOW_RATE = 50e-6, 2e-3, 1e9
"""Seconds of latency that are assumed from `SLOW_RATE` bits per second on (Ethernet), and below (Wi-Fi, long lines)."""
_MEASURED = ("world", "bandwidth", "latency", "cores")
_ESTIMATE = "give --step-compute; a transformer takes about 6 x parameters x tokens / (0.4 x peak FLOPS) seconds"
_GONE = {
    "--model": "give --params and --step-compute; under torchrun, links and codec are measured",
    "--codec": "under torchrun it is measured",
    "--tokens": _ESTIMATE,
    "--device": _ESTIMATE,
    "--plot": "vary --bandwidth or --world",
    "--check": "python -m benchmarks link measures steps on slow links",
}
"""Options of earlier versions, and what to use instead."""


@dataclass(frozen=True)
class Options:
    """Step time, bytes and memory of training with and without compression, and which method to use, if any.

    By numbers: thinwire plan --params 7e9 --world 64 --bandwidth 1Gbps --step-compute 2s

    Links and codec measured: torchrun --nnodes 2 ... -m thinwire plan --params 350M --step-compute 400ms
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
    latency: Annotated[str | None, arg(metavar="TIME", help_behavior_hint="")] = None
    """From sending a message to its arrival: half of what ping shows. Without it 50us from 1 Gbit/s on, 2ms on
    slower links."""
    step_compute: Annotated[str | None, arg(metavar="TIME", help_behavior_hint="")] = None
    """A step without communication, forward, backward and optimizer: 2s, 150ms."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """dtype of the gradients, which is that of the parameters."""
    cores: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """CPU cores of a rank, if the model runs on a CPU; without it, the model runs on an accelerator."""
    gpu_memory: Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="")] = None
    """Memory of a rank, such as 80GB. A method that does not fit is marked, and never recommended."""
    specs: Annotated[tuple[str, ...], arg(metavar="SPEC ...")] = DEFAULT_SPECS
    """Compressors to compare: quantize and topk, with their options."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> "Options":
        """Return the defaults; raise ValueError for an option of earlier versions, with what to use instead."""
        for word in arguments:
            if (name := word.partition("=")[0]) in _GONE:
                raise ValueError(f"{name} is no longer an option: {_GONE[name]}")
        return cls()


@dataclass(frozen=True)
class Cluster:
    """Identical ranks, each with one link to a switch that carries the traffic of all links."""

    world: int
    rate: float  # Bits per second of a link, in each direction
    latency: float  # Seconds from sending a message to its arrival
    share: float = 0.89  # Share of a link's rate that carries payload if each rank sends to one peer. Headers take 6 %
    cores: int | None = None
    """CPU cores of a rank, which the model shares with the codec and the handling of bytes. None if the model is on an
    accelerator: the CPU is then free for both, and NCCL reduces dense gradients, with trees where they are faster."""


def parse_cluster(options: Options) -> Cluster:
    """Parse the options of ranks and links; raise ValueError if one is invalid."""
    world, cores = options.world or 0, options.cores
    if not 2 <= world <= LARGEST_WORLD:
        raise ValueError(f"--world {world}, expected 2 to {LARGEST_WORLD:,} ranks: one has nobody to exchange with")
    try:
        rate = parse_rate(str(options.bandwidth))
    except ValueError as error:
        raise ValueError(f"--bandwidth: {error}") from None
    latency = WIRED_LATENCY if rate >= SLOW_RATE else SLOW_LATENCY
    if options.latency is not None:
        latency = parse_seconds("--latency", options.latency, zero=True)
    if cores is not None and not 1 <= cores <= 1 << 16:
        raise ValueError(f"--cores {cores}, expected 1 to {1 << 16:,}; leave it out if an accelerator trains")
    return Cluster(world, rate, latency, cores=cores)


def parse_model(options: Options, *, is_measured: bool = False) -> tuple[int, float, int | None]:
    """Parse the options of the model; raise ValueError if one is invalid, or if any necessary one is missing.

    is_measured   whether ranks and links are measured, so that they must not be given.

    Return the parameters of a rank, which are a share of the model if it is sharded, the seconds of a step without
    communication, and the bytes of memory of a rank, if they are given.
    """
    needed = ("params", "step_compute") if is_measured else ("params", "world", "bandwidth", "step_compute")
    missing = [_flag(name) for name in needed if getattr(options, name) is None]
    if missing:
        links = "" if is_measured else "--world 64 --bandwidth 1Gbps "
        raise ValueError(f"{', '.join(missing)} not given: expected such as --params 7e9 {links}--step-compute 2s")
    for name in _MEASURED if is_measured else ():
        if (given := getattr(options, name)) is not None:
            raise ValueError(f"{_flag(name)} {given}: under torchrun it is measured; leave it out")
    if not 1 <= options.shard <= 1 << 16:
        raise ValueError(f"--shard {options.shard}, expected 1 to {1 << 16:,} ranks of a replica")
    params, compute = str(options.params), str(options.step_compute)
    memory = None if options.gpu_memory is None else parse_bytes("--gpu-memory", options.gpu_memory)
    return -(-parse_count("--params", params) // options.shard), parse_seconds("--step-compute", compute), memory


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
