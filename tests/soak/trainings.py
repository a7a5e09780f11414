"""Attacks on whole trainings: killed or stopped at any moment, on a full disk.

Whatever happens to a run, it goes on afterwards and ends with the bits of a run that nothing happened to.
"""

import atexit
import tempfile
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from random import Random

from soak.campaign import Skipped, Tried, ranks
from support import training_runs as runs
from support.disks import small_disk
from support.training_faults import FullDisk, InSteps, SignalInStep
from support.training_runs import checkpoints, logged_steps, train
from thinwire.testing import LOST
from thinwire.tools.train.config import Config, defaults

STEPS, RUN = 20, Path("run")
FEW = runs.changed(runs.SMALL, out=RUN, steps=STEPS, keep=3)


def draw_config(draw: Random) -> tuple[int, Config]:
    """Return a number of ranks, and what they train."""
    return draw.randint(2, 3), runs.changed(
        FEW, optimizer=draw.choice(["adamw", "sgd"]), checkpoint_every=draw.choice([1, 2, 5])
    )


def temporary() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="thinwire-soak-")


@cache
def whole(world: int, optimizer: str, compressor: str) -> Path:
    """Return the folder of a run that nothing happened to. It is kept until this process ends."""
    folder = temporary()
    atexit.register(folder.cleanup)
    config = runs.changed(FEW, optimizer=optimizer, compressor=compressor)
    assert train(ranks(), world, config, Path(folder.name)).finished
    return Path(folder.name) / RUN


def go_on(world: int, cwd: Path, optimizer: str) -> None:
    """Resume the run as the command would, and compare its end with that of a run that never stopped."""
    ended = train(ranks(), world, defaults(["--resume", "auto", "--out", str(cwd / RUN)]), cwd)
    assert ended.finished, ended
    runs.assert_same_weights(cwd / RUN, whole(world, optimizer, FEW.compressor))
    assert logged_steps(cwd / RUN) == list(range(1, STEPS + 1))
    assert not list((cwd / RUN / "checkpoints").glob(".*")), "something half written is left"


def train_until_killed(rank: int, world_size: int, config: Config, cwd: str, fault: runs.Breakage) -> None:
    try:
        runs.train_rank(rank, world_size, config, cwd, fault)
    except Exception:  # another rank was killed first
        time.sleep(runs.LIMIT)


def kill_training(draw: Random) -> Tried:
    """All ranks are killed in a step or while a checkpoint is written; the run goes on from the last whole one."""
    world, config = draw_config(draw)
    fault = SignalInStep(None, draw.randint(1, STEPS - 6), draw.uniform(0, 0.1), "KILL")
    with temporary() as name:
        args = (config, name, fault)
        found = ranks().run(train_until_killed, world, *args, lost=range(world), timeout=2 * runs.LIMIT)
        assert found == [LOST] * world
        left = checkpoints(Path(name) / RUN)
        go_on(world, Path(name), config.optimizer)
    what = f"{config.optimizer}, {world} ranks, a checkpoint every {config.checkpoint_every}: {fault}, left {left}"
    return Tried(what, {"kills": 1, "resumes": 1, "steps": STEPS})


def terminate(draw: Random) -> Tried:
    """SIGTERM to one rank: all stop after the same step with a checkpoint of it, and the run goes on from there."""
    world, config = draw_config(draw)
    fault = SignalInStep(draw.randrange(world), draw.randint(1, STEPS - 6), draw.uniform(0, 0.1), "TERM")
    with temporary() as name:
        folder = Path(name) / RUN
        ended = train(ranks(), world, config, folder.parent, fault)
        assert ended.finished is False, ended
        assert logged_steps(folder)[-1] == checkpoints(folder)[-1] < STEPS, checkpoints(folder)
        assert runs.lines(folder)[-1]["reason"] == "stopped"
        go_on(world, folder.parent, config.optimizer)
    return Tried(f"{config.optimizer}, {world} ranks: {fault}", {"terminated": 1, "resumes": 1, "steps": STEPS})


def full_disk(draw: Random) -> Tried:
    """No room from some step on: one line, checkpoints as they were, and the run goes on once there is room."""
    world, config = draw_config(draw)
    config = runs.changed(config, keep=50, checkpoint_every=draw.randint(3, 6))
    step = draw.randint(1, STEPS - config.checkpoint_every)
    with ExitStack() as stack:
        try:
            cwd = stack.enter_context(small_disk(Path(stack.enter_context(temporary())) / "disk", size="12m"))
        except PermissionError as error:
            raise Skipped(str(error)) from None
        fault = FullDisk(rank=draw.randrange(world), step=step, path=cwd / "ballast")
        ended = train(ranks(), world, config, cwd, InSteps(fault))
        assert "No space left" in (ended.error or ""), ended
        assert "\n" not in (ended.error or ""), ended
        assert checkpoints(cwd / RUN) == list(range(config.checkpoint_every, step, config.checkpoint_every))
        fault.path.unlink()
        go_on(world, cwd, config.optimizer)
    return Tried(f"{config.optimizer}, {world} ranks: full from step {step}", {"full disks": 1, "steps": STEPS})
