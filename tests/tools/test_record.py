"""Records: JSON lines with their conditions."""

from pathlib import Path

import pytest
import torch

import thinwire
from support.processes import run_python
from thinwire.tools import record


def test_conditions_say_what_a_time_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "reference")
    conditions = record.conditions(device="cpu")
    assert conditions["kind"] == "conditions"
    assert conditions["torch"] == torch.__version__
    assert conditions["thinwire"] == thinwire.__version__
    assert conditions["threads"] == torch.get_num_threads()
    assert conditions["kernels"] == "reference"
    assert conditions["device"] == "cpu"
    assert conditions["cores"] >= 1
    assert all(conditions[key] for key in ("date", "python", "platform", "cpu"))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with record.Writer(path) as writer:
        writer.write(record.conditions())
        writer.write({"kind": "row", "ms": 0.1})
        assert len(list(record.read_lines(path))) == 2  # there before the run ends
        writer.write({"kind": "row", "ms": 0.2})
    (_, conditions), *rows = record.read_lines(path)
    assert conditions["torch"] == torch.__version__
    assert rows == [(2, {"kind": "row", "ms": 0.1}), (3, {"kind": "row", "ms": 0.2})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": "conditions"}\n{"kind": "row"', ":2: not a line of JSON"),
        ("[1, 2]\n", ":1: expected an object with a kind"),
        ('{"ms": 1}\n', ":1: expected an object with a kind"),
    ],
)
def test_damaged_records_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        list(record.read_lines(path))


def test_nan_is_not_json(tmp_path: Path) -> None:
    with record.Writer(tmp_path / "rows.jsonl") as writer, pytest.raises(ValueError, match="JSON"):
        writer.write({"kind": "row", "ms": float("nan")})


def test_reading_does_not_load_torch() -> None:
    run_python("import sys, thinwire.tools.record; sys.exit('torch' in sys.modules)")
