"""The plot: a file of its own, which says what it shows and asks nobody for anything."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from xml.etree import ElementTree

import pytest
from plan_cases import COSTLY, MADE, TOPK, case

from thinwire.compressors import compressor
from thinwire.tools import cli
from thinwire.tools.plan.plot import draw

SPACE = "{http://www.w3.org/2000/svg}"


def drawn(**changes: object) -> ElementTree.Element:
    return ElementTree.fromstring(draw(case(speeds=COSTLY, **changes), MADE))  # type: ignore[arg-type]


def lines(picture: ElementTree.Element) -> dict[str, list[list[tuple[float, float]]]]:
    """Points of each curve, by its name: in the panel of bandwidths, in that of worlds."""
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for line in picture.iter(f"{SPACE}polyline"):
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        found.setdefault(line.findtext(f"{SPACE}title") or "", []).append(points)  # type: ignore[arg-type]
    return found


def test_every_compressor_has_a_curve_in_both_panels() -> None:
    found = lines(drawn())
    assert list(found)[-2:] == list(MADE)
    assert all(len(curves) == 2 for curves in found.values())
    assert [len(curve) for curve in found[TOPK]] == [33, 12]


def test_everything_lies_in_the_picture() -> None:
    picture = drawn(ranks_per_host=4)
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    for curves in lines(picture).values():
        assert all(0 <= x <= width and 0 <= y <= height for curve in curves for x, y in curve)


def test_less_speed_up_on_faster_links() -> None:
    bandwidths = lines(drawn())[TOPK][0]
    assert bandwidths[0][1] < bandwidths[-1][1]  # y grows downwards


def test_where_the_case_is() -> None:
    texts = [element.text for element in drawn().iter(f"{SPACE}text")]
    assert texts.count("here") == 2
    assert any(text and "50,000,000 parameters, 8 ranks, 1 Gbit/s" in text for text in texts)


def test_nothing_outside_is_asked_for() -> None:
    text = draw(case(), MADE)
    assert text.count("http") == 1, "the namespace"
    for word in ("<script", "href", "url(", "@import", "<image"):
        assert word not in text


def test_many_compressors_take_a_second_row() -> None:
    specs = [*MADE, *(f"topk:ratio=1/{ratio},bits=2" for ratio in (32, 128, 256, 512))]
    made = {spec: compressor(spec) for spec in specs}
    speeds = replace(COSTLY, codecs=MappingProxyType(dict.fromkeys(specs, COSTLY.codecs[TOPK])))
    taller = ElementTree.fromstring(draw(case(speeds=speeds), made))
    assert float(taller.attrib["viewBox"].split()[3]) > float(drawn().attrib["viewBox"].split()[3])


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.svg"
    words = ["--params", "25M", "--world", "4", "--bandwidth", "1gbit", "--step-compute", "100ms", "--plot", str(out)]
    assert cli.main(["plan", *words]) == 0
    assert f"{out}: open it in a browser" in capsys.readouterr().out
    assert ElementTree.parse(out).getroot().tag == f"{SPACE}svg"
