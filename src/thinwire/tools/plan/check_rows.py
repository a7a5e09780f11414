"""Read and check the rows that `thinwire plan --check` predicts.

The checks are strict, because a prediction from invalid values would look like any other prediction.
"""

from pathlib import Path
from typing import Any

from thinwire.tools.bench.link.settings import parse_rate
from thinwire.tools.record import cores, cpu_model, read

Row = dict[str, Any]

_Kinds = dict[str, type | tuple[type, ...]]
_NUMBER = (int, float)
_FIELDS: _Kinds = {"rate": str, "world": int, "way": str, "ms": _NUMBER, "bytes_per_step": _NUMBER}
CONDITIONS: _Kinds = {
    "model": str, "parameters": _NUMBER, "batch": int, "worker_threads": int, "cores": int, "cpu": str,
}  # fmt: skip
"""Types of the recorded conditions that the time of a step depends on, besides the row itself."""


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file of `thinwire bench link --out`, each with its "conditions".

    Raise ValueError for an unreadable file, for invalid rows, and for rows of a relay or of another machine.
    """
    rows = [row for row in _read(path) if row["kind"] == "link"]
    if not rows:
        raise ValueError(f"--check {path} has no row of a link, expected what `thinwire bench link --out` writes")
    for row in rows:
        _check_row(row, path)
        _check_conditions(row["conditions"], path)
    return rows


def _read(path: Path) -> list[Row]:
    try:
        return list(read(path))
    except UnicodeDecodeError:
        raise ValueError(f"--check {path} is not text, expected what `thinwire bench link --out` writes") from None
    except OSError as error:
        raise ValueError(f"--check {path} cannot be read ({error.strerror}), expected a file of rows") from None
    except ValueError as error:
        raise ValueError(f"--check {error}; expected what `thinwire bench link --out` writes") from None


def _check_row(row: Row, path: Path) -> None:
    for where, expected in ((row, _FIELDS), (row["conditions"], CONDITIONS)):
        for name, kind in expected.items():
            if not isinstance(where.get(name), kind) or isinstance(where.get(name), bool):
                raise ValueError(f"--check {path}: {name} is {where.get(name)!r} in a row of a link; was it changed?")
    if not row["ms"] > 0 or not row["world"] >= 2:
        raise ValueError(f"--check {path}: {row['ms']} ms with {row['world']} ranks, expected times above 0, 2 or more")
    parse_rate(row["rate"])


def _check_conditions(under: Row, path: Path) -> None:
    if under.get("links") == "relay":
        raise ValueError(f"--check {path} is of links by a relay, whose own work is not predicted: leave out --relay")
    here = (cpu_model(), cores())
    if (under["cpu"], under["cores"]) != here:
        raise ValueError(
            f"--check {path} is of a machine with {under['cores']} cores of {under['cpu']}, this one has {here[1]} of "
            f"{here[0]}: its codec cannot be measured here; run both on one machine"
        )
