"""Tables and a plot of what `thinwire bench link` measured: step time by method and bandwidth, and bytes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.tools.record import Line
from thinwire.tools.units import LinkSpeed, format_seconds, parse_link

from ..harness import pyplot, save_svg, short
from ..methods import NO_COMMUNICATION, parse

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
        """Return all methods, in the order of the rows."""
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


def section(runs: Sequence[Sequence[World]], plot: str, link: Callable[[Path], str]) -> list[str]:
    """Return the plot, the tables and their captions as paragraphs of Markdown.

    `plot` is the link to the plot, or empty. `link` returns the link to a file.
    """
    parts = [f"![Milliseconds of a step against the bandwidth of the link, for every method]({plot})"] if plot else []
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


def draw(runs: Sequence[Sequence[World]], path: Path) -> None:
    """Draw step time over bandwidth as an SVG, with a line for each method.

    There is a panel for each world size and round-trip time.
    """
    plt = pyplot()
    worlds = [
        (world, round_trip, {rate: one.rate for rate, one in world.speeds.items() if one.round_trip == round_trip})
        for run in runs
        for world in run
        for round_trip in sorted({speed.round_trip for speed in world.speeds.values()})
    ]
    # thinwire's methods first, so that they get the first colours.
    methods = sorted(dict.fromkeys(m for world, _, _ in worlds for m in world.methods), key=lambda m: not _is_ours(m))
    columns = min(2, len(worlds))
    rows = -(-len(worlds) // columns)
    figure, panels = plt.subplots(
        rows, columns, squeeze=False, figsize=(4.2 * columns, 3.4 * rows), layout="constrained"
    )
    for axes, (world, round_trip, rates) in zip(panels.flat, worlds, strict=False):
        for number, method in enumerate(methods):
            points = [(bits, world.points[method, r][0]) for r, bits in rates.items() if (method, r) in world.points]
            if points:
                axes.plot(*zip(*points, strict=True), label=method, **_style(method, number))
        axes.set_xscale("log")
        axes.set_yscale("log", subs=())
        axes.set_xticks(list(rates.values()), [rate.partition(",")[0] for rate in rates])
        axes.minorticks_off()
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.set_title(
            f"{world.ranks} ranks, {world.conditions['model']}, {world.conditions['parameters'] / 1e6:.3g} M parameters"
            + (f", round trip {format_seconds(round_trip)}" if round_trip else ""),
            fontsize=10,
        )
        axes.set_xlabel("bandwidth of each link")
        axes.set_ylabel("ms of a step")
    for axes in list(panels.flat)[len(worlds) :]:
        axes.set_axis_off()
    handles = {label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels())}  # noqa: B905
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=2)
    save_svg(figure, path)


def _is_ours(method: str) -> bool:
    try:
        return parse(method).is_ours
    except ValueError:  # of another version
        return False


def _style(method: str, number: int) -> dict[str, Any]:
    colour = "#888" if method == NO_COMMUNICATION else f"C{number % 10}"
    style = {"color": colour, "marker": "osD^v"[number % 5], "markersize": 4}
    if _is_ours(method):
        return {**style, "linewidth": 2}
    return {**style, "linewidth": 1, "linestyle": "--", "markerfacecolor": "white"}
