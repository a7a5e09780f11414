"""Scales, axes and marks of the plots, in the colours of the report, which has a light and a dark mode."""

import math
from collections.abc import Sequence
from html import escape
from importlib import resources
from re import search

COLOURS = 6
TOP, BOTTOM, LEFT, RIGHT = 34, 46, 52, 14
"""Margins of a panel, in pixels."""
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


class Scale:
    """Maps values to positions on an axis, which is logarithmic or linear."""

    def __init__(self, low: float, high: float, start: float, stop: float, *, linear: bool = False) -> None:
        self._low, self._high, self._start, self._stop, self._linear = low, high, start, stop, linear

    def at(self, value: float) -> float:
        """Return the position of a value on the axis, in pixels."""
        if self._high == self._low:
            return (self._start + self._stop) / 2
        if self._linear:
            share = (value - self._low) / (self._high - self._low)
        else:
            share = math.log(value / self._low) / math.log(self._high / self._low)
        return self._start + share * (self._stop - self._start)

    def ticks(self) -> list[float]:
        """Return the values of the ticks.

        A logarithmic axis has ticks at 1, 2 and 5 times each power of ten, or at the powers alone if they are close
        together. A linear axis has 4 to 10 ticks.

        >>> Scale(0.9, 12, 0, 200).ticks(), Scale(1.03, 1.38, 0, 200, linear=True).ticks()
        ([1.0, 2.0, 5.0, 10.0], [1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35])
        """
        if self._linear:
            power = 10.0 ** math.floor(math.log10(self._high - self._low))
            step = next(power * part for part in (0.1, 0.2, 0.5, 1) if (self._high - self._low) / (power * part) <= 10)
            first, last = math.ceil(self._low / step), math.floor(self._high / step)
            return [round(number * step, 12) for number in range(first, last + 1)]
        powers = range(math.floor(math.log10(self._low)), math.ceil(math.log10(self._high)) + 1)
        is_wide = abs(self._stop - self._start) > 100 * math.log10(self._high / self._low)  # pixels per power of ten
        factors = (1, 2, 5) if is_wide else (1,)
        every = [factor * 10.0**power for power in powers for factor in factors]
        return [tick for tick in every if self._low <= tick <= self._high]


def page(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """Return the whole SVG, which refers to no other file."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {_sized(width, height)} viewBox="0 0 {width} {height}">',
        f"<title>{title}</title>",
        f"<style>{_palette()}{_STYLE}</style>",
        f'<rect class="page" {_sized(width, height)} rx="10"/>',
    ]
    return "".join([*head, *parts, "</svg>\n"])


def axes(
    size: tuple[int, int],
    title: str,
    *,
    x: Sequence[tuple[float, str]],
    y: Sequence[tuple[float, str]],
    x_name: str,
    y_name: str,
) -> str:
    """Return the title and the axes of a panel. `x` and `y` are the positions and texts of the ticks."""
    width, height = size
    base = height - BOTTOM
    parts = [f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text><g class="axes">']
    for at, text in y:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    parts.append(f'<line class="base" x1="{LEFT}" x2="{width - RIGHT}" y1="{base}" y2="{base}"/>')
    for at, text in x:
        parts.append(f'<text x="{at:.1f}" y="{base + 18}" text-anchor="middle">{escape(text)}</text>')
    parts.append(f'<text x="{width - RIGHT}" y="{base + 36}" text-anchor="end">{x_name}</text>')
    parts.append(f'<text x="4" y="20">{y_name}</text></g>')
    return "".join(parts)


def mark(number: int, x: float, y: float, title: str = "") -> str:
    """Return the mark of a series at a position, with an optional tooltip. `number` selects the shape."""
    shapes = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "M-4 -4h8v8h-8z", "M0 -5l5 9h-10z", "M0 -5l5 5l-5 5l-5 -5z")
    told = f"<title>{escape(title)}</title>" if title else ""
    place = f'transform="translate({x:.1f} {y:.1f})"'
    return f'<path class="mark" {place} d="{shapes[number % len(shapes)]}">{told}</path>'


def _sized(width: int, height: int) -> str:
    return f'width="{width}" height="{height}"'


def _palette() -> str:
    """Return the colours of the report: the part of its style sheet before the rules."""
    style = resources.files("thinwire.tools.report").joinpath("page.css").read_text(encoding="utf-8")
    found = search(r"(?s):root \{.*?(?=\.part-0)", style)
    assert found
    return found[0]
