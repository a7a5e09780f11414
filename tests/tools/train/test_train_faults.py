"""Trainings that are killed, stopped, or broken: what is printed, what is left, and that they go on afterwards.

Every fault is placed by its rank and step, or at what a job was seen to have done: nothing here depends on how fast it
goes. A number that is drawn is printed, so that a failure can be repeated.
"""

import os
import random
import re
import shlex
import signal
from pathlib import Path

import pytest

from support.slow import slow, some_slow
from support.training_faults import InSteps, KilledBeside, LargeLosses, NanBatches
from support.training_runs import (
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
    train_rank,
)
from thinwire.testing import LOST, Kill, RaiseError, RankPool
from thinwire.tools.train.config import Config, defaults
from thinwire.tools.train.rank import locked

RUN = Path("run")
LONG = changed(SMALL, out=RUN, steps=150, checkpoint_every=7)
GO_ON = ("--out", "run", "--resume", "auto")

MOMENTS = {
    "before a file is on disk": ("fsync", "00000010.partial/.rank0.pt.", False),
    "before the manifest": ("replace", "00000010.partial/manifest.json", False),
    "after the manifest": ("replace", "00000010.partial/manifest.json", True),
    "before its name": ("rename", "checkpoints/step-00000010", False),
    "after its name": ("rename", "checkpoints/step-00000010", True),
}
"""What is called for which path, and whether it dies after it."""


def draw(low: int, high: int) -> int:
    """A step for a fault, another one each time unless THINWIRE_TEST_SEED is set."""
    seed = int(os.environ.get("THINWIRE_TEST_SEED", random.SystemRandom().randrange(10**6)))
    step = random.Random(seed).randint(low, high)
    print(f"THINWIRE_TEST_SEED={seed}: step {step}")
    return step


def finish(ranks: RankPool, size: int, cwd: Path) -> None:
    """What the command would do to go on, by the pool."""
    ended = train(ranks, size, defaults(["--resume", "auto", "--out", str(cwd / RUN)]), cwd)
    assert ended.finished, ended


def assert_as_if_nothing_was(ranks: RankPool, size: int, config: Config, cwd: Path) -> None:
    """The run is that of the same config which never stopped."""
    assert train(ranks, size, changed(config, out=Path("whole")), cwd).finished
    assert_same_weights(cwd / RUN, cwd / "whole")
    assert logged_steps(cwd / RUN) == list(range(1, config.steps + 1))
    losses = [[line["loss"] for line in lines(cwd / name, "step")] for name in ("run", "whole")]
    assert losses[0] == losses[1]
    assert lines(cwd / RUN)[-1]["reason"] == "finished"
    assert not list((cwd / RUN / "checkpoints").glob(".*")), "nothing half written is left"


@pytest.mark.parametrize("moment", some_slow(MOMENTS, "before the manifest", "after the manifest", "before its name"))
def test_a_checkpoint_is_there_or_not_whenever_it_is_killed(moment: str, ranks: RankPool, tmp_path: Path) -> None:
    name, part, after = MOMENTS[moment]
    config = changed(LONG, checkpoint_every=5, steps=12, keep=1)
    fault = KilledBeside(name, part, after)
    assert ranks.run(train_rank, 1, config, str(tmp_path), fault, timeout=LIMIT, lost=[0]) == [LOST]
    assert checkpoints(tmp_path / RUN) == ([5, 10] if moment == "after its name" else [5])
    finish(ranks, 1, tmp_path)
    assert checkpoints(tmp_path / RUN) == [12]
    assert_as_if_nothing_was(ranks, 1, config, tmp_path)


def test_a_killed_worker_is_named_and_the_others_end(ranks: RankPool, tmp_path: Path) -> None:
    """Three ranks. Then the parent is killed, and leaves no rank behind; then the run goes on to its end."""
    config = changed(LONG, workers=3, optimizer="sgd", lr=0.01, steps=100)
    done = run(tmp_path, *arguments(config), **planted(InSteps(Kill(rank=1, step=draw(8, 60)))))
    assert done.code == 1
    assert_one_line(done, "thinwire train: error: rank 1 of 3 was killed by SIGKILL")
    with Job(tmp_path, *GO_ON) as job:
        job.until(has_logged(tmp_path / RUN, checkpoints(tmp_path / RUN)[-1] + 9))
        job.process.kill()
        assert job.end().code == -signal.SIGKILL, "and no rank is left"
    assert not (tmp_path / RUN / "weights.pt").exists(), "none went on to the end"
    finish(ranks, 3, tmp_path)
    assert_as_if_nothing_was(ranks, 3, config, tmp_path)


def assert_stopped(done: Done, code: int, folder: Path) -> list[str]:
    """With a checkpoint of the very step; returns the command that goes on from it."""
    step = logged_steps(folder)[-1]
    assert done.code == code, done.err
    found = re.fullmatch(r"stopped at step (\d+), checkpoint written; go on with: (.*)", done.out.splitlines()[-1])
    assert found, done.out
    assert int(found[1]) == step == checkpoints(folder)[-1] < LONG.steps
    assert lines(folder)[-1]["reason"] == "stopped"
    assert "Traceback" not in done.err
    assert "error" not in done.err
    assert not (folder / "weights.pt").exists()
    return shlex.split(found[2])


def test_signals_end_a_run_with_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    """SIGTERM to the parent alone, as a scheduler sends it; SIGINT to all of them, as a terminal does."""
    config = changed(LONG, compressor="quantize:bits=8", optimizer="sgd", lr=0.01)
    with Job(tmp_path, *arguments(config)) as job:
        job.until(has_logged(tmp_path / RUN, draw(2, 40)))
        job.process.send_signal(signal.SIGTERM)
        done = job.end()
    command = assert_stopped(done, 128 + signal.SIGTERM, tmp_path / RUN)
    assert command[:2] == ["thinwire", "train"]
    stopped = logged_steps(tmp_path / RUN)[-1]
    with Job(tmp_path, *command[2:]) as job:
        job.until(has_logged(tmp_path / RUN, stopped + 5))
        os.killpg(job.process.pid, signal.SIGINT)
        done = job.end()
    assert assert_stopped(done, 128 + signal.SIGINT, tmp_path / RUN) == command
    assert f"resuming from step {stopped}\n" in done.err
    finish(ranks, 2, tmp_path)
    assert_as_if_nothing_was(ranks, 2, config, tmp_path)


@pytest.mark.parametrize(("number", "whom"), [slow(signal.SIGTERM, "parent"), (signal.SIGINT, "all")])
def test_a_signal_while_workers_start_just_ends(number: signal.Signals, whom: str, tmp_path: Path) -> None:
    """Nothing has happened yet, and nothing is shown: no error, and no traceback of a process that was loading."""
    with Job(tmp_path, *arguments(LONG)) as job:
        some = draw(2, 4)
        job.until(lambda: len(job.group()) >= some)
        (job.process.send_signal if whom == "parent" else lambda n: os.killpg(job.process.pid, n))(number)
        done = job.end()
    assert done.code in (128 + number, -number), done.err  # the same to a shell
    assert done.err == ""


def test_a_bug_in_a_worker_shows_one_traceback_and_its_rank(tmp_path: Path) -> None:
    bug = InSteps(RaiseError(rank=1, step=3, error=RuntimeError("a bug of ours")))
    done = run(tmp_path, *arguments(LONG), **planted(bug))
    assert done.code == 1
    assert done.err.count("Traceback (most recent call last)") == 1, done.err
    assert done.err.count("RuntimeError: a bug of ours") == 2, "in the traceback, and in the last line"
    assert done.err.splitlines()[-1] == ("thinwire train: error: rank 1 of 2 raised RuntimeError: a bug of ours")
    assert logged_steps(tmp_path / RUN) == [1, 2]


# Numbers that are not finite.


@pytest.mark.parametrize("compressor", [SMALL.compressor, "quantize:bits=8"])
def test_a_batch_with_nan_is_skipped_and_counted(compressor: str, ranks: RankPool, tmp_path: Path) -> None:
    """On one rank; a checkpoint is due in that very step, and left out. A resumed run counts on."""
    config = changed(SMALL, out=RUN, compressor=compressor, checkpoint_every=4, keep=9, steps=20)
    fault = NanBatches(2, [3, 8])
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
    for again, line in zip(lines(tmp_path / RUN, "step"), steps, strict=True):
        assert (again["skipped"], again["loss"]) == (line["skipped"], line["loss"])


def test_a_loss_that_is_never_finite_again_ends_the_run(ranks: RankPool, tmp_path: Path) -> None:
    config = changed(SMALL, out=RUN, steps=60)
    ended = train(ranks, 2, config, tmp_path, NanBatches(2, range(13, 99)))
    assert ended.error == (
        "the loss has not been finite for 20 steps, up to step 32: try a lower --lr than 0.001; "
        "the last checkpoint is that of step 10"
    )
    assert checkpoints(tmp_path / RUN) == [5, 10]
    assert lines(tmp_path / RUN)[-1]["reason"] == "failed"
    finish(ranks, 2, tmp_path)  # with data that has been mended


@pytest.mark.parametrize("optimizer", ["adamw", slow("sgd")])
def test_gradients_too_large_to_be_squared_end_the_run(optimizer: str, ranks: RankPool, tmp_path: Path) -> None:
    """On one rank of two: 20 such steps are skipped and counted, one more is an error."""
    config = changed(SMALL, out=RUN, optimizer=optimizer, warmup_steps=50, steps=60)
    ended = train(ranks, 2, config, tmp_path, LargeLosses([*range(3, 23), *range(26, 99)]))
    assert ended.error == (
        "the last 21 steps were skipped, because a gradient was not finite or too large, up to step 46: "
        f"try a lower --lr than {config.lr:g}; the last checkpoint is that of step 45"
    )
    steps = lines(tmp_path / RUN, "step")
    assert all(line["loss"] is not None for line in steps)
    assert [line["skipped"] for line in steps if line["step"] in (2, 22, 25, 45)] == [0, 20, 20, 40]
    assert checkpoints(tmp_path / RUN)[-1] == 45
    assert lines(tmp_path / RUN)[-1]["reason"] == "failed"


# Two at once.


def test_a_folder_in_use_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    """And what is in it stays as it is."""
    (tmp_path / RUN).mkdir()
    (tmp_path / RUN / "config.json").write_text("of the other training")
    with locked(tmp_path / RUN):
        for resume in ("no", "auto"):
            ended = train(ranks, 2, changed(LONG, resume=resume), tmp_path)
            assert ended.error == "run is in use by another training: wait, or give another --out"
    assert {path.name for path in (tmp_path / RUN).iterdir()} == {".lock", "config.json"}
    assert (tmp_path / RUN / "config.json").read_text() == "of the other training"
