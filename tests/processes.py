"""Fresh interpreters, for what depends on how a process starts."""

import os
import subprocess
import sys
import textwrap


def run_python(code: str, *, time_limit: float = 120, **environment: str) -> str:
    """What `code` prints in a process of its own; fails with its output if it fails.

    A PYTHONPATH that is given comes before this process's own: the same thinwire is tested there as here.

    >>> run_python("print(1 + 1)")
    '2'
    """
    paths = filter(None, [environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")])
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=time_limit,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()
