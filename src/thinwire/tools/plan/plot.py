"""Draw the speed-up against bandwidth and against world size, as one self-contained SVG file."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from typing import NamedTuple

from thinwire.compressors import Compressor

from .model import Case
from .units import show_rate, show_seconds
from .ways import BF16, DENSE, FP16, HALVES, Way, ways

_WIDTH, _HEIGHT, _ROW = 980, 440, 18
_LEFT, _TOP, _PANEL, _TALL, _GAP = 60, 84, 400, 290, 60
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#999999")
"""Colours based on the palette of Okabe and Ito, which colour-blind readers can distinguish."""
_RATES = [10 ** (7 + step / 8) for step in range(33)]
_WORLDS = [2**power for power in range(1, 13)]
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-size: 15px; font-weight: 600 }
  .grid { stroke: #ddd } .one { stroke: #888; stroke-dasharray: 4 3 } .here { stroke: #888; stroke-width: 1 }
  .background { fill: #fff } .line { fill: none; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd } .grid { stroke: #444 } .background { fill: #1b1b1b } .one, .here { stroke: #999 }
  }
"""


class Panel(NamedTuple):
    """One of the two diagrams."""

    title: str
    places: Sequence[float]
    """Values on the horizontal axis, which is logarithmic."""
    here: float
    """Value of the case on the horizontal axis."""
    case: Callable[[float], Case]
    show: Callable[[float], str]
    ticks: Sequence[float]


class Curve(NamedTuple):
    """Speed-up over dense at each place of a panel, for one compressor."""

    label: str
    speedups: list[float]


def draw(case: Case, made: dict[str, Compressor]) -> str:
    """Return the content of the SVG file."""
    panels = [_by_bandwidth(case), _by_world(case)]
    curves = [_curves(panel, made) for panel in panels]
    values = [value for panel in curves for curve in panel for value in curve.speedups]
    low, high = min(0.8, min(values)), max(2.0, max(values))
    cluster = case.cluster
    caption = (
        f"{case.work.entries:,} parameters, {cluster.world:,} ranks, {show_rate(cluster.rate)}, a step without "
        f"communication {show_seconds(case.work.seconds)}; the quickest algorithm of each"
    )
    legend, taller = _legend(curves[0])
    height = _HEIGHT + taller
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        "<title>Speed-up of a step over a dense all-reduce, predicted</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="background" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="24">Speed-up of a step over a dense all-reduce, predicted</text>',
        f'<text x="{_LEFT}" y="43">{escape(caption)}</text>',
        *legend,
    ]
    for index, (panel, lines) in enumerate(zip(panels, curves, strict=True)):
        parts += _panel(panel, lines, _LEFT + index * (_PANEL + _GAP), _TOP + taller, low, high)
    return "\n".join([*parts, "</svg>", ""])


def _by_bandwidth(case: Case) -> Panel:
    def at(rate: float) -> Case:
        return replace(case, cluster=case.cluster.at(rate=rate))

    ticks = [1e7, 1e8, 1e9, 1e10, 1e11]
    return Panel("bandwidth of a host's link", _RATES, case.cluster.rate, at, show_rate, ticks)


def _by_world(case: Case) -> Panel:
    each = case.cluster.ranks_per_host
    worlds = [each * world for world in _WORLDS if each * world <= max(_WORLDS[-1], 4 * each)]

    def at(world: float) -> Case:
        return replace(case, cluster=case.cluster.at(world=int(world)))

    ticks = worlds[::2]
    return Panel("ranks", worlds, case.cluster.world, at, lambda world: f"{int(world):,}", ticks)


def _curves(panel: Panel, made: dict[str, Compressor]) -> list[Curve]:
    found: dict[str, list[float]] = {}
    for place in panel.places:
        case = panel.case(place)
        dense = case.seconds(Way(DENSE, "ring"))
        best: dict[str, float] = {}
        for way in ways(made, case.cluster)[1:]:
            best[way.spec] = min(best.get(way.spec, math.inf), case.seconds(way))
        for spec, seconds in best.items():
            found.setdefault(spec, []).append(dense / seconds)
    if found.get(BF16) == found[FP16]:
        found = {"fp16 or bf16 hook": found.pop(FP16), **{spec: found[spec] for spec in found if spec not in HALVES}}
    return [Curve(spec, speedups) for spec, speedups in found.items()]


def _legend(curves: Sequence[Curve]) -> tuple[list[str], int]:
    """Return the elements of the legend, and its height beyond one row."""
    parts, x, y = [], _LEFT, 61
    for index, curve in enumerate(curves):
        colour, wide = _COLOURS[index % len(_COLOURS)], 48 + 7 * len(curve.label)
        if x > _LEFT and x + wide > _WIDTH:
            x, y = _LEFT, y + _ROW
        parts.append(f'<line x1="{x}" x2="{x + 18}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 24}" y="{y + 4}">{escape(curve.label)}</text>')
        x += wide
    return parts, y - 61


def _panel(panel: Panel, curves: Sequence[Curve], left: float, top: float, low: float, high: float) -> list[str]:
    first, last = math.log(panel.places[0]), math.log(panel.places[-1])
    bottom = top + _TALL

    def across(place: float) -> float:
        return left + _PANEL * (math.log(place) - first) / (last - first)

    def up(value: float) -> float:
        return bottom - _TALL * (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))

    parts = []
    for value in _ticks(low, high):
        kind = "one" if value == 1 else "grid"
        parts.append(
            f'<line class="{kind}" x1="{left}" x2="{left + _PANEL}" y1="{up(value):.1f}" y2="{up(value):.1f}"/>'
        )
        parts.append(f'<text x="{left - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{value:g}x</text>')
    for tick in panel.ticks:
        parts.append(f'<line class="grid" x1="{across(tick):.1f}" x2="{across(tick):.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text x="{across(tick):.1f}" y="{bottom + 17}" text-anchor="middle">{panel.show(tick)}</text>')
    if panel.places[0] <= panel.here <= panel.places[-1]:
        x = across(panel.here)
        parts.append(f'<line class="here" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text x="{x + 4:.1f}" y="{bottom - 6}">here</text>')
    for index, curve in enumerate(curves):
        points = " ".join(f"{across(p):.1f},{up(v):.1f}" for p, v in zip(panel.places, curve.speedups, strict=True))
        colour = _COLOURS[index % len(_COLOURS)]
        name = f"<title>{escape(curve.label)}</title>"
        parts.append(f'<polyline class="line" stroke="{colour}" points="{points}">{name}</polyline>')
    middle = left + _PANEL / 2
    return [*parts, f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">{escape(panel.title)}</text>']


def _ticks(low: float, high: float) -> list[float]:
    """Return the values 1, 2, 5, 10, ... from `low` to `high`, or only the powers of 10 if there are more than 9.

    >>> _ticks(0.6, 12.0)
    [1.0, 2.0, 5.0, 10.0]
    """
    found = [digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5)]
    inside = [value for value in found if low <= value <= high]
    return inside if len(inside) <= 9 else [value for value in inside if f"{value:e}"[0] == "1"]
