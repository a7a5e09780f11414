"""`thinwire plan --check`: rows are read strictly, and predicted by ranks that measure themselves here."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.plan_cases import EIGHT, TOPK, case
from thinwire.compressors import compressor
from thinwire.sync.policy import default_compressor
from thinwire.tools import cli, record
from thinwire.tools.plan.costs import Costs
from thinwire.tools.plan.measure import RankCosts, Split, combine
from thinwire.tools.plan.methods import Method, method_of

METHODS = {
    "no communication": 20.0, "dense": 60.0, "fp16 hook": 45.0, "powersgd rank 1": 30.0, f"attach {EIGHT}": 40.0,
    f"thinwire.AdamW {TOPK}": 35.0,
}  # fmt: skip
CONDITIONS = {"model": "gpt", "parameters": 3e5, "batch": 4, "worker_threads": 1, "links": "namespaces"}


def rows(path: Path, edit: Callable[[list[dict[str, Any]]], object] = lambda lines: None) -> Path:
    """A file as `thinwire bench link --out` writes it, of this machine."""
    lines: list[dict[str, Any]] = [record.conditions(**CONDITIONS)]
    for name, ms in METHODS.items():
        row = {"kind": "link", "rate": "1gbit", "world": 2, "method": name, "ms": ms, "ms_mean": ms, "steps": 5}
        lines.append({**row, "bytes_per_step": 0.0 if name == "no communication" else 1e5})
    edit(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rows_are_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By real processes. How near it comes depends on the machine, and is not tested."""
    path, other = rows(tmp_path / "rows.jsonl"), tmp_path / "other.jsonl"
    rows(other, lambda lines: lines[0].update(parameters=1e5))  # another model's
    path.write_text(path.read_text() + other.read_text())
    assert cli.main(["plan", "--check", str(path)]) == 0
    shown = capsys.readouterr().out
    for name, ms in METHODS.items():
        found = re.findall(rf"2  1gbit  {re.escape(name)} +([\d.,]+) +{ms} +[+-][\d.]+% +([\d.]+)", shown)
        assert len(found) == (0 if name in ("no communication", "powersgd rank 1") else 2), shown
        for predicted, _ in found:
            assert 20.0 < float(predicted) < 1000.0, "no less than without communication"
        if name == "dense":
            assert float(found[0][1]) > 2 * float(found[1][1]), "more parameters, more bytes"
    assert re.search(r"^\d of 8 rows within 20%; error of the median row ", shown, re.MULTILINE)
    assert "Not predicted: powersgd rank 1.\n" in shown


def test_methods_of_the_benchmark() -> None:
    assert method_of("dense", 2) == method_of("attach none", 2) == Method("dense")
    assert method_of("bf16", 2) == Method("bf16")
    assert method_of(f"attach {EIGHT}", 4) == Method(f"attach {EIGHT}", compressor(EIGHT))
    assert method_of(f"thinwire.SGD {TOPK}", 64) == Method(f"thinwire.SGD {TOPK}", compressor(TOPK))
    for name in ("powersgd rank 4", "powersgd package", "attach auto", "no communication"):
        assert method_of(name, 2) is None


def test_the_default_compressor_has_its_own_costs() -> None:
    """Its extra time is what its codec does not explain, and the prediction contains it."""
    method = method_of("thinwire.AdamW default", 8)
    assert method == Method("thinwire.AdamW default", default_compressor(8))
    codecs = {default_compressor(8): Costs(1e-9, 1e-9, 1e-9)}
    answer = RankCosts(codecs, Costs(0, 0, 0), Split(0.1, 0.2, 0.1), {method.name: 5e-3})
    speeds, _ = combine([answer], [method], numel=1_000_000, origin="here", crowd=1.0)
    assert speeds.extras == {method.name: pytest.approx(2e-9)}
    given = case(1_000_000, speeds=speeds)
    assert given.seconds(method) - replace(given, speeds=replace(speeds, extras={})).seconds(method) == pytest.approx(
        2e-3
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: lines.clear(), "has no row of a link, expected what `thinwire bench link --out` writes"),
        (lambda lines: lines.pop(0), "before any conditions"),
        (lambda lines: lines.pop(1), 'has no row "no communication" with 2 ranks'),
        (lambda lines: lines.__delitem__(slice(2, None)), "has no row that can be predicted, expected dense"),
        (lambda lines: lines[2].pop("ms"), "ms is None in a row of a link"),
        (lambda lines: lines[2].update(ms="fast"), "ms is 'fast' in a row of a link"),
        (lambda lines: lines[2].update(ms=0.0), "0.0 ms with 2 ranks, expected times above 0"),
        (lambda lines: lines[2].update(ms=10**400), "ms with 2 ranks, expected times above 0"),
        (lambda lines: lines[2].update(world=10**9), "with 1000000000 ranks, expected"),
        (lambda lines: lines[2].update(world=1), "with 1 ranks, expected"),
        (lambda lines: lines[2].update(rate="quick"), "rate 'quick', expected bits per second"),
        (lambda lines: lines[0].pop("model"), "model is None in a row of a link"),
        (lambda lines: lines[0].update(cpu="abacus"), "cores of abacus, this one has"),
        (lambda lines: lines[0].update(cores=4096), "4096 cores"),
        (lambda lines: lines[0].update(links="relay"), "links by a relay, whose own work is not predicted"),
    ],
)
def test_rows_that_cannot_be_predicted_are_one_line(
    edit: Callable[[list[dict[str, Any]]], object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows(tmp_path / "rows.jsonl", edit)
    assert cli.main(["plan", "--check", str(path)]) == 2
    assert_one_line(capsys, message)


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe\x00", "is not text"), (b"{]\n", "not a line of JSON"), (b"[1]\n", "a kind")]
)
def test_files_that_are_something_else(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert cli.main(["plan", "--check", str(path)]) == 2
    assert_one_line(capsys, message)


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        assert cli.main(["plan", "--check", str(path)]) == 2
        assert_one_line(capsys, f"--check {path}: there is no such file, expected one of `bench link --out`")


def assert_one_line(capsys: pytest.CaptureFixture[str], message: str) -> None:
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1, shown.err
    assert shown.err.startswith("thinwire plan: error: ")
    assert message in shown.err
