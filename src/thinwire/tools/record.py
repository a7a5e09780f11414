"""JSON lines with their conditions. Benchmarks and trainings write them; tables and reports read them.

Each line is an object with a "kind". The first line has the kind "conditions". The lines after it were measured under
these conditions, until the next line of that kind. So the files of several runs can be concatenated.
"""

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from thinwire import __version__

Line = dict[str, Any]


def conditions(**more: object) -> Line:
    """Return what a measurement depends on besides the code: versions, machine, threads.

    more   further conditions, of the benchmark itself.
    """
    import torch  # imported here, so that reading a record does not import it

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
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """Return the name of the CPU, or only the architecture on systems that do not give a name."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Writer:
    """Writes JSON lines to a file, or nowhere if the path is None.

    Each line is flushed at once, so that a run that ends early keeps its lines.

    >>> with Writer(None) as writer:
    ...     writer.write({"kind": "row"})
    """

    def __init__(self, path: str | Path | None, append: bool = False) -> None:
        self._file = None if path is None else open(path, "a" if append else "w", encoding="utf-8")  # noqa: SIM115

    def write(self, line: Mapping[str, object]) -> None:
        """Write one line and flush it; raise ValueError if a number is not finite."""
        if self._file is not None:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")  # the whole line, or nothing of it
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_lines(path: str | Path, *, may_be_cut_off: bool = False) -> Iterator[tuple[int, Line]]:
    """Yield the number and the content of every line.

    may_be_cut_off   whether to leave out a damaged last line without a newline, of a run that was killed.

    Raises ValueError if the file is not text, or a line is not a JSON object with a kind.
    """
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        for number, text in enumerate(file, 1):
            try:
                yield number, _parse(text, f"{path}:{number}")
            except ValueError:
                if may_be_cut_off and not text.endswith("\n"):
                    return
                raise


def _parse(text: str, where: str) -> Line:
    if not text.isprintable() and any("\udc80" <= character <= "\udcff" for character in text):
        raise ValueError(f"{where} is not text")
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits, and of deep nesting
        raise ValueError(f"{where}: not a line of JSON ({error}): remove the line to skip it") from None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        raise ValueError(f"{where}: expected an object with a kind, given {text.strip()[:80]}")
    return line
