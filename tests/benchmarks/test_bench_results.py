"""`python -m benchmarks results`: the tables of the docs, and tables and a plot of rows that are known."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import main
from benchmarks.results import MARKS

SAMPLES, PARAMETERS = 64, 10_000_000
CONDITIONS = {
    "kind": "conditions", "date": "2026-01-02T03:04:05+00:00", "torch": "2.9", "device": "A GPU", "model": "gpt",
    "config": {"layers": 6, "width": 384}, "parameters": PARAMETERS, "steps": 1000, "warmup_steps": 10,
    "lr": {"adamw": 0.001, "sgd": 0.2}, "simulate": True,
}  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


def conditions(ranks: int, **changed: object) -> dict[str, object]:
    return {**CONDITIONS, "workers": ranks, "batch": SAMPLES // ranks, **changed}


def row(method: str, ranks: int, loss: float | None, reduction: float = 1.0, **changed: object) -> dict[str, object]:
    dense = 2 * (ranks - 1) / ranks * 4 * PARAMETERS * 1000
    values = {
        "kind": "recipe", "method": method, "family": method.split()[0], "seed": 0, "loss": loss, "accuracy": 0.5,
        "bytes_total": dense / reduction, "dense_total": dense,
        "warmup_steps": 0 if method.split(";")[0].endswith((" dense", " fp16 hook")) else 10,
    }  # fmt: skip
    return {**values, **changed}


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in rows))
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Dense at 2 ranks only; the best dense has other betas and another learning rate than most rows."""
    two = [
        row("adamw dense", 2, 1.25),
        row("adamw dense", 2, 1.15, seed=1),
        row("adamw dense;betas=0.9,0.95;lr=5e-4", 2, 1.1),
        row("adamw powersgd rank 4", 2, None, 50.0),
        row("adamw thinwire", 2, 1.08, 80.0),
        row("adamw thinwire", 2, 1.05, 80.0, seed=1),
        row("adamw thinwire", 2, 1.09, 80.0, seed=1),
    ]
    warmup = [conditions(2, warmup_steps=100), row("adamw thinwire", 2, 1.0, 30.0, warmup_steps=100)]
    others = [line for more in ({"steps": 500}, {"bf16": True}) for line in (conditions(2, **more), *two)]
    eight = [row("adamw thinwire;lr=0.003", 8, 1.21, 40.0), row("adamw thinwire;lr=1e-3", 8, 1.32, 40.0)]
    return [
        write(tmp_path / "recipe-2.jsonl", conditions(2), *two, row("sgd dense", 2, 1.3), *warmup),
        write(tmp_path / "recipe-8.jsonl", conditions(8), *eight, *others),
    ]


def results(*arguments: object) -> int:
    return main(["results", *map(str, arguments)])


def table(text: str) -> dict[str, list[str]]:
    """The cells of each line, by method and ranks."""
    lines = [[cell.strip(" *") for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("|")]
    return {f"{method}, {ranks}": cells for method, ranks, *cells in lines}


def test_cells_have_loss_and_both_differences_and_what_differs_is_not_compared(
    files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Other rows are those of docs/training.md: see the last test."""
    assert results(*files) == 0
    text = capsys.readouterr().out
    first, *_ = text.split("Rows:")
    cells = table(first)
    assert cells[", ranks"] == ["lr 0.0005", "lr 0.001", "lr 0.003", "seeds", "reduction"]
    # Dense stands for 8 ranks too: the mean of seeds 1.25 and 1.15.
    assert cells["adamw dense, any"] == ["", "1.200", "", "2", "1.0x"]
    assert cells["adamw dense; betas=0.9,0.95, any"][:2] == ["1.100", ""]
    assert cells["adamw powersgd rank 4, 2"] == ["", "diverged", "", "1", "50x"]
    # A seed that ran twice counts once: (1.08 + (1.05 + 1.09) / 2) / 2.
    assert cells["adamw thinwire, 2"] == ["", "1.075 (-10.4 % / -2.3 %)", "", "2", "80x"]
    assert cells["adamw thinwire, 8"] == ["", "1.320 (+10.0 % / +20.0 %)", "1.210 (- / +10.0 %)", "1", "40x"]
    assert cells["adamw thinwire; warm-up 100, 2"][1] == "1.000 (-16.7 % / -9.1 %)"
    assert "| **adamw thinwire** |" in text
    assert text.count("the best dense of all (1.100: betas=0.9,0.95; lr 0.0005)") == 3
    assert text.count("the best dense of all (1.300: lr 0.2)") == 1
    assert text.count("gpt (layers=6, width=384) in bfloat16, 10 M parameters") == 1
    assert "gpt (layers=6, width=384), 10 M parameters, adamw, 1,000 steps of 64 samples: validation loss" in text
    assert "(40,000 MB with 2 ranks, 70,000 MB with 8 ranks)" in text


def test_the_plot_has_every_method_over_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, curve = tmp_path / "loss.svg", {"losses": [[500, 1.5], [1000, 1.2]], "times": [40.0, 83.0]}
    rows = [row("adamw dense", 2, 1.2, **curve), row("adamw thinwire", 2, 1.1, 80.0, **{**curve, "times": [4.0, 9.0]})]
    path = write(tmp_path / "rows.jsonl", conditions(2, link="1gbit"), *rows)
    assert results(path, "--plot", plot) == 0
    texts = [str(text.text) for text in ElementTree.parse(plot).iter(f"{SVG}text")]
    assert "gpt, 10 M parameters, 2 ranks behind links of 1gbit, 1,000 steps" in texts
    assert {"adamw dense: 1.20 after 83 s", "adamw thinwire: 1.20 after 9 s", "seconds of training"} < set(texts)
    first = plot.read_bytes()
    assert results(path, "--plot", plot) == 0
    assert plot.read_bytes() == first, "a second time changes nothing"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert results(path, "--plot", plot) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


RECIPE = "expected what python -m benchmarks recipe --out wrote"
ONE = row("adamw thinwire", 2, 1.1, 80.0)


BROKEN: list[tuple[list[dict[str, Any]], str]] = [
    ([ONE], "rows.jsonl:1: a line of kind 'recipe' before any conditions"),
    ([{"kind": "conditions", "model": "gpt"}, ONE], f"conditions without config, {RECIPE}"),
    ([conditions(2), {"kind": "recipe", "method": "adamw dense"}], f"a row without family, {RECIPE}"),
    ([conditions(2), ONE, {"kind": "prototype"}], f"a line of kind 'prototype', {RECIPE}"),
    (
        [conditions(2), ONE],
        "no training by 'adamw dense' that ended in a number, for gpt (layers=6, width=384), 1000 steps of 64 "
        "samples, to compare with: adamw thinwire; add its file, or run python -m benchmarks recipe",
    ),
    ([conditions(2), ONE, row("adamw dense", 2, None)], "no training by 'adamw dense' that ended in a number"),
    (
        [conditions(2), row("adamw dense;lr=high", 2, 1.0)],
        "learning rate 'high' of 'adamw dense;lr=high', expected a",
    ),
]


def test_broken_rows_are_one_line(files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for lines, message in BROKEN:
        assert results(write(tmp_path / "rows.jsonl", *lines)) == 2, message
        error = capsys.readouterr().err
        assert [message in error, "rows.jsonl" in error, error.count("\n")] == [True, True, 1], (message, error)
    for lines in ([], [conditions(2)]):
        assert results(*files, write(tmp_path / "empty.jsonl", *lines)) == 2
        assert f"empty.jsonl: no rows, {RECIPE}" in capsys.readouterr().err
    link = write(tmp_path / "link.jsonl", {"kind": "conditions"}, {"kind": "link"})
    for arguments, message in (
        ((link,), f"has rows of recipe, {link} rows of link, expected one: call it twice"),
        (("--plot", tmp_path / "p.svg"), "expected rows of recipe --link, which have times"),
    ):
        assert results(*files, *arguments) == 2
        assert message in capsys.readouterr().err


def test_the_tables_of_the_docs_are_those_of_the_rows_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command below them writes them again, byte for byte, and leaves the rest of the page as it is."""
    root = Path(__file__).parents[2]
    monkeypatch.chdir(tmp_path)
    assert results() == 2
    assert "no file benchmarks/results/link-gpt-*.jsonl here" in capsys.readouterr().err
    shutil.copytree(root / "benchmarks" / "results", "benchmarks/results")
    Path("docs").mkdir()
    for page, (begin, end) in (("links", MARKS["link"]), ("training", MARKS["recipe"])):
        path, written = Path("docs", f"{page}.md"), (root / "docs" / f"{page}.md").read_text()
        command = re.findall(r"^Tables are written by `python -m benchmarks (.*)`\.$", written, re.MULTILINE)
        before, after = written.partition(begin)[0], written.partition(end)[2]
        path.write_text(f"{before}{begin}\nold\n{end}{after}")
        assert main(command[0].split()) == 0
        assert path.read_text() == written
        path.write_text(text := f"{end}\n{begin}\n")
        assert main(command[0].split()) == 2
        assert f"has no line {begin}" in capsys.readouterr().err
        assert path.read_text() == text
