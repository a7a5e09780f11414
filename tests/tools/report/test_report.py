"""The report: what it reads, what it leaves out, what it refuses; its page in a browser is in tests/browser."""

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from thinwire.tools import cli, report
from thinwire.tools.report.page import bytes_per_step, content, curve, stack, thin
from thinwire.tools.report.runs import Run, find, read

Line = dict[str, Any]


def conditions(first_step: int = 0, **config: object) -> Line:
    config = {"compressor": "topk:ratio=1/64,bits=2", "steps": 40, **config}
    date = f"2026-01-01T12:00:{first_step % 60:02}+00:00"
    known = {"world_size": 2, "parameters": 1000, "first_step": first_step}
    return {"kind": "conditions", "date": date, "config": config, **known}


def place(number: int) -> Line:
    return {"step": number, "seconds": 0.1 * number, "bytes_sent": 100 * number, "bytes_dense": 8000 * number}


def step(number: int, loss: float | None = 1.0, **more: object) -> Line:
    split = {"compute": 0.01, "compress": 0.001, "wait": 0.002, "decode": 0.0005, "of another version": 1}
    return {"kind": "step", "loss": loss, "split": split, **place(number), **more}


def evaluation(number: int, loss: float | None = 0.5, **more: object) -> Line:
    return {"kind": "evaluation", "loss": loss, **place(number), **more}


def write(folder: Path, lines: Iterable[Line], *, cut: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)
    return folder


def run_of(tmp_path: Path, lines: Iterable[Line], *, cut: str = "") -> Run:
    return read(write(tmp_path / "run", lines, cut=cut) / "metrics.jsonl", "run")


def embedded(page: Path) -> Any:
    """The data of a page; that no string ends its element early is tested here and in a browser."""
    (found,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script', page.read_text("utf-8"), re.DOTALL
    )
    return json.loads(found)


END = {"kind": "end", "step": 40, "reason": "finished", "seconds": 4.5}


def test_run_is_read_and_unknown_lines_and_fields_are_not(tmp_path: Path) -> None:
    lines = [
        conditions(), step(10, 2.0), {"kind": "of another version", "step": "whatever"},
        evaluation(10, 2.1, accuracy=0.4, of_another_version=[1]), step(20, None, reduction_after_warmup=150.5),
        evaluation(20, 1.0, accuracy=None), evaluation(40, 0.9), END,
    ]  # fmt: skip
    run = run_of(tmp_path, lines)
    assert [(row.step, row.loss) for row in run.steps] == [(10, 2.0), (20, None)]
    accuracies = [(row.step, row.loss, row.accuracy) for row in run.evaluations]
    assert accuracies == [(10, 2.1, 0.4), (20, 1.0, None), (40, 0.9, None)]
    assert run.steps[0].split == (0.01, 0.001, 0.002, 0.0005)
    assert (run.status, run.step, run.seconds, run.resumes) == ("finished", 40, 4.5, 0)
    summary = content(run)["summary"]
    assert (summary["bytes"], summary["dense"]) == (4000, 320_000)
    assert summary["reduction_after_warmup"] == 150.5
    assert (summary["training"], summary["validation"], summary["accuracy"]) == ([None], [0.9], 0.4)
    assert (summary["ranks"], summary["parameters"], summary["compressor"]) == ("2", 1000, "topk:ratio=1/64,bits=2")


def test_choice_of_auto_is_named(tmp_path: Path) -> None:
    """That of an earlier version was made by bucket, and is left out."""
    now = {"kind": "choice", "step": 9, "compressor": "quantize:bits=8", "candidates": ["none", "quantize:bits=8"]}
    before = {"kind": "choice", "step": 9, "buckets": [{"compressor": "none"}], "step_seconds": [0.1], "timeline": {}}
    start = [conditions(compressor="auto"), step(10)]
    resumed, another = [now, conditions(5, compressor="auto")], [now, *start]
    for more, chosen in (([now], ": quantize:bits=8"), ([before], ""), (resumed, ": quantize:bits=8"), (another, "")):
        assert content(run_of(tmp_path, [*start, *more]))["summary"]["compressor"] == f"auto{chosen}", more


def test_what_each_rank_sent_is_read_from_the_end(tmp_path: Path) -> None:
    sent = {"bytes_between_nodes": 10, "bytes_inside_nodes": 20, "bytes_dense": 300}
    ranks = [{"rank": 0, **sent}, {"rank": 1, "replica": 1, "shard": 0, **sent}]
    lines = [conditions(), step(40), {**END, "ranks": ranks}]
    found = {"between": 10, "inside": 20, "dense": 300}
    expected = [{"rank": 0, "replica": None, "shard": None, **found}, {"rank": 1, "replica": 1, "shard": 0, **found}]
    assert content(run_of(tmp_path, lines))["ranks"] == expected
    assert run_of(tmp_path, [*lines, conditions(first_step=20)]).ranks == [], "it goes on"


def test_a_resume_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    stop = {"kind": "end", "step": 20, "reason": "stopped", "seconds": 2.0}
    before = [conditions(), step(10, 1.0), evaluation(10), step(20, 2.0), evaluation(20), stop]
    run = run_of(tmp_path, [*before, conditions(first_step=10), step(20, 3.0)])
    assert [(row.step, row.loss) for row in run.steps] == [(10, 1.0), (20, 3.0)]
    assert [row.step for row in run.evaluations] == [10]
    assert (run.status, run.resumes, run.step, run.conditions["first_step"]) == ("unfinished", 1, 20, 10)
    assert run.started.endswith(":00+00:00")


def test_stops_and_resumes_are_marked(tmp_path: Path) -> None:
    """At the checkpoint from which a run went on, with its bytes and seconds, so that any axis has the mark."""
    cases: list[tuple[list[str], int | None, list[str]]] = [
        ([], 10, ["resumed"]), (["stopped"], 20, ["stopped, resumed"]),
        (["stopped"], 10, ["stopped at step 20, resumed"]),
        (["failed"], 10, ["failed at step 20, resumed"]), (["finished"], 20, ["finished, resumed"]),
        (["stopped"], None, ["stopped"]), (["finished"], None, []), (["stopped"], 0, []),
    ]  # fmt: skip
    for ends, first_step, texts in cases:
        ended = [{**step(20), "kind": "end", "reason": reason} for reason in ends]
        more = [] if first_step is None else [conditions(first_step=first_step), step(30)]
        marks = content(run_of(tmp_path, [conditions(), step(10), step(20), *ended, *more]))["marks"]
        assert [mark["text"] for mark in marks] == texts
        place = 20 if first_step is None else first_step
        expected = {"step": place, "seconds": pytest.approx(0.1 * place), "bytes": 100 * place}
        assert all({name: mark[name] for name in expected} == expected for mark in marks), (ends, first_step)
    stopped = [conditions(), step(10), {**step(10), "kind": "end", "reason": "stopped"}]
    again = [conditions(first_step=10), step(20), conditions(first_step=20), step(30), conditions(first_step=20)]
    found = [(mark.step, mark.text) for mark in run_of(tmp_path, [*stopped, *again]).marks]
    assert found == [(10, "stopped, resumed"), (20, "resumed"), (20, "resumed")], "a mark for each stop"


def test_run_from_step_0_is_another_one(tmp_path: Path) -> None:
    for reason, status in (("finished", "finished"), ("stopped", "stopped"), ("failed", "failed"), ("?", "stopped")):
        assert run_of(tmp_path, [conditions(), step(10), {**END, "reason": reason}]).status == status
    run = run_of(tmp_path, [conditions(), evaluation(0), step(30), END, conditions(lr=2), evaluation(0), step(10)])
    assert [row.step for row in run.rows] == [10, 0]
    assert (run.status, run.resumes, run.step, run.config["lr"]) == ("unfinished", 0, 10, 2)


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    whole = json.dumps(step(20))
    for length in range(len(whole) + 1):
        run = run_of(tmp_path, [conditions(), step(10)], cut=whole[:length])
        assert [row.step for row in run.steps] == ([10, 20] if length == len(whole) else [10])


def test_loss_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    for value in ("NaN", "Infinity", "-Infinity", "1e999", "null"):
        text = json.dumps(step(10)).replace('"loss": 1.0', f'"loss": {value}')
        run = run_of(tmp_path, [conditions(), step(5)], cut=text + "\n")
        assert run.steps[1].loss is None, value
        assert content(run)["loss"]["value"] == [1, None], value
        json.dumps(content(run), allow_nan=False)


DAMAGED = {
    '{"kind": "step", "st\n{"kind": "end"}': "not a line of JSON",
    "[" * 100_000: "not a line of JSON",
    '{"kind": "step", "step": ' + "9" * 10_000 + "}": "not a line of JSON",
    "[1, 2]": r"expected an object with a kind, given \[1, 2\]",
    '{"step": 3}': "expected an object with a kind",
    '{"kind": ["step"], "step": 1}': "expected an object with a kind",
    '{"kind": "step", "step": -1}': "step -1, expected a whole number, from 0",
    '{"kind": "step", "step": true}': "step True, expected a whole number",
    '{"kind": "step", "step": 1' + "0" * 400 + "}": r"step 10+\.\.\.0+, expected a whole number",
    '{"kind": "step", "step": 1, "loss": "low"}': "loss 'low', expected a number or null",
    '{"kind": "step", "step": 1, "split": 3}': "split 3, expected an object with compute",
    '{"kind": "step", "step": 1, "events": [3]}': r"events \[3\], expected a list of names",
    '{"kind": "end", "step": 1, "ranks": [3]}': r"ranks \[3\], expected a list of objects",
    '{"kind": "end", "step": 1, "ranks": [{"rank": "a"}]}': "rank 'a', expected a whole number",
    '{"kind": "conditions", "first_step": "0"}': "first_step '0', expected a whole number",
}


def test_damaged_line_is_named(tmp_path: Path) -> None:
    for text, message in DAMAGED.items():
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2: " + message):
            run_of(tmp_path, [conditions()], cut=text + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1: a line of kind 'step' before any conditions"):
        run_of(tmp_path, [step(10)])


BIG = 10**400
NESTED = "[" * 400 + "]" * 400
ODD: dict[str, Line] = {
    "huge numbers": {"loss": BIG, "seconds": -BIG, "bytes_sent": BIG, "bytes_dense": 1e308, "accuracy": BIG},
    "large numbers": {"loss": 1e299, "seconds": 1e299, "bytes_sent": 1e299, "bytes_dense": 1e299},
    "huge parts": {"split": {"compute": BIG, "compress": 1e308, "wait": -1e308, "decode": None}},
    "large whole parts": {"split": dict.fromkeys(("compute", "compress", "wait", "decode"), 10**299)},
    "no parts": {"split": {}},
    "nothing": {"loss": None, "seconds": None, "bytes_sent": None, "bytes_dense": None, "split": None},
    "more": {"other": [[{}]], "": "", "NaN": {"a": [1e5]}},
}


def test_numbers_of_any_size_make_a_page(tmp_path: Path) -> None:
    for what, odd in ODD.items():
        lines = [conditions(), step(1), {**step(2), **odd}, {**evaluation(2), **odd}, step(3), {**END, **odd}]
        report.write([write(tmp_path / "run", lines)], tmp_path / "page.html")
        assert embedded(tmp_path / "page.html")["runs"][0]["loss"]["step"] == [1, 2, 3], what


def test_conditions_of_any_content_and_long_runs_make_small_pages(tmp_path: Path) -> None:
    cases: list[Line] = [
        {"parameters": BIG, "world_size": BIG, "config": {"steps": BIG}},
        {"parameters": "many", "world_size": [2], "config": "as before", "date": [[7]]},
        {"config": {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": 1}}}}}}}}, "date": None},
        {"config": {"deep": json.loads(NESTED)}, "date": json.loads(NESTED)},
        {"config": {"long": "x" * 10**6, "steps": -1}},
        {},
    ]
    run = write(tmp_path / "long run", [conditions(), *(step(n, 1 / n) for n in range(1, 50_001))])
    assert report.write([run], tmp_path / "page.html") == (tmp_path / "page.html").stat().st_size < 500_000
    for odd in cases:
        report.write([write(tmp_path / "run", [{**conditions(), **odd}])], tmp_path / "page.html")
        (run,) = embedded(tmp_path / "page.html")["runs"]
        assert (run["status"], run["summary"]["training"]) == ("unfinished", []), odd
        assert (tmp_path / "page.html").stat().st_size < 300_000


def test_bytes_per_step_events_and_the_mean_over_steps(tmp_path: Path) -> None:
    def of(*lines: Line) -> Any:
        return content(run_of(tmp_path, [conditions(), *lines]))

    rows = [step(10, bytes_sent=1000), step(20, bytes_sent=None), step(40, bytes_sent=7000), step(40, bytes_sent=7000)]
    steps = run_of(tmp_path, [conditions(), *rows]).steps
    assert bytes_per_step(steps, [row.bytes_sent for row in steps]) == [100, None, 200, None]
    assert of(*rows)["dense"]["value"] == [8000, 8000, 8000, None]
    lines = [step(1, events=["warm-up"]), step(10, events=["warm-up", "evaluation"]), step(20, events=[]), step(30)]
    assert of(*lines)["events"] == [[1, "warm-up"], [10, "warm-up, evaluation"]]
    rows = [step(1, split={"compute": 1.0}), step(11, split={"compute": 0.1}), step(12, split=None)]
    assert of(*rows)["step_seconds"] == {"mean": pytest.approx(2 / 11), "longest": 1}


def test_thinned_curves_keep_ends_extremes_and_gaps() -> None:
    values: list[float | None] = [float(n % 7) for n in range(100_000)]
    values[0], values[-1], values[4321], values[54_321], values[77_777] = 3.5, 2.5, 99.0, -99.0, None
    kept = thin(values)
    assert {0, 99_999, 4321, 54_321, 77_777} <= set(kept)
    assert kept == sorted(set(kept))
    assert 1000 < len(kept) < 2100
    drawn = curve([(n, None, None) for n in range(100_000)], values)
    assert drawn["step"] == kept
    assert drawn["value"][kept.index(4321)] == 99
    assert drawn["mean"][kept.index(77_777)] is None
    assert drawn["mean"][kept.index(4321)] == pytest.approx(4, abs=1)
    drawn = curve([(n, n / 10, 3 * n) for n in range(2000)], [float(n) for n in range(2000)])
    assert drawn["value"] == list(range(2000)), "short curves are whole"
    assert (drawn["seconds"][15], drawn["bytes"][15], "mean" in drawn, thin([])) == (1.5, 45, False, [])


def test_stacks_are_means_so_that_their_areas_are_right() -> None:
    rows = [(float(n % 10), 1.0) if n % 3 else None for n in range(30_000)]
    drawn = stack([(n, n, n) for n in range(30_000)], rows, 2)
    assert len(drawn["part0"]) <= 100
    assert all(value == pytest.approx(4.5, abs=0.1) for value in drawn["part0"])
    assert (set(drawn["part1"]), drawn["step"][-1], stack([], [], 2)["part1"]) == ({1}, 29_999, [])


def test_runs_are_found_with_their_dense_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names(*paths: Path) -> list[str]:
        return [name for name, _ in find(list(paths))]

    first, second = (write(tmp_path / day / "a", [conditions()]) for day in ("monday", "tuesday"))
    dense = write(first / "dense", [conditions()])
    assert names(first) == ["a", "a dense"]
    assert names(first / "metrics.jsonl", second) == ["monday/a", "monday/a dense", "tuesday/a"]
    assert names(dense, first) == ["a dense", "a"]
    write(second / "dense", [conditions()])
    assert names(first, second) == ["monday/a", "monday/a dense", "tuesday/a", "tuesday/a dense"]
    monkeypatch.chdir(dense)
    assert names(Path()) == ["a dense"]


def test_the_command_writes_one_file_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "a run", [conditions(), step(10), evaluation(10, accuracy=0.9), END])
    out = tmp_path / "page.html"
    out.write_text("an older one")
    assert cli.main(["report", str(run), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert re.fullmatch(rf"{re.escape(str(out))}: \d+ kB; open it in a browser\n", printed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a run", "page.html"]
    data = embedded(out)
    assert data["command"] == f"thinwire report '{run}' --out {out}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", data["date"])
    assert [run["name"] for run in data["runs"]] == ["a run"]
    assert ["compressor", "topk:ratio=1/64,bits=2"] in data["runs"][0]["config"]
    assert oct(out.stat().st_mode & 0o777) == oct((run / "metrics.jsonl").stat().st_mode & 0o777)


def test_the_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    report.write([write(tmp_path / "run", [conditions(), step(10)])], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert set(re.findall(r"https?://[^\s\"'<>]*", text)) == {
        "http://www.w3.org/2000/svg",  # a name, not a place
        "https://github.com/leeoniya/uPlot",  # in a comment
    }
    assert not re.search(r"@import|url\(|<link(?! rel=\"icon\" href=\"data:)|<img|<iframe|src=", text)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert "default-src 'none'" in policy[1]
    for name, body in (("style", r"<style>(.*?)</style>"), ("script", r"<script>(.*?)</script>")):
        found = re.search(body, text, re.DOTALL)
        assert found
        digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy[1]


HOSTILE = "<!--<script>\u2028&lt;\ud800$style ${data} </SCRIPT ><script>alert(1)</script>"


def test_no_string_gets_out_of_its_json(tmp_path: Path) -> None:
    # A folder's name holds no slash, but runs of the same name are distinguished by the path before it.
    inner = Path("script><script>alert(1)<") / "script>"
    start = conditions(recipe=HOSTILE, compressor=HOSTILE, nested={HOSTILE: [HOSTILE]})
    run = write(tmp_path / "<" / inner, [start, step(10)])
    out = tmp_path / "page.html"
    report.write([run, write(tmp_path / "other" / inner, [conditions()])], out)
    text = out.read_text(encoding="utf-8")
    assert text.count("<script") == 2
    assert text.lower().count("</script") == 2
    assert "alert(1)<" not in text
    first, _ = embedded(out)["runs"]
    assert first["name"] == "</script><script>alert(1)</script>"
    assert first["summary"]["recipe"] == HOSTILE
    assert [f"nested.{HOSTILE}", json.dumps([HOSTILE], ensure_ascii=False)] in first["config"]


ERRORS = {
    "": "no run given, expected folders with a metrics.jsonl",
    "nowhere": "there is no run nowhere, expected a folder with a metrics.jsonl, or that file itself",
    "folder": "folder is not a run: it has no metrics.jsonl",
    "empty": "metrics.jsonl is empty, expected JSON lines",
    "damaged": "metrics.jsonl:2: not a line of JSON",
    "run run/metrics.jsonl": "is given 2 times",
    "run --out folder": "--out folder is a folder, expected a file: try --out folder/report.html",
    "run --out nowhere/page.html": "--out nowhere/page.html: there is no folder nowhere; create it",
    "run --out run/metrics.jsonl": "is a run's own record",
    "run --out " + "x" * 300: "File name too long",
}


def test_errors_are_one_line_and_leave_the_old_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, out = write(tmp_path / "run", [conditions(), step(10)]), tmp_path / "report.html"
    write(tmp_path / "empty", [])
    write(tmp_path / "damaged", [conditions()], cut='{"kind"\n{"kind": "end"}\n')
    (tmp_path / "folder").mkdir()
    out.write_text("an older one")
    before = sorted(tmp_path.iterdir())
    for words, message in ERRORS.items():
        assert cli.main(["report", *words.split()]) == 2, words
        shown, err = capsys.readouterr()
        assert (shown, err.count("\n")) == ("", 1), words
        assert err.startswith("thinwire report: error: "), words
        assert message in err

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"cannot write .*report\.html: No space left on device; give another place"):
        report.write([run], out)
    assert out.read_text() == "an older one"
    assert sorted(tmp_path.iterdir()) == before
