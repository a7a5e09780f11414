"""Ranks that torchrun has started: on one machine, on two without a common disk, and when something is wrong."""

import re
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.ports import free_port
from support.training_faults import InSteps, SignalToParent
from support.training_runs import (
    SMALL,
    TORCHRUN,
    Done,
    Job,
    arguments,
    assert_one_line,
    assert_same_weights,
    changed,
    checkpoints,
    logged_steps,
    newest,
    planted,
    run,
    train,
)
from thinwire.testing import Kill, RaiseError, RankPool
from thinwire.tools.record import cores
from thinwire.tools.train.config import defaults

RUN = Path("run")
CONFIG = changed(SMALL, out=RUN, steps=20)
GO_ON = ("--out", "run", "--resume", "auto")
THREADS = {"OMP_NUM_THREADS": str(max(1, cores() // 2))}
"""As many as the command gives two ranks; torchrun says 1."""


def program(*options: str) -> tuple[str, ...]:
    return (*TORCHRUN, *options, "-m", "thinwire", "train")


def on_one_machine(cwd: Path, *given: str, **more: str) -> Job:
    how = program("--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    return Job(cwd, *given, program=how, **THREADS, **more)


BUG = RaiseError(rank=1, step=3, error=RuntimeError("a bug of ours"))


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that started its own ranks, and never stopped."""
    cwd = tmp_path_factory.mktemp("whole")
    assert train(ranks, 2, CONFIG, cwd).finished
    return cwd / RUN


@pytest.mark.slow
def test_a_signal_leaves_a_checkpoint(whole: Path, ranks: RankPool, tmp_path: Path) -> None:
    """From which it goes on, whoever starts it, to the same weights."""
    with on_one_machine(tmp_path, *arguments(CONFIG), **planted(InSteps(SignalToParent(rank=1, step=7)))) as job:
        done = job.end()
    step = logged_steps(tmp_path / RUN)[-1]
    assert step in (7, 8), "the step that was under way, or the one after: ranks agree on it"
    assert re.search(
        rf"^stopped at step {step}, checkpoint written; go on with: .*thinwire train .*--resume auto$",
        done.out,
        re.MULTILINE,
    ), done.out
    assert checkpoints(tmp_path / RUN) == [5, step]
    assert "thinwire train: error" not in done.err
    assert done.code != 0
    ended = train(ranks, 2, defaults(["--resume", "auto", "--out", str(tmp_path / RUN)]), tmp_path)
    assert ended.finished, ended
    assert_same_weights(tmp_path / RUN, whole)
    assert logged_steps(tmp_path / RUN) == list(range(1, 21))


def on_two_machines(here: Path, there: Path, *given: str) -> tuple[Done, Done]:
    """Two agents of torchrun, each in a folder of its own."""
    port = free_port()
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(Job(cwd, *given, program=program(*options, "--node-rank", str(number)), **THREADS))
            for number, cwd in enumerate((here, there))
        ]
        first, second = (job.end() for job in jobs)
    return first, second


@pytest.mark.slow
def test_machines_without_a_common_disk_keep_their_own_ranks(whole: Path, tmp_path: Path) -> None:
    """And a resume finds them: each machine has what it needs of its ranks, and the weights."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    first, second = on_two_machines(here, there, *arguments(CONFIG))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert_same_weights(here / RUN, whole)
    assert (first.out.count("default: 20 steps"), second.out) == (1, "")
    assert first.out.count("run run, report run/report.html") == 1
    for machine, rank in ((here, 0), (there, 1)):
        assert checkpoints(machine / RUN) == [15, 20]
        files = {path.name for path in newest(machine / RUN).iterdir()}
        assert files == {"manifest.json", "model.pt", f"rank{rank}.pt"}
        shutil.rmtree(newest(machine / RUN))
    (here / RUN / "weights.pt").unlink()
    first, second = on_two_machines(here, there, *GO_ON)  # the second machine has no config to take options from
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "resuming from step 15" in first.err
    assert_same_weights(here / RUN, whole)
    assert logged_steps(here / RUN) == list(range(1, 21))
    assert checkpoints(there / RUN) == [15, 20]


@pytest.mark.slow
def test_a_bug_shows_one_traceback_and_its_rank(tmp_path: Path) -> None:
    """torchrun adds its own, which is about processes that ended, not about the bug."""
    with on_one_machine(tmp_path, *arguments(CONFIG), **planted(InSteps(BUG))) as job:
        done = job.end()
    assert done.code != 0
    assert done.err.count("RuntimeError: a bug of ours") == 1, done.err
    assert done.err.count("thinwire train: error: ") == 1, done.err
    assert "thinwire train: error: rank 1 of 2: a bug of ours\n" in done.err
    assert done.err.count("in learn\n") <= 1
    assert "peer" not in done.err, "what the other rank saw of it is not printed"


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    """Variables that were set by hand, or by something other than torchrun."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = run(tmp_path, *arguments(CONFIG), **variables)
    assert done.code == 2
    assert done.err.count("\n") == 1, done.err
    assert_one_line(done, "thinwire train: error: ", f"127.0.0.1:{port}", "in use")
    assert not (tmp_path / RUN).exists()


def test_an_error_of_all_ranks_is_printed_once(tmp_path: Path) -> None:
    """Before they have formed a group, in which they could agree who prints it."""
    with on_one_machine(tmp_path, *arguments(CONFIG), "--device", "cuda", CUDA_VISIBLE_DEVICES="") as job:
        done = job.end()
    assert done.code != 0
    assert done.err.count("thinwire train: error: ") == 1, done.err
    assert "--device cuda, but torch finds no CUDA device here" in done.err


def test_if_rank_0_dies_with_the_store_the_other_rank_has_one_line(tmp_path: Path) -> None:
    """Ranks that were started by hand: the store of their group is in rank 0."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    killed = planted(InSteps(Kill(rank=0, step=3)))
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                Job(tmp_path, *arguments(CONFIG), RANK=str(rank), LOCAL_RANK=str(rank), **shared, **own)
            )
            for rank, own in enumerate((killed, {}))
        ]
        first, other = (job.end() for job in jobs)
    assert (first.code, other.code) == (-9, 1)
    lines = [line for line in other.err.splitlines() if line.startswith("thinwire train: error: ")]
    assert len(lines) == 1, other.err
    assert re.match("thinwire train: error: rank 1 of 2: .*(rank 0|peer)", lines[0])
    assert "Traceback" not in other.err
