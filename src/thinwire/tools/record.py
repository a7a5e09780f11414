"""JSON lines with their conditions: what benchmarks and trainings write, and what tables and reports are made from.

Each line is an object with a "kind". The first is of kind "conditions"; what follows was measured under them, until the
next line of that kind: files of several runs can simply be joined.
"""

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from thinwire import __version__

Line = dict[str, Any]


def conditions(**more: object) -> Line:
    """What a measurement depends on besides the code: versions, machine, threads; `more` adds a benchmark's own."""
    import torch  # here, so that reading a record does not load it

    from thinwire import kernels

    return {
        "kind": "conditions",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "thinwire": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "kernels": os.environ.get(kernels.ENVIRONMENT_VARIABLE) or "default",
        **more,
    }


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name; some systems tell no more than the architecture."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Writer:
    """Writes each line as it comes, so that a run that ends early leaves what it had. Without a path: nowhere.

    >>> with Writer(None) as writer:
    ...     writer.write({"kind": "row"})
    """

    def __init__(self, path: str | Path | None, append: bool = False) -> None:
        self._file = None if path is None else open(path, "a" if append else "w", encoding="utf-8")  # noqa: SIM115

    def write(self, line: Mapping[str, object]) -> None:
        if self._file is not None:
            json.dump(line, self._file, allow_nan=False)
            self._file.write("\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(path: str | Path) -> Iterator[Line]:
    """Every line after the conditions, with those that it was measured under as "conditions"."""
    current: Line | None = None
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not a line of JSON: {error}") from None
            if not isinstance(line, dict) or "kind" not in line:
                raise ValueError(f"{path}:{number}: expected an object with a kind, given {text.strip()[:80]}")
            if line["kind"] == "conditions":
                current = line
            elif current is None:
                raise ValueError(f"{path}:{number}: a line of kind {line['kind']!r} before any conditions")
            else:
                yield {**line, "conditions": current}
