"""Programs that start at once: copies of a process that has loaded what they import.

    loaded = Loaded("import torch")
    copy = loaded.start("print(torch.__version__)", out=path, err=path)   # like subprocess.Popen
    loaded.run("print(torch.__version__)")                                # what it prints

A fresh interpreter spends several seconds of a core on its imports, a copy some milliseconds. What a program does after
its imports is the same in both, down to the server of ranks that multiprocessing starts: a copy makes it by a fork.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
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


class Copy:
    """A copy that runs a program: what tests use of subprocess.Popen. It leads a session of its own."""

    def __init__(self, loaded: "Loaded", pid: int) -> None:
        self.pid, self._loaded = pid, loaded

    @property
    def returncode(self) -> int | None:
        return self._loaded.codes.get(self.pid)

    def poll(self) -> int | None:
        self._loaded.listen(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("a copy of a loaded process", timeout)
            self._loaded.listen(left)
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
        self.codes: dict[int, int] = {}
        """Exit codes of the copies that have ended, as in subprocess."""
        paths = filter(None, [TESTS, os.environ.get("PYTHONPATH")])
        self._environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.loaded", imports],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._unread = b""
        self._started: list[int] = []

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
        request = {
            "code": textwrap.dedent(code),
            "arguments": arguments,
            "out": str(Path(out).absolute()),
            "err": str(Path(err).absolute()),
            "cwd": str(Path(cwd).absolute()),
            "environment": self._environment if environment is None else environment,
        }
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        deadline = time.monotonic() + 120
        while not self._started:
            assert time.monotonic() < deadline, "no copy was made within 120 s"
            self.listen(deadline - time.monotonic())
        return Copy(self, self._started.pop())

    def run(self, code: str, *, time_limit: float = 120) -> str:
        """What `code` prints in a copy; fails with its output if it fails."""
        with tempfile.NamedTemporaryFile("r") as output:
            with self.start(code, out=output.name, err=output.name) as copy:
                status = copy.wait(time_limit)
            text = output.read()
        assert status == 0, f"exit code {status}\n{text}"
        return text.strip()

    def listen(self, seconds: float) -> None:
        """Read what this process says of its copies, for which it may be waited."""
        if not select.select([self._process.stdout], [], [], max(0.0, seconds))[0]:
            return
        piece = self._process.stdout.read(65536)
        assert piece, "the process of which copies are made has ended"
        *lines, self._unread = (self._unread + piece).split(b"\n")
        for line in lines:
            pid, code = json.loads(line)
            if code is None:
                self._started.append(pid)
            else:
                self.codes[pid] = code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


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


def start_main(module: str, *, out: Path | str, err: Path | str) -> Copy:
    """`main()` of a module of `support`; its output goes to files."""
    return _loaded().start(f"from support.{module} import main; main()", out=out, err=err)


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


def _serve(requests: int, answers: int) -> dict[str, Any]:
    """Make a copy for each request. Return in the copies, with the request; the process itself ends here."""
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    unread = b""
    while True:
        ready = select.select([requests, waking], [], [])[0]
        if waking in ready:
            os.read(waking, 4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    _answer(answers, ended[0], os.waitstatus_to_exitcode(ended[1]))
        if requests not in ready:
            continue
        piece = os.read(requests, 65536)
        if not piece:
            os._exit(0)
        *lines, unread = (unread + piece).split(b"\n")
        for line in lines:
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (waking, woken, requests, answers):
                    os.close(end)
                request: dict[str, Any] = json.loads(line)
                return request
            _answer(answers, pid, None)


def _answer(answers: int, pid: int, code: int | None) -> None:
    os.write(answers, json.dumps([pid, code]).encode() + b"\n")


def _become(request: dict[str, Any]) -> None:
    """What subprocess and a new interpreter do before the program begins."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, path in ((1, request["out"]), (2, request["err"])):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, stream)
        os.close(opened)
    sys.argv = [str(Path(sys.executable).with_name("thinwire")), *request["arguments"]]


def _start_server_of_ranks(path: Any, given: Sequence[Any], kept: Sequence[int]) -> int:
    """In place of multiprocessing.util.spawnv_passfds, which starts an interpreter: a copy that has loaded all.

    The server's loop is that of multiprocessing, in a process that has nothing else open and no handlers of signals.
    """
    code = str(given[-1])
    if "forkserver" not in code:
        return int(_spawn(path, given, kept))
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


def _spawn(path: Any, given: Sequence[Any], kept: Sequence[int]) -> Any:
    return _spawnv_passfds(path, given, kept)


if __name__ == "__main__":
    import atexit
    import gc
    import threading
    import traceback
    import types
    from multiprocessing import util

    exec(sys.argv[1])
    gc.freeze()
    # Nothing may be written by accident to the pipe that the answers go through.
    reading, writing = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    wanted = _serve(reading, writing)
    _become(wanted)
    _spawnv_passfds, util.spawnv_passfds = util.spawnv_passfds, _start_server_of_ranks
    main, status = types.ModuleType("__main__"), 0
    sys.modules["__main__"] = main
    try:
        exec(compile(wanted["code"], "<string>", "exec"), vars(main))
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
