"""Trainings for tests: the command as a user starts it, and its ranks in processes that are kept.

    job = Job(tmp_path, "--out", "run", *SMALL)   # the installed command; job.until(...), job.end()
    train(ranks, 2, config)                       # the same training by ranks of the pool: no time to load torch

Both give the same weights, so that what a killed command goes on to is compared with a run of the pool.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch

from support.loaded import Copy, start_command
from support.oracle import same_bits
from support.processes import living
from thinwire.testing import RankPool
from thinwire.tools.files import replace_text
from thinwire.tools.record import cores
from thinwire.tools.train.config import FILE_ONLY, Config
from thinwire.tools.train.rank import Rank

COMMAND = str(Path(sys.executable).with_name("thinwire"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LIMIT = 120.0
"""Seconds that any wait may take; on a machine with time for us they are a few."""

SMALL = Config(
    model="cnn:width=8,size=8", batch=8, steps=30, warmup_steps=5, log_every=1, eval_every=0, checkpoint_every=5,
    log_to=("none",), device="cpu",
)  # fmt: skip
"""A training of a second. Its warm-up is over soon, so that most checkpoints have residuals."""
PARAMETERS = 10_442


_FILES = tempfile.TemporaryDirectory()


def arguments(config: Config) -> list[str]:
    """The command line for a config: what it has other than the defaults. What has no option is in a file."""
    made: list[str] = []
    in_file: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default and field.name in FILE_ONLY:
            in_file[field.name] = value
        elif value != field.default:
            words = [] if value is True else value if isinstance(value, tuple) else [value]
            made += [f"--{field.name.replace('_', '-')}", *map(str, words)]
    if in_file:
        path = Path(_FILES.name) / f"{'-'.join(f'{name}-{value}' for name, value in in_file.items())}.json"
        replace_text(path, json.dumps(in_file))  # whole at any time: a command that was started before may read it
        made += ["--config", str(path)]
    return made


def environment(**more: str) -> dict[str, str]:
    """Without what pytest, or whoever started it, may have set for ranks."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLUMNS")
    return {**{name: value for name, value in os.environ.items() if name not in hidden}, **more}


class Breakage(Protocol):
    """What `training_faults` has."""

    def install(self, patch: Callable[[Any, str, Any], object]) -> None: ...


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Job:
    """The command, or what starts it, in a session of its own; output goes to files that can be read meanwhile.

    program   in place of `thinwire train`, which a copy of a loaded process runs.
    """

    def __init__(self, cwd: Path, *given: str, program: tuple[str, ...] | None = None, **more: str) -> None:
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._out, self._err = cwd / f".out-{mark}", cwd / f".err-{mark}"
        self._mark = f"THINWIRE_TEST_JOB={mark}".encode()
        more["THINWIRE_TEST_JOB"] = mark
        self.process: subprocess.Popen[bytes] | Copy
        if program is None:
            self.process = start_command(
                "train", *given, out=self._out, err=self._err, cwd=cwd, environment=environment(**more)
            )
            return
        with open(self._out, "w") as out, open(self._err, "w") as err:
            self.process = subprocess.Popen(
                [*program, *given], cwd=cwd, env=environment(**more), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip

    @property
    def err(self) -> str:
        return self._err.read_text()

    def until(self, condition: Callable[[], object], limit: float = LIMIT) -> None:
        """Wait for it; what the job wrote is in the error if it ended before, or took too long."""
        deadline = time.monotonic() + limit
        while not condition():
            ended = self.process.poll() is not None
            assert not ended, f"ended with {self.process.returncode} before:\n{self._out.read_text()}\n{self.err}"
            assert time.monotonic() < deadline, f"not within {limit} s:\n{self._out.read_text()}\n{self.err}"
            time.sleep(0.002)

    def end(self, limit: float = LIMIT) -> Done:
        """Its exit code and output. No process of it may be left."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not end within {limit} s:\n{self._out.read_text()}\n{self.err}") from None
        wait_until_gone(self.group)
        return Done(code, self._out.read_text(), self.err)

    def kill(self) -> None:
        """All of it at once, as when a machine is switched off."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in self.group():  # torchrun starts its ranks in groups of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(LIMIT)
        wait_until_gone(self.group)

    def group(self) -> list[int]:
        """The ids of its processes, by session or a mark in their environment. On Linux; elsewhere it is empty."""
        return [pid for pid, session in living() if session == self.process.pid or _has_set(pid, self._mark)]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None or self.group():
            self.kill()


def _has_set(pid: int, variable: bytes) -> bool:
    """Whether the environment of a process had this when it started."""
    try:
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False


def wait_until_gone(left: Callable[[], list[int]], limit: float = LIMIT) -> None:
    """Wait for processes to end. A server of ranks that is still loading torch does so only afterwards."""
    deadline = time.monotonic() + limit
    while pids := left():
        assert time.monotonic() < deadline, f"left behind: {pids}"
        time.sleep(0.01)


def run(cwd: Path, *given: str, program: tuple[str, ...] | None = None, **more: str) -> Done:
    """The command from its start to its end."""
    with Job(cwd, *given, program=program, **more) as job:
        return job.end()


# What a run left.


def lines(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Of metrics.jsonl: all, or those of a kind."""
    read = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in read if kind in (None, line["kind"])]


def logged_steps(folder: Path) -> list[int]:
    return [line["step"] for line in lines(folder, "step")]


def has_logged(folder: Path, step: int) -> Callable[[], bool]:
    """For `Job.until`: whether this step is done. The last line may be half written."""
    path = folder / "metrics.jsonl"
    return lambda: path.exists() and f'"step", "step": {step},' in path.read_text()


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def newest(folder: Path) -> Path:
    return folder / "checkpoints" / f"step-{checkpoints(folder)[-1]:08}"


def sign(path: Path) -> None:
    """Let the manifest of a checkpoint have the size and SHA-256 that this file has now."""
    manifest = json.loads((path.parent / "manifest.json").read_text())
    content = path.read_bytes()
    manifest["files"][path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path.parent / "manifest.json").write_text(json.dumps(manifest))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return loaded


def assert_same_weights(folder: Path, other: Path) -> None:
    """Bit for bit."""
    these, those = weights(folder), weights(other)
    assert these.keys() == those.keys()
    differ = [name for name in these if not same_bits(these[name], those[name])]
    assert not differ, f"{folder} and {other} differ in {differ}"


def assert_one_line(done: Done, *parts: str) -> None:
    """The error is one line with all these parts in it, at the end; before it there may be lines of progress."""
    errors = [line for line in done.err.splitlines() if "error" in line.lower()]
    assert len(errors) == 1, done.err
    assert done.err.splitlines()[-1] == errors[0], done.err
    assert "Traceback" not in done.err
    for part in parts:
        assert part in errors[0], (part, errors[0])


# The same in ranks of the pool.


class Ended(NamedTuple):
    finished: bool | None
    out: str
    err: str
    error: str | None
    """What it raised, if that is an error for the user, in one line."""


def train(ranks: RankPool, world_size: int, config: Config, cwd: Path, fault: Breakage | None = None) -> Ended:
    """A training by the pool; what rank 0 showed. Other ranks must have ended alike.

    fault   an object of `training_faults`.
    """
    ended = ranks.run(train_rank, world_size, config, str(cwd), fault, timeout=LIMIT)
    for rank, one in enumerate(ended):
        assert one.finished == ended[0].finished, ended
        assert one.error == ended[0].error, ended
        assert rank == 0 or (one.out, one.err) == ("", ""), one
    return ended[0]


def train_rank(rank: int, world_size: int, config: Config, cwd: str, fault: Breakage | None) -> Ended:
    torch.set_num_threads(max(1, cores() // world_size))  # as the command does: other numbers may give other bits
    before, finished, error = os.getcwd(), None, None
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        os.chdir(cwd)
        stack.callback(os.chdir, before)
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        if fault is not None:  # until the stack ends: the process is kept for other tests
            fault.install(lambda *patch: stack.enter_context(mock.patch.object(*patch)))
        try:
            finished = Rank(rank, world_size, config).run()
        except (ValueError, OSError) as raised:
            error = str(raised)
    return Ended(finished, out.getvalue(), err.getvalue(), error)


def planted(fault: Breakage) -> dict[str, str]:
    """The environment in which every process of a command that is about to train has this fault."""
    here = Path(__file__).parent
    paths = [str(here / "planted"), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "THINWIRE_TEST_FAULT": pickle.dumps(fault).hex()}


def changed(config: Config, **more: Any) -> Config:
    return dataclasses.replace(config, **more)


def copy_run(source: Path, target: Path) -> Path:
    """To go on with, or damage, without spoiling it for other tests."""
    shutil.copytree(source, target)
    return target
