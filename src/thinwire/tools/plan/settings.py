"""Check the options before torch is loaded, and raise ValueError for invalid ones."""

from dataclasses import dataclass, fields
from pathlib import Path

from thinwire.tools.bench.link.settings import parse_rate

from .host import Host, parse_host
from .options import Options
from .units import parse_count, parse_seconds

LARGEST_WORLD = 1 << 20
PLOT_SUFFIX = ".svg"


@dataclass(frozen=True)
class Numbers:
    """Parsed options of a plan by numbers."""

    params: int
    world: int
    rate: float
    latency: float
    step_seconds: float
    host: Host


def numbers(options: Options) -> Numbers:
    """Parse the options of a plan by numbers; raise ValueError if one is missing or invalid."""
    missing = [name for name in ("params", "world", "bandwidth", "step_compute") if getattr(options, name) is None]
    if missing:
        raise ValueError(
            f"{', '.join(map(flag, missing))} not given: expected such as --params 7e9 --world 64 --bandwidth 1gbit "
            "--step-compute 2s; or measure them: torchrun ... -m thinwire plan --model gpt:layers=4,width=256"
        )
    host = parse_host(options.host)
    return Numbers(
        parse_count("--params", str(options.params)),
        check_world(options.world or 0, host),
        parse_bandwidth(str(options.bandwidth)),
        parse_seconds("--latency", options.latency, zero=True),
        parse_seconds("--step-compute", str(options.step_compute)),
        host,
    )


def check_world(world: int, host: Host) -> int:
    """Return the world size; raise ValueError if it is out of range or not a multiple of the ranks per node."""
    if not 2 <= world <= LARGEST_WORLD:
        raise ValueError(f"--world {world}, expected 2 to {LARGEST_WORLD:,} ranks: one has nobody to exchange with")
    if world % host.ranks:
        raise ValueError(f"--world {world} with ranks={host.ranks} in --host, expected a multiple of it")
    return world


def parse_bandwidth(text: str) -> float:
    """Parse the value of `--bandwidth`, in bits per second."""
    try:
        return parse_rate(text)
    except ValueError as error:
        raise ValueError(f"--bandwidth: {error}") from None


def check_plot(path: Path | None) -> None:
    """Raise ValueError unless `path` is None or an SVG file in an existing folder."""
    if path is None:
        return
    if path.suffix.lower() != PLOT_SUFFIX:
        raise ValueError(f"--plot {path}, expected a file that ends in {PLOT_SUFFIX}, which any browser opens")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--plot {path}, expected a file in a folder that is there: create {path.parent}")


def refuse_others(options: Options, allowed: set[str], why: str) -> None:
    """Raise ValueError if an option that is not in `allowed` is given, because it would have no effect."""
    for field in fields(options):
        given = getattr(options, field.name)
        if field.name not in allowed and given != field.default:
            raise ValueError(f"{flag(field.name)} {given}: {why}; leave it out")


def flag(name: str) -> str:
    """Return the command-line flag of an option."""
    return "--" + name.replace("_", "-")
