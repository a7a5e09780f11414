"""Plots validation loss over the bytes that a rank sends as a self-contained SVG, with a panel for each comparison.

A mark is a method at one world size, with its best learning rate. Its colour stands for the method, whose name is next
to it, and its shape for the world size. Values far from dense are drawn on the edge, with the value as text.
"""

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from .losses import Comparison
from .svg import BOTTOM, COLOURS, LEFT, RIGHT, TOP, Scale, axes, mark, page

_WIDTH, _HEIGHT, _GAP = 780, 400, 20
_LETTER, _LINE = 7.2, 15
"""Mean width of a letter and distance between labels, in pixels."""

_FAR = 0.3
"""Relative difference from the best dense value above which a mark is drawn on the edge.

Otherwise the other marks could not be distinguished.
"""

Place = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def plot(comparisons: Sequence[Comparison]) -> str:
    """Return the SVG with all panels."""
    height = len(comparisons) * (_HEIGHT + _GAP) + _GAP // 2
    parts = [
        f'<g class="panel" transform="translate(0 {_GAP // 2 + number * (_HEIGHT + _GAP)})">{_panel(one)}</g>'
        for number, one in enumerate(comparisons)
    ]
    return page("Validation loss over the bytes that a rank sends", _WIDTH, height, parts)


def _panel(one: Comparison) -> str:
    # thinwire's methods first, so that they get the first colours.
    methods = sorted(one.methods, key=lambda method: not method.is_ours)
    points = {
        (method, ranks): found for method in methods for ranks in one.worlds if (found := one.best(method, ranks))
    }
    sent = [result.bytes_total / 1e6 for _, result in points.values()]
    dense = one.dense()
    assert dense
    low, high = (dense[2].value * (1 + sign * _FAR) for sign in (-1, 1))
    values = {key: min(max(result.value, low), high) for key, (_, result) in points.items()}
    # The axis spans at least a tenth of the value, so that differences by chance look small.
    spread = max(values.values()) - min(values.values())
    margin = max(0.08 * spread, (0.1 * dense[2].value - spread) / 2)
    x = Scale(min(sent) / 1.5, max(sent) * 1.5, LEFT, _WIDTH - RIGHT)
    y = Scale(min(values.values()) - margin, max(values.values()) + margin, _HEIGHT - BOTTOM, TOP, linear=True)
    given = one.conditions
    parts = [
        axes(
            (_WIDTH, _HEIGHT),
            f"{one.metric.name}: {given['model']}, {given['parameters'] / 1e6:.3g} M parameters, {one.family}, "
            f"{given['steps']:,} steps",
            x=[(x.at(tick), f"{tick:,g}") for tick in x.ticks() if LEFT < x.at(tick) < _WIDTH - RIGHT - 20],
            y=[(y.at(tick), one.metric.tick(tick)) for tick in y.ticks()],
            x_name="MB that a rank sends in all steps",
            y_name="",
        ),
        _legend(one.worlds),
    ]
    places = {key: (x.at(result.bytes_total / 1e6), y.at(values[key])) for key, (_, result) in points.items()}
    lines = {method: line for method in methods if (line := [at for key, at in places.items() if key[0] == method])}
    taken = [(px - 6, py - 6, px + 6, py + 6) for line in lines.values() for px, py in _along(line)]
    for number, method in enumerate(methods):
        if method in lines:
            label = one.title(method)
            marks = ""
            for ranks in one.worlds:
                if (method, ranks) in points:
                    lr, result = points[method, ranks]
                    told = f"{one.title(method)}, {ranks} ranks, lr {lr:g}: {one.metric.show(result.value)}"
                    told += f", {result.bytes_total / 1e6:,.1f} MB, {result.reduction:,.1f}x"
                    marks += mark(one.worlds.index(ranks), *places[method, ranks], told)
                    if values[method, ranks] != result.value:
                        label += f", {one.metric.show(result.value)} with {ranks} ranks"
            path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in lines[method])
            drawn = (
                f'<path class="line" style="stroke-width: 1" d="{path}"/>{marks}{_label(label, lines[method], taken)}'
            )
            ours = " ours" if method.is_ours else ""
            parts.append(f'<g class="method run-{number % COLOURS}{ours}">{drawn}</g>')
    return "".join(parts)


def _along(line: Sequence[Place]) -> list[Place]:
    """Return points on a line, so close to each other that no label fits between them."""
    steps = [(start, stop, part / 64) for start, stop in pairwise(line) for part in range(64)]
    between = [(a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1])) for a, b, share in steps]
    return [*between, line[-1]]


def _label(text: str, places: Sequence[Place], taken: list[Box]) -> str:
    """Return the name of a method at the nearest free place beside one of its marks."""
    width = _LETTER * len(text)
    candidates = [
        ((px + 9 if right else px - 9 - width), py + up * _LINE / 2, px, py)
        for up in sorted(range(-40, 41), key=abs)
        for px, py in places
        for right in (True, False)
    ]
    free = [
        (left, middle, px, py)
        for left, middle, px, py in candidates
        if left > LEFT
        and left + width < _WIDTH - RIGHT
        and TOP < middle < _HEIGHT - BOTTOM - _LINE / 2
        and not any(
            left < box[2] and box[0] < left + width and middle - _LINE / 2 < box[3] and box[1] < middle + _LINE / 2
            for box in taken
        )
    ]
    left, middle, px, py = (free or candidates)[0]
    taken.append((left, middle - _LINE / 2, left + width, middle + _LINE / 2))
    far = abs(middle - py) > _LINE
    edge, anchor = (left, "start") if left > px else (left + width, "end")
    place = f' x="{edge:.1f}" y="{middle + 4:.1f}" text-anchor="{anchor}"'
    leader = f'<path class="grid" d="M{px:.1f} {py:.1f}L{edge:.1f} {middle:.1f}"/>' if far else ""
    return f'{leader}<text{place} style="fill: var(--run)">{escape(text)}</text>'


def _legend(worlds: Sequence[int]) -> str:
    """Return the shapes of marks, for below the axis."""
    parts = [
        f"{mark(number, LEFT + 6 + 90 * number, _HEIGHT - 14)}"
        f'<text x="{LEFT + 16 + 90 * number}" y="{_HEIGHT - 10}">{ranks} ranks</text>'
        for number, ranks in enumerate(worlds)
    ]
    return f'<g class="bound axes">{"".join(parts)}</g>'
