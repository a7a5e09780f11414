"""Step time against bandwidth as an SVG that stands alone: a panel for each world, a line for each way.

Both axes are logarithmic. Colours are those of the report, light or dark as the reader's screen is; lines differ in
their marks and dashes too.
"""

import math
from collections.abc import Sequence
from html import escape
from importlib import resources
from re import search

from ..link.settings import parse_rate
from .sources import Set, World

_PANEL, _HEIGHT, _GAP = 380, 330, 20
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 34, 46
_LEGEND_LINE, _LEGEND_COLUMN = 22, 380
_COLOURS = 6
_DASHES = ("", "7 3", "2 3")
_STYLE = """
.page { fill: var(--card); }
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; }
text { fill: var(--text); }
.title { font-weight: 600; font-size: 14px; }
.axes text { fill: var(--muted); font-size: 12px; }
.grid { stroke: var(--grid); } .base { stroke: var(--line); }
.line { fill: none; stroke: var(--run); stroke-width: 1.5; }
.ours .line { stroke-width: 2.5; }
.mark { fill: var(--card); stroke: var(--run); stroke-width: 1.5; }
.ours .mark { fill: var(--run); }
.bound { --run: var(--muted); }
"""


def plot(sets: Sequence[Set]) -> str:
    worlds = [(one, world) for one in sets for world in one.worlds]
    # Ours first: they have the first colours, without dashes.
    ways = sorted(dict.fromkeys(way for _, world in worlds for way in world.ways), key=lambda way: not _is_ours(way))
    columns = min(2, len(worlds))
    rows = math.ceil(len(worlds) / columns)
    width = columns * (_PANEL + _GAP) - _GAP
    per_line = max(1, width // _LEGEND_COLUMN)
    legend = _GAP + rows * (_HEIGHT + _GAP)
    height = legend + _LEGEND_LINE * math.ceil(len(ways) / per_line) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {_sized(width, height)} viewBox="0 0 {width} {height}">',
        "<title>Milliseconds of a training step against the bandwidth of each rank's link</title>",
        f"<style>{_palette()}{_STYLE}</style>",
        f'<rect class="page" {_sized(width, height)} rx="10"/>',
    ]
    for number, (one, world) in enumerate(worlds):
        x, y = number % columns * (_PANEL + _GAP), _GAP // 2 + number // columns * (_HEIGHT + _GAP)
        parts.append(f'<g class="panel" transform="translate({x} {y})">{_panel(one, world, ways)}</g>')
    for number, way in enumerate(ways):
        x, y = 16 + number % per_line * _LEGEND_COLUMN, legend + number // per_line * _LEGEND_LINE
        sample = f'<path class="line" d="M0 0h34"{_dash(number)}/>{_mark(number, 17, 0)}'
        label = f'<text x="44" y="4">{escape(way)}</text>'
        parts.append(f'<g class="{_class(way, number)}" transform="translate({x} {y + 8})">{sample}{label}</g>')
    return "".join([*parts, "</svg>\n"])


def _panel(one: Set, world: World, ways: Sequence[str]) -> str:
    times = [point.ms for point in world.points.values()]
    rates = [parse_rate(rate) for rate in world.rates]
    x = _Scale(rates[0], rates[-1], _LEFT + 14, _PANEL - _RIGHT - 14)
    y = _Scale(min(times) / 1.2, max(times) * 1.2, _HEIGHT - _BOTTOM, _TOP)
    base = _HEIGHT - _BOTTOM
    title = f"{world.ranks} ranks, {one.conditions['model']}, {one.conditions['parameters'] / 1e6:.3g} M parameters"
    parts = [f'<text class="title" x="{_LEFT}" y="20">{escape(title)}</text><g class="axes">']
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_PANEL - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{tick:,g}</text>')
    parts.append(f'<line class="base" x1="{_LEFT}" x2="{_PANEL - _RIGHT}" y1="{base}" y2="{base}"/>')
    for name, rate in zip(world.rates, rates, strict=True):
        parts.append(f'<text x="{x.at(rate):.1f}" y="{base + 18}" text-anchor="middle">{escape(name)}</text>')
    parts.append(f'<text x="{_PANEL - _RIGHT}" y="{base + 36}" text-anchor="end">bandwidth of each link</text>')
    parts.append('<text x="4" y="20">ms</text></g>')
    for way in world.ways:
        number = ways.index(way)
        here = [(rate, world.points[way, rate]) for rate in world.rates if (way, rate) in world.points]
        places = [(x.at(parse_rate(rate)), y.at(point.ms)) for rate, point in here]
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
        marks = "".join(
            _mark(number, px, py, f"{way}, {rate}: {point.ms:,.1f} ms")
            for (px, py), (rate, point) in zip(places, here, strict=True)
        )
        parts.append(f'<g class="{_class(way, number)}"><path class="line" d="{path}"{_dash(number)}/>{marks}</g>')
    return "".join(parts)


class _Scale:
    """Logarithmic."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self._low, self._high, self._start, self._stop = low, high, start, stop

    def at(self, value: float) -> float:
        if self._high == self._low:
            return (self._start + self._stop) / 2
        share = math.log(value / self._low) / math.log(self._high / self._low)
        return self._start + share * (self._stop - self._start)

    def ticks(self) -> list[float]:
        """1, 2 and 5 of every power of ten, or the powers alone if that is enough."""
        powers = range(math.floor(math.log10(self._low)), math.ceil(math.log10(self._high)) + 1)
        factors = (1, 2, 5) if self._high / self._low < 300 else (1,)
        every = [factor * 10.0**power for power in powers for factor in factors]
        return [tick for tick in every if self._low <= tick <= self._high]


def _is_ours(way: str) -> bool:
    return way.startswith(("thinwire.", "attach "))


def _class(way: str, number: int) -> str:
    ours = " ours" if _is_ours(way) else ""
    return f"way bound{ours}" if way == "no communication" else f"way run-{number % _COLOURS}{ours}"


def _dash(number: int) -> str:
    dash = _DASHES[number // _COLOURS % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _mark(number: int, x: float, y: float, title: str = "") -> str:
    shapes = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "M-4 -4h8v8h-8z", "M0 -5l5 9h-10z", "M0 -5l5 5l-5 5l-5 -5z")
    told = f"<title>{escape(title)}</title>" if title else ""
    place = f'transform="translate({x:.1f} {y:.1f})"'
    return f'<path class="mark" {place} d="{shapes[number % len(shapes)]}">{told}</path>'


def _sized(width: int, height: int) -> str:
    return f'width="{width}" height="{height}"'


def _palette() -> str:
    """The colours of the report: everything of its style sheet before the rules."""
    style = resources.files("thinwire.report").joinpath("page.css").read_text(encoding="utf-8")
    found = search(r"(?s):root \{.*?(?=\.part-0)", style)
    assert found
    return found[0]
