"""Fresh interpreters, for what depends on how a process starts."""

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

TESTS = str(Path(__file__).parents[1])


def run_python(code: str, *arguments: str, time_limit: float = 120, quiet: bool = False, **environment: str) -> str:
    """What `code` prints in a process of its own; fails with its output if it fails, or if `quiet`, writes to stderr.

    A PYTHONPATH that is given comes before this process's own: the same thinwire is tested there as here.

    >>> run_python("print(1 + 1)")
    '2'
    """
    command, env = [sys.executable, "-c", textwrap.dedent(code), *arguments], _environment(environment)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=time_limit, check=False)
    output = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    assert not (quiet and done.stderr), output
    return done.stdout.strip()


def finish(*command: str | Path, cwd: Path | None = None, limit: float = 240, **environment: str) -> str:
    """Standard output of a command; its exit code must be 0."""
    words, env = list(map(str, command)), {**os.environ, **environment}
    done = subprocess.run(words, capture_output=True, text=True, timeout=limit, cwd=cwd, env=env)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def living() -> Iterator[tuple[int, int]]:
    """The id and the session of each process that has not ended. On Linux; elsewhere there are none."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if state != "Z":
                yield int(path.parent.name), int(session)


def start_module(name: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of `python -m support.NAME`, with pipes to it."""
    return subprocess.Popen(
        [sys.executable, "-m", f"support.{name}", *map(str, arguments)],
        env=_environment({"PYTHONPATH": TESTS}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_module(name: str, *arguments: object, time_limit: float = 120) -> str:
    """What `python -m support.NAME` prints; fails if it fails, or writes to stderr."""
    with start_module(name, *arguments) as process:
        try:
            out, err = process.communicate(timeout=time_limit)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, ""), f"exit code {process.returncode}\n{out}\n{err}"
    return out.strip()


def _environment(given: dict[str, str]) -> dict[str, str]:
    paths = filter(None, [given.get("PYTHONPATH"), os.environ.get("PYTHONPATH")])
    return {**os.environ, **given, "PYTHONPATH": os.pathsep.join(paths)}
