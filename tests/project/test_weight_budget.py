"""budget.toml is checked: by `make lint`, and here what needs ranks."""

from pathlib import Path

from support import budget
from support.bucket_path import traced_step
from support.imports import modules_in_cycles
from thinwire.testing import RankPool


def test_bucket_passes_no_more_files_and_classes_than_budgeted(ranks: RankPool) -> None:
    limits = budget.budget()["bucket"]
    path = ranks.run(traced_step, 2)[0]
    assert {"integrations/ddp.py", "optim/adamw.py"} <= set(path.files), "the trace does not see the step"
    assert len(path.files) <= limits["files"], path.files
    assert len(path.classes) <= limits["classes"], path.classes


def test_what_exceeds_its_limit_is_named_with_both_numbers() -> None:
    weights = {"src": {"sync": 31, "optim": 30}, "bucket": {"files": 3}}
    found = budget.exceeded(weights, {"src": {"sync": 30, "optim": 30, "gone": 1}})
    assert found[0] == "[src] sync: expected at most 30, got 31"
    assert ["[bucket] files" in found[1], "[src] gone" in found[2], len(found)] == [True, True, 3]


def test_import_cycle_is_found(tmp_path: Path) -> None:
    root = tmp_path / "package"
    root.mkdir()
    for name, text in {
        "a": "from . import b",
        "b": "def late():\n    from .a import x",
        "c": "from . import a",
    }.items():
        (root / f"{name}.py").write_text(text)
    assert modules_in_cycles(root) == ["package.a", "package.b", "package.c"]
    (root / "b.py").write_text("import os")
    assert modules_in_cycles(root) == []
