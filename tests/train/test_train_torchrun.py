"""Ranks that torchrun has started: on one machine, on two without a common disk, and when something is wrong."""

import os
import shutil
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_train_faults import BUG
from training_runs import (
    SMALL,
    TORCHRUN,
    Done,
    Job,
    arguments,
    assert_one_line,
    assert_same_weights,
    changed,
    checkpoints,
    cores,
    has_logged,
    lines,
    logged_steps,
    newest,
    planted,
    run,
    train,
)

from ranks import Ranks

RUN = Path("run")
CONFIG = changed(SMALL, out=RUN, steps=20)
GO_ON = ("--out", "run", "--resume", "auto")
THREADS = {"OMP_NUM_THREADS": str(max(1, cores() // 2))}
"""As many as the command gives two workers; torchrun says 1."""


def program(*options: str) -> tuple[str, ...]:
    return (*TORCHRUN, *options, "-m", "thinwire", "train")


def on_one_machine(cwd: Path, *given: str, **more: str) -> Job:
    how = program("--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    return Job(cwd, *given, program=how, **THREADS, **more)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that started its own workers, and never stopped."""
    cwd = tmp_path_factory.mktemp("whole")
    assert train(ranks, 2, CONFIG, cwd).finished
    return cwd / RUN


def test_told_to_stop_and_gone_on_it_is_the_run_that_started_its_own_workers(
    whole: Path, ranks: Ranks, tmp_path: Path
) -> None:
    long = changed(CONFIG, steps=2000, checkpoint_every=0)
    with on_one_machine(tmp_path, *arguments(long)) as job:
        job.until(has_logged(tmp_path / RUN, 6))
        job.process.send_signal(signal.SIGTERM)
        done = job.end()
    step = logged_steps(tmp_path / RUN)[-1]
    assert f"stopped at step {step}, checkpoint written; go on with: thinwire train {' '.join(GO_ON)}\n" in done.out
    assert checkpoints(tmp_path / RUN) == [step]
    assert "thinwire train: error" not in done.err
    assert done.code != 0
    with on_one_machine(tmp_path, *GO_ON, "--steps", str(step + 3)) as job:
        done = job.end()
    assert done.code == 0, done.err
    assert f"{step + 3} steps, 2 workers" in done.out
    assert done.out.count("run run, report run/report.html") == 1
    assert logged_steps(tmp_path / RUN) == list(range(1, step + 4))


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


def test_machines_without_a_common_disk_keep_their_own_ranks(whole: Path, tmp_path: Path) -> None:
    """And a resume finds them: each machine has what it needs of its ranks, and the weights."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    first, second = on_two_machines(here, there, *arguments(CONFIG))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert_same_weights(here / RUN, whole)
    assert (first.out.count("20 steps, 2 workers"), second.out) == (1, "")
    for machine, rank in ((here, 0), (there, 1)):
        assert checkpoints(machine / RUN) == [15, 20]
        files = {path.name for path in newest(machine / RUN).iterdir()}
        assert files == {"manifest.json", "model.pt", f"rank{rank}.pt"}
        shutil.rmtree(newest(machine / RUN))
    (here / RUN / "weights.pt").unlink()
    first, second = on_two_machines(here, there, *GO_ON)  # the second machine has no config to take options from
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "going on from step 15" in first.err
    assert_same_weights(here / RUN, whole)
    assert logged_steps(here / RUN) == list(range(1, 21))
    assert checkpoints(there / RUN) == [15, 20]


def test_a_bug_shows_one_traceback_and_its_rank(tmp_path: Path) -> None:
    """torchrun adds its own, which is about processes that ended, not about the bug."""
    with on_one_machine(tmp_path, *arguments(CONFIG), **planted(tmp_path / "fault", BUG)) as job:
        done = job.end()
    assert done.code != 0
    assert done.err.count("RuntimeError: a bug of ours") == 1, done.err
    assert done.err.count("thinwire train: error: ") == 1, done.err
    assert "thinwire train: error: rank 1 of 2: a bug of ours\n" in done.err
    assert done.err.count("in learn\n") <= 1
    assert "peer" not in done.err, "what the other rank saw of it is not told"


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    """torchrun says which; the other ends by itself with one line at most, and no traceback of ours."""
    with on_one_machine(tmp_path, *arguments(changed(CONFIG, steps=100_000))) as job:
        job.until(has_logged(tmp_path / RUN, 8))
        victims = [pid for pid in job.group() if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
        assert len(victims) == 1
        os.kill(victims[0], signal.SIGKILL)
        done = job.end()
    assert done.code != 0
    assert done.err.count("thinwire train: error: ") <= 1, done.err
    assert "SIGKILL" in done.err or "-9" in done.err
    assert checkpoints(tmp_path / RUN)


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({"MASTER_PORT": ""}, ["in use"]),
        ({"RANK": "one"}, ["RANK"]),
        ({"RANK": "5"}, ["RANK"]),
    ],
    ids=["port in use", "rank is a word", "rank is too high"],
)
def test_wrong_variables_are_one_line(more: dict[str, str], parts: list[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **more, "MASTER_PORT": port}
        done = run(tmp_path, *arguments(CONFIG), **variables)
    assert done.code == 2
    assert done.err.count("\n") == 1, done.err
    assert_one_line(done, "thinwire train: error: ", *(parts if "RANK" in more else [*parts, f"127.0.0.1:{port}"]))
    assert not (tmp_path / RUN).exists()


def test_nothing_of_the_variables_is_needed_by_a_world_of_one(ranks: Ranks, tmp_path: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run(tmp_path, *arguments(changed(CONFIG, steps=3)), **variables)
    assert done.code == 0, done.err
    assert [line["bytes_sent"] for line in lines(tmp_path / RUN, "step")] == [0, 0, 0]
