"""The report's page in a browser: it asks for nothing, and shows the numbers of the runs by pointer, key and touch."""

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Dialog, Locator, Page, expect

from thinwire.tools import report

STEPS = 40
Open = Callable[..., Page]
Line = dict[str, Any]


def loss(run: int, step: int) -> float | None:
    return None if (run, step) == (0, 20) else (1 + run) * math.exp(-step / 15) + 0.1


def write_run(folder: Path, run: int, *, steps: int = STEPS, ratio: float = 100, finished: bool = True) -> Path:
    config = {"recipe": "digits-cnn", "compressor": f"topk:ratio=1/{ratio:g}", "steps": STEPS, "seed": run}
    lines: list[Line] = [{"kind": "conditions", "config": config, "world_size": 2, "parameters": 123456}]
    for step in range(1, steps + 1):
        dense = 400_000 * step
        place = {"step": step, "seconds": 0.5 * step, "bytes_sent": round(dense / ratio), "bytes_dense": dense}
        split = {"compute": 0.4, "compress": 0.02, "wait": 0.07, "decode": 0.01}
        lines.append({"kind": "step", **place, "loss": loss(run, step), "split": split})
        if step % 10 == 0:
            lines.append({"kind": "evaluation", **place, "loss": 0.5 / (run + step), "accuracy": 0.5 + step / 100})
    if finished:
        lines.append({"kind": "end", "step": steps, "reason": "finished", "seconds": 0.5 * steps})
    return write(folder, lines)


def write(folder: Path, lines: Sequence[Line]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def open_runs(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Makes a report of runs and opens it; at the end of the test, nothing may have been asked for or complained of.

    By default there is a run, its dense reference, and one that was killed.
    """
    contexts: list[BrowserContext] = []
    requests: list[str] = []
    complaints: list[str] = []

    def alerted(dialog: Dialog) -> None:
        complaints.append(dialog.message)
        dialog.dismiss()

    def three() -> list[Path]:
        first = write_run(tmp_path / "compressed", 0)
        write_run(first / "dense", 1, ratio=1)
        return [first, write_run(tmp_path / "killed", 2, steps=30, ratio=50, finished=False)]

    def open_(*runs: Path, **options: Any) -> Page:
        report.write(runs or three(), tmp_path / "page.html")
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(20_000)
        context.set_offline(True)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", alerted)
        page.goto((tmp_path / "page.html").as_uri())
        return page

    yield open_
    pages = [page.url for context in contexts for page in context.pages]
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == pages


@pytest.fixture
def page(open_runs: Open) -> Page:
    return open_runs()


def chart(page: Page, title: str) -> Locator:
    return page.locator("figure").filter(has=page.get_by_role("heading", name=title, exact=True))


def box(element: Locator) -> tuple[float, float, float, float]:
    """Where an element is: x, y, width and height."""
    found = element.bounding_box()
    assert found
    return found["x"], found["y"], found["width"], found["height"]


def place_of(page: Page, figure: Locator) -> tuple[float, float, float, float]:
    """Where its chart is, after scrolling there."""
    over = figure.locator(".u-over")
    over.scroll_into_view_if_needed()
    draw(page)
    return box(over)


def draw(page: Page) -> None:
    """Wait for three frames: a scroll takes the cursor away, in a frame to come."""
    for _ in range(3):
        page.evaluate("new Promise((done) => requestAnimationFrame(done))")


def hover(page: Page, figure: Locator, share: float) -> Locator:
    """Point at this share of the chart's width; returns the tooltip."""
    x, y, width, height = place_of(page, figure)
    page.mouse.move(x + share * width, y + height / 2)
    tooltip = page.locator("#tooltip")
    expect(tooltip).to_be_visible()
    return tooltip


def rows(tooltip: Locator) -> dict[str, list[str]]:
    found = [row.locator("th, td").all_inner_texts() for row in tooltip.locator("tr:has(th[scope=row])").all()]
    return {name: values for name, *values in found}


CHART = "charts.find((one) => one.plot.closest('figure').querySelector('h2, h3').textContent === title)"


def drawn(page: Page, title: str) -> dict[str, list[Any]]:
    """What uPlot draws in a chart: values by the name of a run and what they are; "gap" where a line breaks."""
    values = "uplot.data[n + 1].map((value) => (value === null ? 'gap' : value))"
    found: list[list[Any]] = page.evaluate(
        f"(title) => {{ const {{ uplot }} = {CHART};"
        f"return uplot ? uplot.series.slice(1).map(({{ label }}, n) => [label, {values}]) : []; }}",
        title,
    )
    return {name: [value for value in values if value is not None] for name, values in found}


def axis_title(page: Page) -> str:
    return str(page.evaluate(f"(title) => {CHART}.uplot.axes[0].label", "Loss"))


def shown(figures: float) -> str:
    return f"{figures:.4g}" if figures >= 1 else f"{figures:.{3 - math.floor(math.log10(figures))}f}"


def test_the_summary_has_the_figures_of_every_run_and_the_configuration_what_differs(page: Page) -> None:
    assert page.title() == "3 runs · thinwire report"
    table = page.locator("table.runs")
    assert table.locator("tbody .name").all_inner_texts() == ["compressed", "compressed dense", "killed"]
    first, dense, killed = (row.inner_text() for row in table.locator("tbody tr").all())
    figures = ["0.01250", "90.0 %", "160 kB", "dense 16.0 MB", "100x", "20.0 s", "2.00 steps/s", "123 k", "finished, 4"]
    assert [text for text in figures if text not in first] == []
    assert "16.0 MB" in dense
    assert "1.0x" in dense
    assert "not finished, 30 of 40 steps" in killed
    assert page.locator("#command").inner_text().startswith("thinwire report ")
    assert re.fullmatch(r"Made on \d{4}-\d\d-\d\d \d\d:\d\d UTC by thinwire .*\.", page.locator("#made").inner_text())
    config = page.locator("#config table")
    expect(config).to_be_hidden()
    page.locator("#config summary").click()
    expect(config).to_be_visible()
    assert config.locator("tr.differs th").all_inner_texts() == ["compressor", "seed"]
    assert config.locator("tr.differs").nth(1).locator("td").all_inner_texts() == ["0", "1", "2"]


def test_one_run_has_cards_and_its_name_once(tmp_path: Path, open_runs: Open) -> None:
    page = open_runs(write_run(tmp_path / "digits-cnn-7", 1))
    expect(page.get_by_role("heading", level=1)).to_have_text("digits-cnn-7")
    labels = page.locator(".cards dt").all_inner_texts()
    assert labels == ["Validation loss", "Accuracy", "Sent per rank", "Reduction", "Wall-clock", "Ranks"]
    page.locator("#command").evaluate("element => element.remove()")  # the path is in it
    hover(page, chart(page, "Loss"), 0.5)
    assert page.locator("body").inner_text().count("digits-cnn") == 1
    page.locator("#config summary").click()
    assert page.locator("body").inner_text().count("digits-cnn-7") == 1  # and the recipe


@pytest.fixture
def resumed(tmp_path: Path, open_runs: Open) -> Page:
    """A run with a warm-up of two steps and a refresh after 16, stopped after step 17; its checkpoint is of step 15."""
    lines: list[Line] = []
    sent = 0
    for step in range(1, STEPS + 1):
        why = ["warm-up"] if step < 3 else ["refresh"] if step == 16 else ["evaluation"] if step == 21 else []
        sent += {"warm-up": 100_000, "refresh": 50_000, "evaluation": 4_010}.get(why[0] if why else "", 4_000)
        place = {"step": step, "seconds": 0.5 * step, "bytes_sent": sent, "bytes_dense": 400_000 * step}
        lines.append({"kind": "step", **place, "loss": loss(1, step), "events": why, "reduction_after_warmup": 90.0})
        if step % 20 == 0:
            lines.append({"kind": "evaluation", **place, "loss": 0.5, "accuracy": 0.8 + step / 1000})
    start = {"kind": "conditions", "config": {"steps": STEPS}, "first_step": 0}
    stop = {"kind": "end", "reason": "stopped", "step": 17, "seconds": 8.5}
    whole = [start, *lines[:17], stop, {**start, "first_step": 15}, *lines[15:]]
    return open_runs(write(tmp_path / "run", whole))


def place_in(page: Page, title: str, x: float) -> float:
    """Where a value of the x axis is, in pixels of the window."""
    left, *_ = place_of(page, chart(page, title))
    found: float = page.evaluate(f"([title, x]) => {CHART}.uplot.valToPos(x, 'x')", [title, x])
    return left + found


def test_a_stop_and_a_resume_are_marked(resumed: Page) -> None:
    expect(resumed.locator("#subtitle")).to_contain_text("resumed once")
    cards = [each.inner_text().split("\n") for each in resumed.locator(".cards > div").all()]
    at = [label for label, *_ in cards].index("Reduction")
    sent = 2 * 100_000 + 50_000 + 10 + 37 * 4_000
    assert cards[at] == ["Reduction", f"{400_000 * STEPS / sent:.0f}x", "whole run"]
    assert cards[at + 1] == ["After the warm-up", "90x", "since the last resume"]
    for name, x in (("Steps", 15), ("Time", 7.5), ("Bytes sent", 200_000 + 13 * 4_000)):
        resumed.get_by_text(name, exact=True).click()
        for title in ("Loss", "Accuracy", "Bytes per step"):
            expected = place_in(resumed, title, x)
            assert box(chart(resumed, title).locator(".stop"))[0] == pytest.approx(expected, abs=2)
            expect(chart(resumed, title).locator(".note:not(.bump)")).to_have_text("stopped at step 17, resumed")


def test_bumps_in_the_bytes_have_a_name(resumed: Page) -> None:
    bumps = chart(resumed, "Bytes per step").locator(".bump")
    assert bumps.all_inner_texts() == ["warm-up", "refresh"]  # one for both steps; an evaluation of 10 bytes is none
    expected = place_in(resumed, "Bytes per step", 16)
    assert box(bumps.nth(1))[0] == pytest.approx(expected, abs=6)
    plot = chart(resumed, "Bytes per step").locator(".plot")
    plot.evaluate("(each) => each.scrollIntoView({ block: 'center' })")
    draw(resumed)
    plot.evaluate("(each) => each.focus({ preventScroll: true })")
    place = resumed.locator("#tooltip .place")
    resumed.keyboard.press("Home")
    expect(place).to_have_text("step 1: warm-up")
    for _ in range(20):
        resumed.keyboard.press("ArrowRight")
    expect(place).to_have_text("step 21: evaluation")
    resumed.keyboard.press("ArrowRight")
    expect(place).to_have_text("step 22")


def test_one_run_is_drawn_with_the_dense_bytes_and_accuracy_from_zero(resumed: Page) -> None:
    found = drawn(resumed, "Bytes per step")
    assert set(found["dense"]) == {400_000}
    assert found["sent"][:4] == [100_000, 100_000, 4_000, 4_000]
    log = chart(resumed, "Bytes per step").get_by_role("button", name="Log")
    expect(log).to_have_attribute("aria-pressed", "true")  # else what was sent would be the axis
    low = f"(title) => {CHART}.uplot.scales.y.min"
    assert resumed.evaluate(low, "Accuracy") == 0
    chart(resumed, "Accuracy").get_by_role("button", name="From 0 %").click()
    assert 0.8 < resumed.evaluate(low, "Accuracy") < 0.82


def test_every_chart_draws_every_run(page: Page) -> None:
    names = ("compressed", "compressed dense", "killed")
    assert list(drawn(page, "Loss")) == [f"{n} {what}" for what in ("training", "nearest validation") for n in names]
    assert list(drawn(page, "Accuracy")) == list(names)
    assert list(drawn(page, "Bytes per step")) == [f"{name} sent" for name in names]
    assert drawn(page, "Loss")["compressed dense training"][:2] == pytest.approx([loss(1, 1), loss(1, 2)], rel=1e-5)
    assert drawn(page, "Bytes per step")["compressed sent"][0] == 4000
    for name in names:
        stacked = drawn(page, name)
        assert [values[0] for values in stacked.values()] == pytest.approx([0.5, 0.49, 0.42, 0.4])
        expect(chart(page, name).locator("canvas")).to_be_visible()
    gaps = [drawn(page, "Loss")[f"{name} training"].count("gap") for name in names]
    assert gaps == [1, 0, 0], "a loss that was not finite"
    tooltip = hover(page, chart(page, "Loss"), 0.5)
    expect(tooltip).to_contain_text("step 20")
    assert rows(tooltip)["compressed"][0] == "not finite"


def test_pointing_reads_the_values_of_all_runs(page: Page) -> None:
    tooltip = hover(page, chart(page, "Loss"), 0.4)
    found = re.search(r"step (\d+)", tooltip.inner_text())
    assert found
    step = int(found[1])
    assert 10 < step < 20
    for run, name in enumerate(("compressed", "compressed dense", "killed")):
        nearest = 10 if step <= 15 else 20
        training, validation = rows(tooltip)[name]
        assert training == shown(loss(run, step) or 0.0)
        assert validation == shown(0.5 / (run + nearest))
    page.mouse.move(2, 2)
    expect(tooltip).to_be_hidden()
    assert set(rows(hover(page, chart(page, "Loss"), 0.9))) == {"compressed", "compressed dense"}, "one has ended"
    assert rows(hover(page, chart(page, "compressed"), 0.5)) == {
        "compute": ["400 ms", "80 %"],
        "compress": ["20.0 ms", "4 %"],
        "wait": ["70.0 ms", "14 %"],
        "decode": ["10.0 ms", "2 %"],
        "step": ["500 ms", ""],
    }


def test_other_axes(page: Page) -> None:
    assert axis_title(page) == "steps"
    page.get_by_text("Time", exact=True).click()
    assert axis_title(page) == "wall-clock time"
    tooltip = hover(page, chart(page, "Loss"), 0.5)
    expect(tooltip.locator(".place")).to_have_text(re.compile(r"^[\d.]+ s$"))
    seconds = float((tooltip.locator(".place").inner_text()).removesuffix(" s"))
    assert rows(tooltip)["compressed dense"][0] == shown(loss(1, round(2 * seconds)) or 0.0)
    page.get_by_text("Bytes sent", exact=True).click()
    assert axis_title(page) == "bytes sent per rank, logarithmic"  # 160 kB and 16 MB
    page.get_by_role("button", name="compressed dense").click()
    assert axis_title(page) == "bytes sent per rank"


def test_the_legend_switches_runs(page: Page) -> None:
    button = page.get_by_role("button", name="compressed", exact=True)
    expect(button).to_have_attribute("aria-pressed", "true")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    for title in ("Loss", "Accuracy", "Bytes per step"):
        found = {name.partition(" ")[0] for name in drawn(page, title) if not name.startswith("compressed dense")}
        assert found == {"killed"}
    expect(chart(page, "compressed")).to_be_hidden()
    for name in ("compressed dense", "killed"):
        page.get_by_role("button", name=name, exact=True).click()
    expect(chart(page, "Loss").locator(".empty")).to_be_visible()
    button.click()
    assert len(drawn(page, "Loss")) == 2
    expect(chart(page, "Loss").locator(".empty")).to_have_count(0)


def test_keys_do_what_the_pointer_does(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="compressed", exact=True)).to_be_focused()
    for key, count in (("Space", 4), ("Enter", 6)):
        page.keyboard.press(key)
        assert len(drawn(page, "Loss")) == count
    page.get_by_role("radio", name="Steps").focus()
    page.keyboard.press("ArrowRight")
    assert "sent per rank" in axis_title(page)
    page.keyboard.press("ArrowLeft")
    chart(page, "Loss").locator(".plot").focus()
    tooltip = page.locator("#tooltip")
    for key, place in (("ArrowRight", "step 1"), ("End", "step 40"), ("ArrowLeft", "step 39")):
        page.keyboard.press(key)
        expect(tooltip).to_contain_text(place)
    assert rows(tooltip)["compressed"][0] == shown(loss(0, 39) or 0.0)
    page.keyboard.press("Escape")
    expect(tooltip).to_be_hidden()


def test_the_logarithmic_scale_and_the_width_of_charts(page: Page) -> None:
    scale = "(n) => charts[n].uplot.scales.y.distr"
    assert page.evaluate(scale, 0) == 1
    button = chart(page, "Loss").get_by_role("button", name="Log")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    assert page.evaluate(scale, 0) == 3
    # Bytes of a compressed and a dense run start with it, else one of them would be the axis.
    expect(chart(page, "Bytes per step").get_by_role("button", name="Log")).to_have_attribute("aria-pressed", "true")
    assert page.evaluate(scale, 2) == 3
    marks = page.evaluate("charts[2].uplot.axes[1]._values")
    assert [text for text in marks if text] == ["5 kB", "10 kB", "20 kB", "50 kB", "100 kB", "200 kB"]
    width = "charts[0].uplot.width"
    wide = page.evaluate(width)
    page.set_viewport_size({"width": 600, "height": 900})
    deadline = time.monotonic() + 30
    while page.evaluate(width) == wide:  # wait_for_function may need eval, which the page does not allow
        assert time.monotonic() < deadline, "the chart keeps its width"
        page.evaluate("new Promise((done) => requestAnimationFrame(done))")
    assert 0 < page.evaluate(width) < 600


def test_smoothing_keeps_what_was_measured_in_sight(page: Page) -> None:
    page.get_by_role("slider").focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    assert len(drawn(page, "Loss")) == 9
    tooltip = hover(page, chart(page, "Loss"), 0.4)
    step = int(tooltip.locator(".place").inner_text().removeprefix("step "))
    mean, measured, _ = rows(tooltip)["killed"]
    assert measured == shown(loss(2, step) or 0.0)
    # Three percent of 40 steps: one step on either side.
    assert mean == shown(sum(loss(2, near) or 0.0 for near in (step - 1, step, step + 1)) / 3)


def test_a_phone_has_no_sideways_scroll_and_a_finger_reads_values_too(open_runs: Open) -> None:
    page = open_runs(viewport={"width": 320, "height": 740}, has_touch=True, is_mobile=True)
    page.locator("#config summary").click()
    for axis in ("Bytes sent", "Time", "Steps"):
        page.get_by_text(axis, exact=True).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
    for figure in page.locator("figure").all():
        x, _, wide, _ = box(figure)
        assert 0 <= x <= x + wide <= 320
    page.locator("#config summary").click()
    x, y, wide, high = place_of(page, chart(page, "Loss"))
    page.touchscreen.tap(x + wide / 2, y + high / 2)
    tooltip = page.locator("#tooltip")
    expect(tooltip).to_be_visible()
    left, _, width, _ = box(tooltip)
    assert 0 <= left <= left + width <= 320
    assert set(rows(tooltip)) == {"compressed", "compressed dense", "killed"}
    page.evaluate("window.scrollBy(0, 200)")
    expect(tooltip).to_be_hidden()


def test_dark_mode(open_runs: Open) -> None:
    page = open_runs(color_scheme="dark")
    for name, least, most in (("backgroundColor", 0, 50), ("color", 200, 255)):
        colour = page.locator("body").evaluate(f"element => getComputedStyle(element).{name}")
        assert least <= sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3 <= most, name


def test_a_table_says_who_sent_what(tmp_path: Path, open_runs: Open) -> None:
    """Of a sharded run, to other replicas; of one with two groups, between and inside nodes."""
    sent = [{"bytes_between_nodes": 1000 * rank, "bytes_inside_nodes": 0, "bytes_dense": 80_000} for rank in range(4)]
    sharded = [{"rank": rank, "replica": rank // 2, "shard": rank % 2, **each} for rank, each in enumerate(sent)]
    nodes = [{"rank": rank, **each, "bytes_inside_nodes": 7} for rank, each in enumerate(sent)]
    for number, (ranks, at, *expected) in enumerate((
        (sharded, 4, ["Rank", "Replica", "Shard", "To other replicas", "Dense"], ["3", "1", "1", "3.00 kB", "80.0 kB"]),
        (nodes, 2, ["Rank", "Between nodes", "Inside nodes", "Dense"], ["1", "1.00 kB", "7 B", "80.0 kB"]),
    )):  # fmt: skip
        run = write_run(tmp_path / str(number), 0, finished=False)
        with (run / "metrics.jsonl").open("a") as file:
            json.dump({"kind": "end", "step": STEPS, "reason": "finished", "ranks": ranks}, file)
        page = open_runs(run)
        page.locator("#ranks summary").click()
        table = [row.locator("th, td").all_inner_texts() for row in page.locator("#ranks tr").all()]
        assert [table[0], table[at]] == expected


def test_hostile_names_are_only_text(tmp_path: Path, open_runs: Open) -> None:
    inner = Path("script><script>alert(1)<") / "script>"
    images = write_run(tmp_path / "<img src=x onerror=alert(1)>", 0)
    first, second = write_run(tmp_path / "<" / inner, 1), write_run(tmp_path / "other" / inner, 2)
    page = open_runs(images, first, second)
    names = ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>"]
    assert page.locator("table.runs .name").all_inner_texts()[:2] == names
    for name in names:
        expect(page.get_by_role("button", name=name, exact=True)).to_be_visible()
        expect(chart(page, name)).to_be_visible()
    expect(page.locator("img")).to_have_count(0)
    hover(page, chart(page, "Loss"), 0.5)


def test_runs_that_have_just_begun_sent_nothing_or_are_long(tmp_path: Path, open_runs: Open) -> None:
    for steps in (0, 1, 2):
        page = open_runs(write_run(tmp_path / f"new {steps}", 1, steps=steps, finished=False))
        expect(page.locator("#subtitle")).to_contain_text(f"not finished, {steps} of 40 steps")
        if steps == 0:
            expect(chart(page, "Loss").locator(".empty")).to_have_text("Nothing to draw.")
        else:
            found = [pytest.approx(loss(1, step), rel=1e-5) for step in range(1, steps + 1)]
            assert drawn(page, "Loss") == {"training": found}
            assert page.evaluate("Object.values(charts[0].uplot.scales).every(({ min, max }) => min < max)")
    page = open_runs(write_run(tmp_path / "single", 1, ratio=math.inf))
    for axis in ("Bytes sent", "Time", "Steps"):
        page.get_by_text(axis, exact=True).click()
        assert "NaN" not in page.content()
        assert "Infinity" not in page.locator("#charts").inner_html()
    page = open_runs(*(write_run(tmp_path / f"long {run}", run, steps=20_000) for run in range(3)))
    assert len(drawn(page, "Loss")) == 9  # of each the mean, what was measured, and the validation
    expect(chart(page, "Loss").locator(".unit")).to_contain_text("lowest and highest")
