"""`thinwire bench results`: tables and a plot of rows that are known."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from thinwire.tools import cli
from thinwire.tools.bench.results import MARKS

CONDITIONS = {
    "kind": "conditions", "date": "2026-01-02T03:04:05+00:00", "torch": "2.9", "cpu": "A CPU", "cores": 2,
    "load_average": 0.25, "model": "gpt", "parameters": 7.35e6, "batch": 32, "links": "namespaces",
    "worker_threads": 1, "command": "thinwire bench link --worlds 2 4",
}  # fmt: skip
TIMES = {"no communication": (30, 20), "dense": (2500, 60), "a <hook>": (1250, 80), "thinwire.AdamW topk": (50, 40)}
RATES = ("100mbit", "10gbit")
BEGIN, END = MARKS["link"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Of two worlds; dense sends 29 MB, the reduction of the others is their speed-up at the slow rate."""
    lines: list[dict[str, object]] = [CONDITIONS]
    for world in (4, 2):
        for column, rate in enumerate(RATES):
            for method, times in TIMES.items():
                sent = 6 if method == "no communication" else 29e6 * times[0] / 2500
                ms = times[column] * world / 2
                lines.append(
                    {"kind": "link", "rate": rate, "world": world, "method": method, "ms": ms, "bytes_per_step": sent}
                )
    path = tmp_path / "link-gpt.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    return path


def test_the_tables_stand_between_the_marks(rows: Path, readme: Path) -> None:
    folder = readme.parent / "docs"
    folder.mkdir()
    arguments = ["bench", "results", str(rows), "--readme", str(readme), "--plot", str(folder / "plot.svg")]
    assert cli.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"\n{END}\nafter\n")
    assert "old" not in text
    assert text.index("**2 ranks**") < text.index("**4 ranks**")
    two = text.split("**2 ranks**")[1].split("**4 ranks**")[0]
    assert "| no communication | 30 | 20 | 0.000 |  |" in two
    assert "| dense | 2,500 | 60 | 29.000 |  |" in two
    assert "| a <hook> | 1,250 (2.0x) | 80 (0.75x) | 14.500 | 2.0x |" in two
    assert "| **thinwire.AdamW topk** | 50 (50x) | 40 (1.5x) | 0.580 | 50x |" in two
    assert "](docs/plot.svg)" in text
    assert "A CPU, 2 cores, 1 thread for each rank, torch 2.9, gloo, 2026-01-02, load 0.2 at the start" in text
    assert "[link-gpt.jsonl](link-gpt.jsonl), made by `thinwire bench link --worlds 2 4`" in text
    assert f"`thinwire {' '.join(arguments)}`" in text
    assert cli.main(arguments) == 0
    assert readme.read_text() == text, "a second time changes nothing"


def test_the_plot_has_a_panel_for_each_world_and_a_line_for_each_method(rows: Path, tmp_path: Path) -> None:
    assert cli.main(["bench", "results", str(rows), "--plot", str(tmp_path / "plot.svg")]) == 0
    texts = [str(text.text) for text in ElementTree.parse(tmp_path / "plot.svg").iter(f"{SVG}text")]
    assert [text for text in texts if "ranks, gpt" in text] == [
        f"{world} ranks, gpt, 7.35 M parameters" for world in (2, 4)
    ]
    assert all(texts.count(method) == 1 for method in TIMES)
    assert all(texts.count(rate) == 2 for rate in RATES)


def test_the_default_is_what_the_repository_keeps(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "results"]) == 2
    assert "no file benchmarks/results/link-*.jsonl here" in capsys.readouterr().err
    Path("benchmarks/results").mkdir(parents=True)
    rows.rename("benchmarks/results/link-gpt.jsonl")
    assert cli.main(["bench", "results"]) == 0
    assert "[benchmarks/results/link-gpt.jsonl](benchmarks/results/link-gpt.jsonl)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no rows"),
        (json.dumps(CONDITIONS), "no rows"),
        ("{}", "expected an object with a kind"),
        (json.dumps(CONDITIONS) + '\n{"kind": "codec"}', "a line of kind 'codec', expected what thinwire bench link"),
        ('{"kind": "conditions"}\n{"kind": "link"}', "conditions without model, expected what thinwire bench link"),
    ],
)
def test_other_files_are_one_line(content: str, message: str, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows.write_text(content)
    assert cli.main(["bench", "results", str(rows)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_readme_without_marks_stays_as_it_is(rows: Path, readme: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme.write_text(f"{END}\n{BEGIN}\n")
    plot = readme.with_name("plot.svg")
    assert cli.main(["bench", "results", str(rows), "--readme", str(readme), "--plot", str(plot)]) == 2
    assert f"has no line {BEGIN}" in capsys.readouterr().err
    assert readme.read_text() == f"{END}\n{BEGIN}\n"
    assert not plot.exists()
