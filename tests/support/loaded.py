"""Programs that start at once: copies of a process that has loaded what they import.

    loaded = Loaded("import torch")
    copy = loaded.start("print(torch.__version__)", out=path, err=path)   # like subprocess.Popen
    loaded.run("print(torch.__version__)")                                # what it prints

A fresh interpreter spends several seconds of a core on its imports, a copy some milliseconds. What a program does after
its imports is the same in both, down to the server of ranks that multiprocessing starts: a copy makes it by a fork.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from multiprocessing import Pipe, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from thinwire.testing.pool import HOST, loopback_store

TESTS = str(Path(__file__).parents[1])
MODULES = (
    "torch", "torch._dynamo", "torch.nn.parallel", "numpy", "tyro", "rich.console", "rich.progress", "rich.table",
    "thinwire.optim", "thinwire.integrations", "thinwire.kernels.cpu.ready", "thinwire.tools.cli",
    "thinwire.tools.train.command", "thinwire.tools.train.launch", "thinwire.tools.plan", "benchmarks.codec_rows",
    "benchmarks.link_steps", "benchmarks.trainer",
)  # fmt: skip
"""What commands and benchmarks import. Nothing here starts a thread, or a process could not be copied."""
COMMAND = """
import os, pickle, sys
if "THINWIRE_TEST_FAULT" in os.environ:  # as in planted/sitecustomize.py
    pickle.loads(bytes.fromhex(os.environ["THINWIRE_TEST_FAULT"])).install(setattr)
import importlib
sys.exit(importlib.import_module({program!r}).main())
"""

spawn: Any = util.spawnv_passfds


class Copy:
    """A copy that runs a program: what tests use of subprocess.Popen. It leads a session of its own."""

    def __init__(self, line: Connection) -> None:
        assert line.poll(120), "no copy was made within 120 s"
        self._line, self.pid = line, line.recv()
        self.returncode: int | None = None

    def poll(self, seconds: float = 0.0) -> int | None:
        if self.returncode is None and self._line.poll(max(0.0, seconds)):
            self.returncode = self._line.recv()
        return self.returncode

    def wait(self, timeout: float) -> int:
        if (code := self.poll(timeout)) is None:
            raise subprocess.TimeoutExpired("a copy of a loaded process", timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


class Loaded:
    """A process that has run `imports`, and makes copies of itself.

    >>> with Loaded("import decimal") as loaded:
    ...     loaded.run("import sys; print('decimal' in sys.modules, 'sys' in globals(), 'code' in globals())")
    'True True False'
    """

    def __init__(self, imports: str, **environment: str) -> None:
        paths = filter(None, [TESTS, os.environ.get("PYTHONPATH")])
        self._environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.loaded", imports], env=self._environment, stdin=theirs
            )

    def start(
        self,
        code: str,
        *arguments: str,
        out: Path | str,
        err: Path | str,
        cwd: Path | str = ".",
        environment: dict[str, str] | None = None,
    ) -> Copy:
        """Run `code` as the main module of a copy; its output goes to files."""
        for path in (out, err):
            open(path, "ab").close()  # it is there for the caller at once
        out, err, cwd = (str(Path(path).absolute()) for path in (out, err, cwd))
        line, theirs = Pipe()
        with theirs:
            socket.send_fds(self._control, [b"."], [theirs.fileno()])
        line.send((textwrap.dedent(code), arguments, out, err, cwd, environment or self._environment))
        return Copy(line)

    def run(self, code: str, *, time_limit: float = 120) -> str:
        """What `code` prints in a copy; fails with its output if it fails."""
        with tempfile.NamedTemporaryFile("r") as output:
            with self.start(code, out=output.name, err=output.name) as copy:
                status = copy.wait(time_limit)
            text = output.read()
        assert status == 0, f"exit code {status}\n{text}"
        return text.strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._control.close()


@cache
def _loaded() -> Loaded:
    """The process of which commands of thinwire are copies. It ends with this process, whose end of a pipe it reads."""
    return Loaded(f"import {', '.join(MODULES)}")


def start_command(
    *words: str,
    out: Path | str,
    err: Path | str,
    cwd: Path | str = ".",
    environment: dict[str, str] | None = None,
    program: str = "thinwire.tools.cli",
) -> Copy:
    """`thinwire`, or another module with a function `main`, with these words; its output goes to files."""
    code = COMMAND.format(program=program)
    return _loaded().start(code, *words, out=out, err=err, cwd=cwd, environment=environment or dict(os.environ))


def start_function(module: str, name: str, *, out: Path | str, err: Path | str) -> Copy:
    """A function of a module of `support`; its output goes to files."""
    return _loaded().start(f"from support.{module} import {name}; {name}()", out=out, err=err)


def run_command(
    *words: str, timeout: float = 200, program: str = "thinwire.tools.cli"
) -> subprocess.CompletedProcess[str]:
    """`thinwire` with these words, from its start to its end, as by subprocess.run."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        with start_command(*words, out=out.name, err=err.name, program=program) as copy:
            code = copy.wait(timeout)
        return subprocess.CompletedProcess(("thinwire", *words), code, out.read(), err.read())


def run_script(path: Path, *arguments: str, ranks: int = 0, timeout: float = 240) -> str:
    """What a script prints, which must end with 0; with `ranks`, what all of them print, started as by torchrun.

    Deprecated functions are errors.
    """
    code = f"""
        import runpy, sys, warnings
        for kind in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("error", kind)
        sys.argv[0] = {str(path)!r}
        runpy.run_path({str(path)!r}, run_name="__main__")
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # ranks share what cores there are
    with (
        tempfile.NamedTemporaryFile("r") as out,
        tempfile.NamedTemporaryFile("r") as err,
        contextlib.ExitStack() as stack,
    ):
        copies = []
        store = loopback_store(timedelta(seconds=timeout)) if ranks else None
        for rank in range(max(1, ranks)):
            if store is not None:
                environment |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": HOST, "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                }  # fmt: skip
            copy = _loaded().start(code, *arguments, out=out.name, err=err.name, environment=environment)
            copies.append(stack.enter_context(copy))
        for copy in copies:
            assert copy.wait(timeout) == 0, err.read()
        return out.read()


def _serve(control: socket.socket) -> tuple[Any, ...]:
    """Make two copies for each request. One returns with the request, the other one waits for the end of the first.

    The process itself ends here, when the one that asks has ended.
    """
    while True:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
        _, ends, _, _ = socket.recv_fds(control, 1, 1)
        if not ends:
            os._exit(0)
        if os.fork():
            os.close(ends[0])
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        line = Connection(ends[0])
        request: tuple[Any, ...] = line.recv()
        pid = os.fork()
        if not pid:
            line.close()
            control.detach()  # its number is that of the input, which stays open
            return request
        with contextlib.suppress(OSError):
            line.send(pid)
            line.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)


def _become(arguments: Sequence[str], out: str, err: str, cwd: str, environment: dict[str, str]) -> None:
    """What subprocess and a new interpreter do before the program begins."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for stream, opened in (
        (0, os.open(os.devnull, os.O_RDONLY)),
        (1, os.open(out, os.O_WRONLY | os.O_APPEND)),
        (2, os.open(err, os.O_WRONLY | os.O_APPEND)),
    ):
        os.dup2(opened, stream)
        os.close(opened)
    sys.argv = [str(Path(sys.executable).with_name("thinwire")), *arguments]


def _start_server_of_ranks(path: Any, given: Sequence[Any], kept: Sequence[int]) -> int:
    """In place of multiprocessing.util.spawnv_passfds, which starts an interpreter: a copy that has loaded all.

    The server's loop is that of multiprocessing, in a process that has nothing else open and no handlers of signals.
    """
    code = str(given[-1])
    if "forkserver" not in code:
        return spawn(path, given, kept)
    pid = os.fork()
    if pid:
        return pid
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        for opened in map(int, os.listdir("/proc/self/fd")):
            if opened > 2 and opened not in kept:
                with contextlib.suppress(OSError):
                    os.close(opened)
        exec(code, {})
    finally:
        os._exit(1)


if __name__ == "__main__":
    import atexit
    import gc
    import threading
    import traceback
    import types

    exec(sys.argv[1])
    gc.freeze()
    code, *wanted = _serve(socket.socket(fileno=0))
    _become(*wanted)
    util.spawnv_passfds = _start_server_of_ranks
    main, status = types.ModuleType("__main__"), 0
    sys.modules["__main__"] = main
    try:
        exec(compile(code, "<string>", "exec"), vars(main))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    # What an interpreter does at its end, but for tearing down every module, which takes a fifth of a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
