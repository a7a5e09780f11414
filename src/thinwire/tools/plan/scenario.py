"""Build a case from the numbers that the user gives: choose the table of costs, and how ranks share the CPU."""

from dataclasses import replace
from types import MappingProxyType

import torch

from thinwire.compressors import Compressor, compressor, format_spec
from thinwire.tools.record import cores

from .cluster import Cluster
from .costs import KINDS, Speeds, accelerator, per_core
from .host import Host
from .model import Case
from .options import Options
from .settings import Numbers
from .units import parse_count, show_count
from .work import Work


def compressors(specs: tuple[str, ...]) -> dict[str, Compressor]:
    """Return the compressor of each spec; raise ValueError for an invalid spec, and for "none"."""
    made = {spec: compressor(spec) for spec in specs}
    for spec, given in made.items():
        if format_spec(given) == "none":
            raise ValueError(f"--specs {spec}, which is compared anyway, as dense; expected {', '.join(KINDS)}")
    return made


def case_of(given: Numbers, options: Options) -> Case:
    """Build the case from the numbers."""
    made, host = compressors(options.specs), given.host
    speeds = _speeds(options.codec, made, host)
    return Case(Work.of_numbers(given.params, given.step_seconds), _cluster(given), speeds)


def _cluster(given: Numbers) -> Cluster:
    host = given.host
    cluster = Cluster(given.world, given.rate, given.latency, host.ranks, host.inside)
    if host.cores is None:
        return replace(cluster, codec_slows=0.0, wire_slows=0.0, trees=True)
    return replace(cluster, codec_slows=1.0, wire_slows=1 / max(1, host.cores // host.ranks))


def _speeds(codec: str, made: dict[str, Compressor], host: Host) -> Speeds:
    if codec == "here":
        return _measured_here(made, host)
    if codec == "auto":
        return accelerator(made) if host.cores is None else _on_cores(per_core(made), host)
    base = per_core(made) if host.cores else per_core(made).by_accelerator()
    wanted = parse_count("--codec", codec, 1e15)
    first = next(iter(base.codecs.values()), None)
    factor = wanted * (first.encode + first.commit) if first else 1.0
    return base.faster(factor, f"{show_count(wanted)} elements of {next(iter(made), '')} a second, as given")


def _on_cores(base: Speeds, host: Host) -> Speeds:
    assert host.cores is not None
    return base.faster(host.cores / host.ranks, f"{base.origin}, times {host.cores / host.ranks:g}")


def _measured_here(made: dict[str, Compressor], host: Host) -> Speeds:
    from .measure import Bench, measure_codecs, threads

    base = per_core(made).by_accelerator() if host.cores is None else per_core(made)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if host.cores is None and device.type == "cpu":
        raise ValueError(
            "--codec here measures this machine's CPU, but the host has no cores: give --host ...,cores=16, or "
            "entries a second, such as --codec 20e9"
        )
    count = cores() if host.cores is None else max(1, min(cores(), host.cores // host.ranks))
    with threads(count):
        codecs, halves = measure_codecs(made, Bench(device))
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{count} thread(s)"
    return replace(base, origin=f"measured here, {name}", codecs=MappingProxyType(codecs), halves=halves)
