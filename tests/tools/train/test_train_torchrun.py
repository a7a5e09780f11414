"""Ranks that torchrun has started: on one machine, on two without a common disk, again and again, and when it fails."""

import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from support.ports import free_port
from support.training_faults import Hold, InSteps, SignalToParent
from support.training_runs import (
    LIMIT,
    SMALL,
    TORCHRUN,
    Done,
    Job,
    arguments,
    assert_one_line,
    assert_same_weights,
    changed,
    checkpoints,
    copy_run,
    has_logged,
    lines,
    logged_steps,
    newest,
    planted,
    run,
    train,
)
from thinwire.testing import Kill, RaiseError, RankPool
from thinwire.testing.pool import HOST, loopback_store
from thinwire.tools.record import cores
from thinwire.tools.train.config import defaults
from thinwire.tools.train.control import join_start, name_start

RUN = Path("run")
CONFIG = changed(SMALL, out=RUN, steps=20)
ELASTIC = changed(CONFIG, resume="auto", keep=100)
THREADS = {"OMP_NUM_THREADS": str(max(1, cores() // 2))}
"""As many as the command gives two ranks; torchrun says 1. Other numbers of threads may give other bits."""


def program(*options: str) -> tuple[str, ...]:
    return (*TORCHRUN, *options, "-m", "thinwire", "train")


def on_one_machine(cwd: Path, *given: str, restarts: int = 0, **more: str) -> Done:
    """Two ranks, to their end."""
    how = ("--nproc-per-node", "2", "--max-restarts", str(restarts), "--rdzv-backend", "c10d", "--rdzv-endpoint")
    return run(cwd, *given, program=program(*how, f"{HOST}:0"), **THREADS, **more)


def go_on(ranks: RankPool, folder: Path, world_size: int) -> None:
    """Resume a run without torchrun, as one does by hand."""
    ended = train(ranks, world_size, defaults(["--resume", "auto", "--out", str(folder)]), folder.parent)
    assert ended.finished, ended


def errors(done: Done) -> list[str]:
    return [line for line in done.err.splitlines() if line.startswith("thinwire train: error: ")]


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that started its own ranks, and never stopped."""
    cwd = tmp_path_factory.mktemp("whole")
    assert train(ranks, 2, CONFIG, cwd).finished
    return cwd / RUN


@pytest.mark.slow
def test_a_signal_leaves_a_checkpoint(whole: Path, ranks: RankPool, tmp_path: Path) -> None:
    """From which it goes on, whoever starts it, to the same weights."""
    done = on_one_machine(tmp_path, *arguments(CONFIG), **planted(InSteps(SignalToParent(rank=1, step=7))))
    step = logged_steps(tmp_path / RUN)[-1]
    assert step in (7, 8), "the step that was under way, or the one after: ranks agree on it"
    shown = rf"^stopped at step {step}, checkpoint written; go on with: .*thinwire train .*--resume auto$"
    assert re.search(shown, done.out, re.MULTILINE), done.out
    assert checkpoints(tmp_path / RUN) == [5, step]
    assert "thinwire train: error" not in done.err
    assert done.code != 0
    go_on(ranks, tmp_path / RUN, 2)
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
    # The second machine has no config to take options from.
    first, second = on_two_machines(here, there, "--out", "run", "--resume", "auto")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "resuming from step 15" in first.err
    assert_same_weights(here / RUN, whole)
    assert logged_steps(here / RUN) == list(range(1, 21))
    assert checkpoints(there / RUN) == [15, 20]


@pytest.mark.slow
def test_a_bug_shows_one_traceback_and_its_rank(tmp_path: Path) -> None:
    """torchrun adds its own, which is about processes that ended, not about the bug."""
    bug = InSteps(RaiseError(rank=1, step=3, error=RuntimeError("a bug of ours")))
    done = on_one_machine(tmp_path, *arguments(CONFIG), **planted(bug))
    assert done.code != 0
    assert done.err.count("RuntimeError: a bug of ours") == 1, done.err
    assert errors(done) == ["thinwire train: error: rank 1 of 2: a bug of ours"], done.err
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
    done = on_one_machine(tmp_path, *arguments(CONFIG), "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.code != 0
    (line,) = errors(done)
    assert "--device cuda, but torch finds no CUDA device here" in line


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
    (line,) = errors(other)
    assert re.match("thinwire train: error: rank 1 of 2: .*(rank 0|peer)", line)
    assert "Traceback" not in other.err


# Ranks that are started again.


def started(folder: Path) -> list[tuple[int, int]]:
    """The first step and the number of ranks of each start that training went on from."""
    return [(line["first_step"], line["world_size"]) for line in lines(folder, "conditions")]


def test_a_killed_rank_is_started_again(whole: Path, tmp_path: Path) -> None:
    """All ranks begin anew on the store of torchrun's agent, which has the addresses of those that ended."""
    done = on_one_machine(tmp_path, *arguments(ELASTIC), restarts=2, **planted(InSteps(Kill(rank=0, step=12))))
    assert done.code == 0, done.err
    assert "resuming from step 10" in done.err
    assert started(tmp_path / RUN) == [(0, 2), (10, 2)]
    assert logged_steps(tmp_path / RUN) == list(range(1, 21))
    assert_same_weights(tmp_path / RUN, whole)


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
    """An agent of torchrun that is a node by itself, with one rank. The store is in the test's process."""
    soon = f"is_host=0,join_timeout={LIMIT:.0f},last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=8"
    how = program(
        "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9", "--rdzv-backend", "c10d", "--local-addr",
        HOST, "--rdzv-endpoint", endpoint, "--rdzv-conf", soon,
    )  # fmt: skip
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    return Job(cwd, *arguments(ELASTIC), program=how, **own, **planted(Hold((7, 14))))


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
    for later in checkpoints(by_hand):
        if later > left:
            shutil.rmtree(by_hand / "checkpoints" / f"step-{later:08}")
    go_on(ranks, by_hand, world_size=1)
    assert_same_weights(tmp_path / RUN, by_hand)
