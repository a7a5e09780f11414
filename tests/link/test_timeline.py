"""The timeline: of spans that are known, and as a page that refers to nothing outside of it."""

import re
from html import unescape
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from thinwire.collectives.handle import Span
from thinwire.tools.bench.link.measured import Row
from thinwire.tools.bench.link.timeline import Marks, Recorded, Timeline, timeline
from thinwire.tools.bench.link.timeline_page import page

CONDITIONS = {"thinwire": "1", "torch": "2", "cpu": "<b>", "cores": 2, "date": "today"}


@pytest.fixture
def known() -> Timeline:
    """A step of 100 ms: 20 forward, 40 backward, 30 waiting, 10 for the optimizer; two buckets."""
    first = [Span("update", 1.030, 1.031), Span("encode", 1.031, 1.035), Span("exchange", 1.035, 1.055)]
    second = [Span("encode", 1.058, 1.062), Span("exchange", 1.062, 1.080), Span("decode", 1.080, 1.088)]
    recorded = Recorded([("bucket 1, 10 elements", first), ("bucket 2, 20 elements", second)], 1.060)
    return timeline(Marks(1.0, 1.020, 1.090, 1.100), recorded)


def test_what_ran_beside_the_backward_pass_is_told_from_what_was_waited_for(known: Timeline) -> None:
    assert known.ms == pytest.approx(100)
    assert known.whole == pytest.approx(60)
    assert known.beside == pytest.approx(25 + 2)
    assert known.waited == pytest.approx(30)
    assert [lane.name for lane in known.lanes] == ["compute", "bucket 1, 10 elements", "bucket 2, 20 elements"]
    assert [bar.label for bar in known.lanes[0].bars] == ["forward", "backward", "optimizer"]
    assert [bar.phase for bar in known.lanes[1].bars] == ["compute", "compress", "exchange"]


def test_bars_are_where_their_times_are(known: Timeline) -> None:
    text = page([Row("1gbit", 2, "attach topk", 1.0, 1.0, 1.0, 1, known)], CONDITIONS, "thinwire bench link")
    found = re.search(r'<svg class="timeline".*?</svg>', text, re.DOTALL)
    assert found
    drawing = ElementTree.fromstring(found[0])
    places: dict[str, tuple[float, float]] = {}
    for bar in drawing.iter("rect"):
        title = bar.find("title")
        assert title is not None
        places[str(title.text)] = float(bar.attrib["x"]), float(bar.attrib["width"])
    forward = places["compute: forward, 0.00 to 20.00 ms (20.00 ms)"]
    exchange = places["bucket 2, 20 elements: exchange, 62.00 to 80.00 ms (18.00 ms)"]
    scale = forward[1] / 20
    assert exchange[0] == pytest.approx(forward[0] + 62 * scale, abs=0.02)
    assert exchange[1] == pytest.approx(18 * scale, abs=0.02)
    assert len(places) == 3 + 3 + 3


def test_the_page_stands_alone_and_names_are_only_text(known: Timeline) -> None:
    rows = [Row("1gbit", 2, "attach <topk>", 1.0, 1.0, 1.0, 1, known), Row("1gbit", 2, "dense", 1.0, 1.0, 1.0, 1)]
    text = page(rows, CONDITIONS, "thinwire bench link --ways <>")
    outside: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            given = {name: value or "" for name, value in attributes}
            outside.extend(given[name] for name in ("src", "href") if not given.get(name, "data:").startswith("data:"))
            assert tag not in ("script", "topk", "b")
            assert "style" not in given, "its policy allows the one style sheet and nothing else"

    Reader().feed(text)
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert not outside
    assert [unescape(heading) for heading in headings] == ["attach <topk>, 1gbit, 2 ranks"]
    assert "For 27.0 ms buckets were compressed, exchanged or decoded while gradients were still computed" in text
    assert "for 30.0 ms after the last one" in text
