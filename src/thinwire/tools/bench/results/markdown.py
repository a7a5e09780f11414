"""Writes Markdown tables of step times and bytes, with the conditions and the commands."""

from collections.abc import Callable, Sequence
from pathlib import Path

from .sources import Set, World

_MODELS = {"gpt": "the linear layers of a GPT", "cnn": "a convolutional network"}
_LINKS = {
    "namespaces": "ranks in network namespaces, both ends of each link shaped by `tc tbf`; bytes are those of the "
    "interface, headers included",
    "relay": "ranks on the loopback interface behind a token-bucket relay; bytes are those that it carried, without "
    "the headers of TCP",
}
_NEXT_TO_NOTHING = 1000.0


def section(sets: Sequence[Set], command: str, plot: str, seen: Callable[[Path], str]) -> str:
    """Return the plot, the tables and their captions as Markdown.

    `plot` is the link to the plot, or empty. `seen` returns the link to a file.
    """
    parts = []
    if plot:
        parts.append(f"![Milliseconds of a step against the bandwidth of the link, for every way]({plot})")
    for one in sets:
        parts.append(_title(one))
        parts += [f"**{world.ranks} ranks**\n\n{table(world)}" for world in one.worlds]
        parts.append(_made(one, seen(one.file)))
    parts.append(f"Tables and plot are written by `{command}`.")
    return "\n\n".join(parts)


def table(world: World) -> str:
    """Return a table of milliseconds by way and rate, with the speed-up over dense in brackets, and of bytes."""
    rates = world.rates
    lines = [["", *rates, "MB a step", "x fewer"], ["---"] * (len(rates) + 3)]
    for way in world.ways:
        cells = [_time(world, way, rate) for rate in rates]
        lines.append([f"**{way}**" if way.startswith("thinwire.") else way, *cells, *_bytes(world, way)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _time(world: World, way: str, rate: str) -> str:
    point, dense = world.points.get((way, rate)), world.points.get(("dense", rate))
    if point is None:
        return ""
    faster = "" if dense is None or way in ("dense", "no communication") else f" ({short(dense.ms / point.ms)}x)"
    return short(point.ms) + faster


def _bytes(world: World, way: str) -> tuple[str, str]:
    """Return the MB that a rank sends in a step and the reduction, both at the slowest rate.

    Over faster links the kernel makes larger packets with fewer headers.
    """
    sent, dense = (
        next((world.points[name, rate].nbytes for rate in world.rates if (name, rate) in world.points), 0.0)
        for name in (way, "dense")
    )
    fewer = short(dense / sent) if dense and sent > _NEXT_TO_NOTHING and way != "dense" else ""
    return f"{sent / 1e6:,.3f}", fewer


def short(value: float) -> str:
    """Format a number with at least two significant digits.

    >>> short(2507.4), short(78.26), short(7.312), short(0.8712)
    ('2,507', '78', '7.3', '0.87')
    """
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _title(one: Set) -> str:
    given = one.conditions
    size = f"{given['parameters'] / 1e6:.3g} M parameters"
    return (
        f"A training step of {_MODELS[given['model']]} with {size}, {given['batch']} samples a rank: "
        "milliseconds by the bandwidth of each rank's link, and in brackets how many times faster than dense; the last "
        "columns are what a rank sends."
    )


def _made(one: Set, file: str) -> str:
    given = one.conditions
    return (
        f"{given['cpu']}, {given['cores']} cores, {given['worker_threads']} thread a rank, torch {given['torch']}, "
        f"gloo, {given['date'][:10]}, load {given['load_average']:.1f} when it began; {_LINKS[given['links']]}. "
        f"Rows: [{file}]({file}), made by `{given['command']}`."
    )
