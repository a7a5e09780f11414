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
    path, good = tmp_path / "rows.jsonl", '{"kind": "conditions"}\n'
    for text, message in {
        f'{good}{{"kind": "row"': ":2: not a line of JSON",
        "[1, 2]\n": ":1: expected an object with a kind",
        '{"ms": 1}\n': ":1: expected an object with a kind",
        f"{'[' * 100_000}\n": ":1: not a line of JSON",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            list(record.read_lines(path))
    path.write_bytes(good.encode() + b"\xff\xfe\n")
    with pytest.raises(ValueError, match=":2 is not text"):
        list(record.read_lines(path))
    path.write_text(f'{good}{{"kind": "row"')
    assert [line for _, line in record.read_lines(path, may_be_cut_off=True)] == [json.loads(good)]
