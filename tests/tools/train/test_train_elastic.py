"""torchrun restarts ranks: one was killed, a node has left or joined; training goes on from the last checkpoint."""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from support.training_faults import Hold, InSteps
from support.training_runs import (
    LIMIT,
    SMALL,
    TORCHRUN,
    Job,
    arguments,
    assert_same_weights,
    changed,
    checkpoints,
    copy_run,
    has_logged,
    lines,
    logged_steps,
    planted,
    train,
)
from thinwire.testing import Kill, RankPool
from thinwire.testing.pool import HOST, loopback_store
from thinwire.tools.train.config import defaults
from thinwire.tools.train.control import join_start, name_start

RUN = Path("run")
CONFIG = changed(SMALL, out=RUN, resume="auto", steps=20, keep=100)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""As torchrun sets it: other numbers of threads may give other bits."""
ELASTIC = (
    "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9", "--rdzv-backend", "c10d", "--local-addr", HOST,
)  # fmt: skip
SOON = f"is_host=0,join_timeout={LIMIT:.0f},last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=8"
"""The store is in the test's process; nodes that leave are missed after 8 s."""


def started(folder: Path) -> list[tuple[int, int]]:
    """The first step and the number of ranks of each start that training went on from."""
    return [(line["first_step"], line["world_size"]) for line in lines(folder, "conditions")]


def forget_after(folder: Path, step: int) -> None:
    for later in checkpoints(folder):
        if later > step:
            shutil.rmtree(folder / "checkpoints" / f"step-{later:08}")


def go_on(ranks: RankPool, folder: Path, world_size: int) -> None:
    """Resume a run without torchrun, as one does by hand."""
    ended = train(ranks, world_size, defaults(["--resume", "auto", "--out", str(folder)]), folder.parent)
    assert ended.finished, ended


def test_a_killed_rank_is_started_again(ranks: RankPool, tmp_path: Path) -> None:
    """All ranks begin anew on the store of torchrun's agent, which has the addresses of those that ended."""
    how = ("--nproc-per-node", "2", "--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HOST}:0")
    killed = planted(InSteps(Kill(rank=0, step=12)))
    program = (*TORCHRUN, *how, "-m", "thinwire", "train")
    with Job(tmp_path, *arguments(CONFIG), program=program, **ONE_THREAD, **killed) as job:
        done = job.end()
    assert done.code == 0, done.err
    assert "resuming from step 10" in done.err
    assert started(tmp_path / RUN) == [(0, 2), (10, 2)]
    assert logged_steps(tmp_path / RUN) == list(range(1, 21))
    whole = changed(CONFIG, out=Path("whole"), resume="no")
    assert train(ranks, 2, whole, tmp_path).finished
    assert_same_weights(tmp_path / RUN, tmp_path / "whole")


def test_each_start_of_the_ranks_has_keys_of_its_own() -> None:
    """Ranks begin in any order, on a store that has what earlier ones wrote."""
    store: Any = HashStore()
    names: list[str] = []
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(join_start, store, rank, LIMIT) for rank in (1, 2)]
            names.append(name_start(store, 3, LIMIT))
            assert [other.result(LIMIT) for other in others] == [names[-1]] * 2
    assert len({*names}) == 3


def test_a_rank_that_does_not_come_is_named() -> None:
    store: Any = HashStore()
    for _ in range(2):  # also where an earlier start left its name
        with pytest.raises(RuntimeError, match=r"rank 0 has not come within 0\.1 s; .*DISABLE_SHARE_RDZV_TCP_STORE=1"):
            join_start(store, 1, 0.1)
        name_start(store, 1, LIMIT)
    with pytest.raises(RuntimeError, match=r"rank 1 has not come within 0\.1 s"):
        name_start(store, 2, 0.1)


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Where the agents meet."""
    store = loopback_store(timedelta(seconds=LIMIT))
    yield f"{HOST}:{store.port}"
    del store  # which listens until now


def node(cwd: Path, endpoint: str) -> Job:
    """Start an agent of torchrun that is a node by itself, with one rank."""
    how = (*TORCHRUN, *ELASTIC, "--rdzv-endpoint", endpoint, "--rdzv-conf", SOON, "-m", "thinwire", "train")
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **ONE_THREAD}
    return Job(cwd, *arguments(CONFIG), program=how, **own, **planted(Hold((7, 14))))


def has_rank(job: Job, rank: int) -> bool:
    return any(f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in job.group())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_node_joins_and_another_leaves(how: str, endpoint: str, ranks: RankPool, tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(node(tmp_path, endpoint))
        first.until(has_logged(tmp_path / RUN, 6))
        second = stack.enter_context(node(tmp_path, endpoint))  # the first is stopped, and both begin
        first.until(has_logged(tmp_path / RUN, 13))
        leaves, stays = (first, second) if has_rank(first, 0) else (second, first)
        assert has_rank(stays, 1)
        if how == "killed":
            leaves.kill()
        else:
            os.kill(leaves.process.pid, signal.SIGTERM)
        (tmp_path / "go-14").touch()
        done = stays.end()
    assert done.code == 0, done.err
    left = 10 if how == "killed" else 14
    assert started(tmp_path / RUN) == [(0, 1), (7, 2), (left, 1)], "a node that is stopped loses no step"
    assert logged_steps(tmp_path / RUN) == list(range(1, 21))
    for step, world_size in started(tmp_path / RUN):
        assert step in [0, *checkpoints(tmp_path / RUN)], world_size
    by_hand = copy_run(tmp_path / RUN, tmp_path / "by-hand")
    forget_after(by_hand, left)
    go_on(ranks, by_hand, world_size=1)
    assert_same_weights(tmp_path / RUN, by_hand)
