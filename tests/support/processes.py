"""Fresh interpreters, for what depends on how a process starts."""

import json
import os
import select
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Self

TESTS = str(Path(__file__).parents[1])


def run_python(code: str, *arguments: str, time_limit: float = 120, quiet: bool = False, **environment: str) -> str:
    """What `code` prints in a process of its own; fails with its output if it fails, or if `quiet`, writes to stderr.

    A PYTHONPATH that is given comes before this process's own: the same thinwire is tested there as here.

    >>> run_python("print(1 + 1)")
    '2'
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env=_environment(environment),
        capture_output=True,
        text=True,
        timeout=time_limit,
        check=False,
    )
    output = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    assert not (quiet and done.stderr), output
    return done.stdout.strip()


_COPY = """
import json, os, signal, sys, traceback
exec(sys.argv[1])
print("loaded", flush=True)
for line in sys.stdin:
    code, path, seconds = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(seconds)  # ends it
        written, failed = os.open(path, os.O_WRONLY | os.O_APPEND), 1
        for stream in (1, 2):
            os.dup2(written, stream)
        try:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
            failed = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Copies:
    """A process that has run `imports`. Codes run in copies of it, without the time that imports take.

    >>> with Copies("import decimal") as copies:
    ...     copies.run("import sys; print('decimal' in sys.modules, 'sys' in globals(), 'code' in globals())")
    'True True False'
    """

    def __init__(self, imports: str, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COPY, imports],
            env=_environment(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def run(self, code: str, *, time_limit: int = 120) -> str:
        """What `code` prints in a copy; fails with its output if it fails."""
        if not self._loaded:
            assert self._answer(time_limit) == "loaded"
            self._loaded = True
        assert self._process.stdin is not None
        with tempfile.NamedTemporaryFile("r") as output:
            self._process.stdin.write(json.dumps([textwrap.dedent(code), output.name, time_limit]).encode() + b"\n")
            status = self._answer(time_limit + 60)
            text = output.read()
        assert status == "0", f"exit code {status}\n{text}"
        return text.strip()

    _loaded = False

    def _answer(self, seconds: float) -> str:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], seconds)[0], f"no answer within {seconds} s"
        return self._process.stdout.readline().decode().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


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
