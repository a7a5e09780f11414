"""Records: JSON lines with their conditions."""

import json
from pathlib import Path

import pytest
import torch

import thinwire
from thinwire.tools import record


def test_what_is_written_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what a time depends on."""
    monkeypatch.setenv("THINWIRE_KERNELS", "reference")
    path = tmp_path / "rows.jsonl"
    with record.Writer(path) as writer:
        writer.write(record.conditions(device="cpu"))
        assert len(list(record.read_lines(path))) == 1  # there before the run ends
        writer.write({"kind": "row", "ms": 0.1})
        with pytest.raises(ValueError, match="JSON"):
            writer.write({"kind": "row", "ms": float("nan")})
    with record.Writer(path, append=True) as writer:
        writer.write({"kind": "row", "ms": 0.2})
    (_, conditions), *rows = record.read_lines(path)
    assert [(number, row["ms"]) for number, row in rows] == [(2, 0.1), (3, 0.2)]
    expected = {"torch": torch.__version__, "thinwire": thinwire.__version__, "threads": torch.get_num_threads()}
    expected |= {"kind": "conditions", "kernels": "reference", "device": "cpu"}
    assert {name: conditions[name] for name in expected} == expected
    assert conditions["cores"] >= 1
    assert all(conditions[key] for key in ("date", "python", "platform", "cpu"))


def test_damaged_records_are_refused(tmp_path: Path) -> None:
    """More of them are in the tests of the report, which reads records."""
    path, good = tmp_path / "rows.jsonl", '{"kind": "conditions"}\n'
    for damage, message in ((b"\xff\xfe\n", ":2 is not text"), (b'{"kind": "row"', ":2: not a line of JSON")):
        path.write_bytes(good.encode() + damage)
        with pytest.raises(ValueError, match=message):
            list(record.read_lines(path))
    assert [line for _, line in record.read_lines(path, may_be_cut_off=True)] == [json.loads(good)]
