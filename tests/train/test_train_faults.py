"""Trainings that are killed, told to stop, or broken: what is told, what is left, and that they go on afterwards.

Every fault is placed by its rank and step, or at what a job was seen to have done: nothing here depends on how fast it
goes. A number that is drawn is printed, so that a failure can be repeated.
"""

import os
import random
import signal
from pathlib import Path

import pytest
from training_runs import (
    LIMIT,
    SMALL,
    Done,
    Job,
    arguments,
    assert_one_line,
    assert_same_weights,
    changed,
    checkpoints,
    has_logged,
    lines,
    logged_steps,
    planted,
    run,
    train,
)

from ranks import Ranks
from thinwire.train.config import Config

RUN = Path("run")
LONG = changed(SMALL, out=RUN, steps=150, checkpoint_every=7)
GO_ON = ("--out", "run", "--resume", "auto")

KILLED_WHILE_WRITING = """
import os, signal
from thinwire.train import checkpoints
write = checkpoints._write_file
def write_half(path, state):
    written = write(path, state)
    if {step} == int(path.parent.name.split("-")[1].split(".")[0]) and path.name == "{name}":
        os.truncate(path, path.stat().st_size // 2)
        os.killpg(0, signal.SIGKILL)
    return written
patch(checkpoints, "_write_file", write_half)
"""
KILLED_BEFORE_ITS_NAME = """
import os, signal
rename = os.rename
def die(old, new):
    if "{step:08}" in os.fspath(new):
        os.killpg(0, signal.SIGKILL)
    rename(old, new)
patch(os, "rename", die)
"""


def draw(low: int, high: int) -> int:
    """A step for a fault, another one each time unless THINWIRE_TEST_SEED is set."""
    seed = int(os.environ.get("THINWIRE_TEST_SEED", random.SystemRandom().randrange(10**6)))
    step = random.Random(seed).randint(low, high)
    print(f"THINWIRE_TEST_SEED={seed}: step {step}")
    return step


def killed_at(step: int, cwd: Path, *given: str) -> None:
    """The whole job, as if its machine was switched off."""
    with Job(cwd, *given) as job:
        job.until(has_logged(cwd / RUN, step))
        job.kill()


def assert_as_if_nothing_was(ranks: Ranks, size: int, config: Config, cwd: Path) -> None:
    """The run is that of the same config which never stopped."""
    assert train(ranks, size, changed(config, out=Path("whole")), cwd).finished
    assert_same_weights(cwd / RUN, cwd / "whole")
    assert logged_steps(cwd / RUN) == list(range(1, config.steps + 1))
    losses = [[line["loss"] for line in lines(cwd / name, "step")] for name in ("run", "whole")]
    assert losses[0] == losses[1]
    assert [line["kind"] for line in lines(cwd / RUN)].count("end") == 1
    assert not list((cwd / RUN / "checkpoints").glob(".*")), "nothing half written is left"


def test_a_job_that_is_killed_again_and_again(ranks: Ranks, tmp_path: Path) -> None:
    """At any step; while a checkpoint is written; before it has its name. Each time it goes on from the last one."""
    killed_at(draw(8, 60), tmp_path, *arguments(LONG))
    assert checkpoints(tmp_path / RUN)
    for number, (fault, file) in enumerate([(KILLED_WHILE_WRITING, "rank1.pt"), (KILLED_BEFORE_ITS_NAME, "")]):
        before = checkpoints(tmp_path / RUN)
        code = fault.format(step=before[-1] + 14, name=file)
        done = run(tmp_path, *GO_ON, **planted(tmp_path / f"fault{number}", code))
        assert done.code == -signal.SIGKILL, done.err
        assert f"going on from step {before[-1]}\n" in done.err
        assert checkpoints(tmp_path / RUN) == [before[-1], before[-1] + 7]
        assert list((tmp_path / RUN / "checkpoints").glob(".*.partial")), "it was killed in the middle"
    ended = train(ranks, 2, Config.defaults(["--resume", "auto", "--out", str(tmp_path / RUN)]), tmp_path)
    assert ended.finished, ended
    assert_as_if_nothing_was(ranks, 2, LONG, tmp_path)


def test_a_worker_that_is_killed_is_named_and_the_others_end(ranks: Ranks, tmp_path: Path) -> None:
    """Three workers. Then the parent is killed, and leaves no worker behind; then the run goes on to its end."""
    config = changed(LONG, workers=3, optimizer="sgd", lr=0.01, steps=100)
    with Job(tmp_path, *arguments(config)) as job:
        job.until(has_logged(tmp_path / RUN, draw(8, 40)))
        victim = job.workers()[1]
        os.kill(victim, signal.SIGKILL)
        done = job.end()
    assert done.code == 1
    assert_one_line(done, "thinwire train: error: rank 1 of 3 was killed by SIGKILL")
    with Job(tmp_path, *GO_ON) as job:
        job.until(has_logged(tmp_path / RUN, checkpoints(tmp_path / RUN)[-1] + 9))
        job.process.kill()
        assert job.end().code == -signal.SIGKILL, "and no worker is left"
    ended = train(ranks, 3, Config.defaults(["--resume", "auto", "--out", str(tmp_path / RUN)]), tmp_path)
    assert ended.finished, ended
    assert_as_if_nothing_was(ranks, 3, config, tmp_path)


def assert_stopped(done: Done, code: int, folder: Path) -> None:
    """With a checkpoint of the very step, and the command that goes on from it."""
    step = logged_steps(folder)[-1]
    assert done.code == code, done.err
    assert done.out.splitlines()[-1] == (
        f"stopped at step {step}, checkpoint written; go on with: thinwire train --out run --resume auto"
    )
    assert checkpoints(folder)[-1] == step < LONG.steps
    assert lines(folder)[-1]["reason"] == "stopped"
    assert "Traceback" not in done.err
    assert "error" not in done.err
    assert not (folder / "weights.pt").exists()


def test_signals_end_a_run_with_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """SIGTERM to the parent alone, as a scheduler sends it; SIGINT to all of them, as a terminal does."""
    config = changed(LONG, compressor="quantize:bits=8", optimizer="sgd", lr=0.01)
    with Job(tmp_path, *arguments(config)) as job:
        job.until(has_logged(tmp_path / RUN, draw(2, 40)))
        job.process.send_signal(signal.SIGTERM)
        done = job.end()
    assert_stopped(done, 128 + signal.SIGTERM, tmp_path / RUN)
    stopped = logged_steps(tmp_path / RUN)[-1]
    with Job(tmp_path, *GO_ON) as job:
        job.until(has_logged(tmp_path / RUN, stopped + 5))
        os.killpg(job.process.pid, signal.SIGINT)
        done = job.end()
    assert_stopped(done, 128 + signal.SIGINT, tmp_path / RUN)
    assert f"going on from step {stopped}\n" in done.err
    ended = train(ranks, 2, Config.defaults(["--resume", "auto", "--out", str(tmp_path / RUN)]), tmp_path)
    assert ended.finished, ended
    assert_as_if_nothing_was(ranks, 2, config, tmp_path)


@pytest.mark.parametrize(("number", "whom"), [(signal.SIGTERM, "parent"), (signal.SIGINT, "all")])
def test_a_signal_while_workers_start_just_ends(number: signal.Signals, whom: str, tmp_path: Path) -> None:
    """Nothing has happened yet, and nothing is shown: no error, and no traceback of a process that was loading."""
    with Job(tmp_path, *arguments(LONG)) as job:
        job.until(lambda: len(job.workers()) == 2)
        (job.process.send_signal if whom == "parent" else lambda n: os.killpg(job.process.pid, n))(number)
        done = job.end()
    assert done.code == 128 + number, done.err
    assert "Traceback" not in done.err
    assert "error" not in done.err


BUG = """
import torch.distributed as dist
from thinwire.train.learner import Learner
learn, steps = Learner.learn, []
def broken(self, *args):
    steps.append(1)
    if dist.get_rank() == 1 and len(steps) == 3:
        raise RuntimeError("a bug of ours")
    learn(self, *args)
patch(Learner, "learn", broken)
"""


def test_a_bug_in_a_worker_shows_one_traceback_and_its_rank(tmp_path: Path) -> None:
    done = run(tmp_path, *arguments(LONG), **planted(tmp_path / "fault", BUG))
    assert done.code == 1
    assert done.err.count("Traceback (most recent call last)") == 1, done.err
    assert done.err.count("RuntimeError: a bug of ours") == 2, "in the traceback, and in the last line"
    assert done.err.splitlines()[-1] == ("thinwire train: error: rank 1 of 2 raised RuntimeError: a bug of ours")
    assert logged_steps(tmp_path / RUN) == [1, 2]


# Numbers that are not finite.

NAN_BATCHES = """
import torch
from thinwire.train.data import Digits
batch = Digits.batch
def poisoned(self, start, size, seed):
    made = batch(self, start, size, seed)
    step, rank = divmod(start // size, {ranks})
    if rank == {ranks} - 1 and step + 1 in {steps}:
        made.inputs.fill_(float("nan"))
    return made
patch(Digits, "batch", poisoned)
"""


@pytest.mark.parametrize("compressor", [SMALL.compressor, "quantize:bits=8"])
def test_a_batch_with_nan_is_skipped_and_counted(compressor: str, ranks: Ranks, tmp_path: Path) -> None:
    """On one rank; a checkpoint is due in that very step, and left out. A resumed run counts on."""
    config = changed(SMALL, out=RUN, compressor=compressor, checkpoint_every=4, keep=9, steps=20)
    fault = NAN_BATCHES.format(ranks=2, steps=[3, 8])
    ended = train(ranks, 2, config, tmp_path, fault)
    assert ended.finished, ended
    steps = lines(tmp_path / RUN, "step")
    assert [line["step"] for line in steps if line["loss"] is None] == [3, 8]
    assert [line["skipped"] for line in steps] == [0, 0, *[1] * 5, *[2] * 13]
    assert lines(tmp_path / RUN, "evaluation")[-1]["loss"] is not None
    assert checkpoints(tmp_path / RUN) == [4, 12, 16, 20]
    for step in (16, 20):
        for path in (tmp_path / RUN / "checkpoints" / f"step-{step:08}").iterdir():
            path.unlink()
    ended = train(ranks, 2, changed(config, resume="auto"), tmp_path, fault)
    assert ended.finished, ended
    again = lines(tmp_path / RUN, "step")
    assert [line["skipped"] for line in again] == [line["skipped"] for line in steps]
    assert [line["loss"] for line in again] == [line["loss"] for line in steps]


@pytest.mark.parametrize("compressor", [SMALL.compressor, "none"])
def test_a_loss_that_is_never_finite_again_ends_the_run(compressor: str, ranks: Ranks, tmp_path: Path) -> None:
    config = changed(SMALL, out=RUN, compressor=compressor, steps=60)
    ended = train(ranks, 2, config, tmp_path, NAN_BATCHES.format(ranks=2, steps=range(13, 99)))
    assert ended.error == (
        "the loss has not been finite for 20 steps, up to step 32: try a lower --lr than 0.001; "
        "the checkpoint of step 10 is good"
    )
    assert checkpoints(tmp_path / RUN) == [5, 10]
    ended = train(ranks, 2, changed(config, resume="auto"), tmp_path)  # data that has been mended
    assert ended.finished, ended
    assert_as_if_nothing_was(ranks, 2, config, tmp_path)


def test_a_run_that_is_never_finite_is_one_line(tmp_path: Path) -> None:
    fault = NAN_BATCHES.format(ranks=1, steps=range(1, 99))
    done = run(tmp_path, *arguments(changed(LONG, workers=1)), **planted(tmp_path / "fault", fault))
    assert done.code == 2
    assert_one_line(done, "has not been finite for 20 steps, up to step 20", "--lr", "no checkpoint was written")


# Two at once.


def test_a_folder_in_use_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """And what is in it stays as it is."""
    with Job(tmp_path, *arguments(changed(LONG, steps=100_000, workers=1))) as job:
        job.until(has_logged(tmp_path / RUN, 8))
        for resume in ("no", "auto"):
            config = changed(LONG, resume=resume)
            ended = train(ranks, 1, config, tmp_path)
            assert ended.error is not None, ended
            expected = "holds a run" if resume == "no" else "run is in use by another training"
            assert expected in ended.error
        job.process.send_signal(signal.SIGTERM)
        assert job.end(LIMIT).code == 128 + signal.SIGTERM
    steps = logged_steps(tmp_path / RUN)
    assert steps == list(range(1, len(steps) + 1))
