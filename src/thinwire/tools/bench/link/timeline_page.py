"""Draws timelines into one HTML file that works offline, without scripts and in the style of the report."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template

from .measured import Row
from .timeline import PHASES, Lane, Timeline

_WIDTH, _LEFT, _RIGHT, _TOP = 1040, 210, 16, 8
_LANE, _BAR = 34, 22
_TICKS = (1, 2, 5)
_NOTHING = '<p class="notice">None of these ways records what it does.</p>'
_STYLE = """
.scroll { border: 0; padding: 0; }
.timeline { display: block; width: 100%; min-width: 760px; height: auto; }
.timeline .name { font-size: 13px; fill: var(--text); }
.timeline .inside { font-size: 12px; fill: #fff; pointer-events: none; }
.timeline .whole { stroke: var(--muted); stroke-dasharray: 3 3; }
.timeline .area:hover { opacity: 0.8; }
figure.card { margin-bottom: 16px; }
figcaption { min-height: 0; }
.said { margin: 4px 2px 8px; color: var(--muted); font-size: 14px; }
"""


def page(rows: Sequence[Row], conditions: Mapping[str, object], command: str) -> str:
    """Return the HTML page with the timelines of all rows that have one."""
    drawn = [(row, row.timeline) for row in rows if row.timeline is not None]
    style = resources.files("thinwire.tools.report").joinpath("page.css").read_text(encoding="utf-8") + _STYLE
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    legend = "".join(f'<li><span class="chip part-{n}"></span>{phase}</li>' for n, phase in enumerate(PHASES))
    where = "thinwire {thinwire}, torch {torch}, {cpu}, {cores} cores, {date}".format(**conditions)
    return Template(resources.files(__package__).joinpath("timeline.html").read_text(encoding="utf-8")).substitute(
        style=style,
        style_hash=f"sha256-{digest}",
        legend=legend,
        where=escape(where),
        command=escape(command),
        figures="\n".join(_figure(row, timeline) for row, timeline in drawn) or _NOTHING,
    )


def _figure(row: Row, timeline: Timeline) -> str:
    title = f"{row.way}, {row.rate}, {row.world} ranks"
    said = (
        f"Rank 0, one step of {timeline.ms:,.1f} ms. For {timeline.beside:,.1f} ms buckets were compressed, exchanged "
        f"or decoded while gradients were still computed; for {timeline.waited:,.1f} ms after the last one, which the "
        "dashed line marks, the step waited for them."
    )
    return (
        f'<figure class="card"><figcaption><h2>{escape(title)}</h2></figcaption><p class="said">{said}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">{_drawing(title, timeline)}</div>'
        "</figure>"
    )


def _drawing(title: str, timeline: Timeline) -> str:
    scale = (_WIDTH - _LEFT - _RIGHT) / max(timeline.ms, 1e-9)
    bottom = _TOP + _LANE * len(timeline.lanes)
    whole = _LEFT + scale * timeline.whole
    parts = [
        f'<svg class="timeline" viewBox="0 0 {_WIDTH} {bottom + 44}" role="img" aria-label="{escape(title)}">',
        '<g class="axes">',
    ]
    for tick in ticks(timeline.ms):
        x = _LEFT + scale * tick
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{bottom + 36}" text-anchor="end">ms since the step began</text></g>')
    parts.append(f'<line class="whole" x1="{whole:.1f}" x2="{whole:.1f}" y1="{_TOP}" y2="{bottom}"/>')
    for number, lane in enumerate(timeline.lanes):
        parts += _lane(lane, _TOP + number * _LANE, scale, named=number == 0)
    return "".join([*parts, "</svg>"])


def _lane(lane: Lane, top: float, scale: float, *, named: bool) -> list[str]:
    """Return the SVG elements of a lane. With `named`, bars contain their labels if there is room."""
    middle = top + _LANE / 2
    parts = [f'<text class="name" x="{_LEFT - 12}" y="{middle + 4:.1f}" text-anchor="end">{escape(lane.name)}</text>']
    for bar in lane.bars:
        x, width = _LEFT + scale * bar.start, scale * (bar.stop - bar.start)
        what = f"{lane.name}: {bar.label}, {bar.start:.2f} to {bar.stop:.2f} ms ({bar.stop - bar.start:.2f} ms)"
        parts.append(
            f'<rect class="area part-{PHASES.index(bar.phase)}" x="{x:.2f}" y="{middle - _BAR / 2:.1f}" '
            f'width="{max(width, 0.5):.2f}" height="{_BAR}" rx="2"><title>{escape(what)}</title></rect>'
        )
        if named and width > 8 * len(bar.label):
            parts.append(f'<text class="inside" x="{x + 6:.2f}" y="{middle + 4:.1f}">{escape(bar.label)}</text>')
    return parts


def ticks(end: float) -> list[float]:
    """Return round values from 0 up to `end`, at most about ten.

    >>> ticks(43), ticks(0.8)[-1]
    ([0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0], 0.8)
    """
    steps = (factor * 10.0**power for power in range(-3, 9) for factor in _TICKS)
    step = next((step for step in steps if end / step <= 10), end)
    return [round(number * step, 6) for number in range(int(end / step * (1 + 1e-9)) + 1)]
