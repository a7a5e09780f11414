"""Plots step time over bandwidth as a self-contained SVG, with a panel for each world size and a line for each way.

Both axes are logarithmic. Lines differ in colour, mark and dashes.
"""

import math
from collections.abc import Sequence
from html import escape

from ..link.settings import parse_rate
from .sources import Set, World
from .svg import BOTTOM, COLOURS, LEFT, RIGHT, TOP, Scale, axes, mark, page

_PANEL, _HEIGHT, _GAP = 380, 330, 20
_LEGEND_LINE, _LEGEND_COLUMN = 22, 380
_DASHES = ("", "7 3", "2 3")


def plot(sets: Sequence[Set]) -> str:
    """Return the SVG with all panels and the legend."""
    worlds = [(one, world) for one in sets for world in one.worlds]
    # thinwire's ways first, so that they get the first colours, without dashes.
    ways = sorted(dict.fromkeys(way for _, world in worlds for way in world.ways), key=lambda way: not _is_ours(way))
    columns = min(2, len(worlds))
    rows = math.ceil(len(worlds) / columns)
    width = columns * (_PANEL + _GAP) - _GAP
    per_line = max(1, width // _LEGEND_COLUMN)
    legend = _GAP + rows * (_HEIGHT + _GAP)
    height = legend + _LEGEND_LINE * math.ceil(len(ways) / per_line) + 8
    parts = []
    for number, (one, world) in enumerate(worlds):
        x, y = number % columns * (_PANEL + _GAP), _GAP // 2 + number // columns * (_HEIGHT + _GAP)
        parts.append(f'<g class="panel" transform="translate({x} {y})">{_panel(one, world, ways)}</g>')
    for number, way in enumerate(ways):
        x, y = 16 + number % per_line * _LEGEND_COLUMN, legend + number // per_line * _LEGEND_LINE
        sample = f'<path class="line" d="M0 0h34"{_dash(number)}/>{mark(number, 17, 0)}'
        label = f'<text x="44" y="4">{escape(way)}</text>'
        parts.append(f'<g class="{_class(way, number)}" transform="translate({x} {y + 8})">{sample}{label}</g>')
    return page("Milliseconds of a training step against the bandwidth of each rank's link", width, height, parts)


def _panel(one: Set, world: World, ways: Sequence[str]) -> str:
    times = [point.ms for point in world.points.values()]
    rates = [parse_rate(rate) for rate in world.rates]
    x = Scale(rates[0], rates[-1], LEFT + 14, _PANEL - RIGHT - 14)
    y = Scale(min(times) / 1.2, max(times) * 1.2, _HEIGHT - BOTTOM, TOP)
    drawn = axes(
        (_PANEL, _HEIGHT),
        f"{world.ranks} ranks, {one.conditions['model']}, {one.conditions['parameters'] / 1e6:.3g} M parameters",
        x=[(x.at(rate), name) for name, rate in zip(world.rates, rates, strict=True)],
        y=[(y.at(tick), f"{tick:,g}") for tick in y.ticks()],
        x_name="bandwidth of each link",
        y_name="ms",
    )
    parts = [drawn]
    for way in world.ways:
        number = ways.index(way)
        here = [(rate, world.points[way, rate]) for rate in world.rates if (way, rate) in world.points]
        places = [(x.at(parse_rate(rate)), y.at(point.ms)) for rate, point in here]
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
        marks = "".join(
            mark(number, px, py, f"{way}, {rate}: {point.ms:,.1f} ms")
            for (px, py), (rate, point) in zip(places, here, strict=True)
        )
        parts.append(f'<g class="{_class(way, number)}"><path class="line" d="{path}"{_dash(number)}/>{marks}</g>')
    return "".join(parts)


def _is_ours(way: str) -> bool:
    return way.startswith(("thinwire.", "attach "))


def _class(way: str, number: int) -> str:
    ours = " ours" if _is_ours(way) else ""
    return f"way bound{ours}" if way == "no communication" else f"way run-{number % COLOURS}{ours}"


def _dash(number: int) -> str:
    dash = _DASHES[number // COLOURS % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""
