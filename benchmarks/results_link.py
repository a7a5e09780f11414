"""Tables of what `python -m benchmarks link` measured: step time by method and bandwidth, and bytes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.tools.units import LinkSpeed, parse_link

from .harness import Line, short
from .methods import NO_COMMUNICATION

CONDITIONS = (
    "model", "parameters", "batch", "cpu", "cores", "worker_threads", "torch", "date", "load_average", "links",
    "command",
)  # fmt: skip
ROW = ("world", "method", "rate", "ms", "bytes_per_step")
_MODELS = {"gpt": "the linear layers of a GPT", "cnn": "a convolutional network"}
LINKS = {
    "namespaces": "ranks in network namespaces, both ends of each link shaped by `tc tbf`; bytes are those of the "
    "interface, headers included",
    "relay": "ranks on the loopback interface behind a token-bucket relay; bytes are those that it carried, without "
    "the headers of TCP",
}
_NEXT_TO_NOTHING = 1000.0


class World(NamedTuple):
    """Rows of one run of the benchmark at one world size."""

    file: Path
    conditions: dict[str, Any]
    ranks: int
    points: dict[tuple[str, str], tuple[float, float]]
    """Milliseconds of a step and bytes that a rank sends in it, by method and rate."""

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for method, _ in self.points))

    @property
    def speeds(self) -> dict[str, LinkSpeed]:
        """Return what rates stand for, from slow to fast; at one rate, the shortest round-trip time comes first."""
        found = {rate: parse_link(rate) for _, rate in self.points}
        return dict(sorted(found.items(), key=lambda item: item[1]))


def group(rows: Mapping[Path, Iterable[Line]]) -> list[list[World]]:
    """Return the rows of each run in the files, by world size."""
    runs: list[list[World]] = []
    for file, lines in rows.items():
        for _, run in groupby(lines, key=lambda line: id(line["conditions"])):  # a run's lines have the same object
            worlds: dict[int, World] = {}
            for line in run:
                world = worlds.setdefault(line["world"], World(file, line["conditions"], line["world"], {}))
                world.points[line["method"], line["rate"]] = float(line["ms"]), float(line["bytes_per_step"])
            runs.append([worlds[ranks] for ranks in sorted(worlds)])
    return runs


def section(runs: Sequence[Sequence[World]], link: Callable[[Path], str]) -> list[str]:
    """Return the tables and their captions as paragraphs of Markdown. `link` returns the link to a file."""
    parts: list[str] = []
    for worlds in runs:
        given, file = worlds[0].conditions, link(worlds[0].file)
        size = f"{given['parameters'] / 1e6:.3g} M parameters"
        delayed = ""
        if any(speed.round_trip for world in worlds for speed in world.speeds.values()):
            delayed = "; what is sent is delivered half the round-trip time later, which stands behind the comma"
        parts += [
            f"A training step of {_MODELS[given['model']]} with {size}, {given['batch']} samples for each rank: "
            "milliseconds by the bandwidth of each rank's link, in brackets the speed-up over dense; then the MB that "
            "a rank sends in a step, and the reduction against dense.",
            *(f"**{world.ranks} ranks**\n\n{table(world)}" for world in worlds),
            f"{given['cpu']}, {given['cores']} cores, {given['worker_threads']} thread for each rank, torch "
            f"{given['torch']}, gloo, {given['date'][:10]}, load {given['load_average']:.1f} at the start; "
            f"{LINKS[given['links']]}{delayed}. Rows: [{file}]({file}), made by `{given['command']}`.",
        ]
    return parts


def table(world: World) -> str:
    """Return a table of milliseconds by method and rate, with the speed-up over dense in brackets, and of bytes."""
    rates = list(world.speeds)
    lines = [["", *rates, "MB/step", "reduction"], ["---"] * (len(rates) + 3)]
    for method in world.methods:
        cells = [_time(world, method, rate) for rate in rates]
        shown = f"**{method}**" if method.startswith("thinwire.") else method
        lines.append([shown, *cells, *_bytes(world, method)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _time(world: World, method: str, rate: str) -> str:
    point, dense = world.points.get((method, rate)), world.points.get(("dense", rate))
    if point is None:
        return ""
    compared = dense is not None and method not in ("dense", NO_COMMUNICATION)
    return short(point[0], 2) + (f" ({short(dense[0] / point[0], 2)}x)" if compared and dense else "")


def _bytes(world: World, method: str) -> tuple[str, str]:
    """Return the MB that a rank sends in a step and the reduction, both at the slowest rate.

    Over faster links the kernel makes larger packets with fewer headers.
    """
    sent, dense = (
        next((world.points[name, rate][1] for rate in world.speeds if (name, rate) in world.points), 0.0)
        for name in (method, "dense")
    )
    reduction = f"{short(dense / sent, 2)}x" if dense and sent > _NEXT_TO_NOTHING and method != "dense" else ""
    return f"{sent / 1e6:,.3f}", reduction
