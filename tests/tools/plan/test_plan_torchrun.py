"""`thinwire plan` under torchrun: real ranks, which measure their links and their codec."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from support.ports import free_port
from support.slow import slow

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LIMIT = 200.0
GIVEN = ("--params", "22.5k", "--step-compute", "100ms")


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Ranks:
    """torchrun with some ranks, on a port that the system chose; killed if it does not end."""

    def __init__(self, cwd: Path, *arguments: str, how: tuple[str, ...] = ()) -> None:
        hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLUMNS")
        clean = {name: value for name, value in os.environ.items() if name not in hidden}
        self._process = subprocess.Popen(
            [*TORCHRUN, *how, "-m", "thinwire", "plan", *arguments], cwd=cwd, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**clean, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def __enter__(self) -> "Ranks":
        return self

    def end(self) -> Done:
        out, err = self._process.communicate(timeout=LIMIT)
        return Done(self._process.returncode, out, err)

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()  # torchrun ends its ranks
            try:
                self._process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()


def plan(cwd: Path, *arguments: str, ranks: int = 2) -> Done:
    how = (
        "--nnodes", "1", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
    )  # fmt: skip
    with Ranks(cwd, *arguments, how=how) as started:
        return started.end()


def test_links_and_codec_are_measured(tmp_path: Path) -> None:
    done = plan(tmp_path, *GIVEN)
    assert done.code == 0, done.err
    first, compute, codec, *_ = done.out.splitlines()
    assert re.match(
        r"22.5 k parameters in 1 bucket\(s\) of float32; 2 ranks, each with a link of \S+ .bit/s, latency \S+ .?s$",
        first,
    )
    assert compute.startswith("a step without communication: 100 ms, ")
    assert codec.startswith("codec: as measured on 1 thread(s) per rank here; elements compressed per second: quantize")
    for row in ("dense +ring", "fp16 hook +ring", "attach quantize:bits=8 +gather", "thinwire.AdamW topk"):
        assert len(re.findall(rf"^ *{row}", done.out, re.MULTILINE)) == 1, "one rank prints"
    assert re.search(r"^(Use|Do not compress)", done.out, re.MULTILINE)


@pytest.mark.slow
def test_nodes_with_several_ranks_measure_together(tmp_path: Path) -> None:
    """Two agents, as on two machines: one rank prints."""
    port = str(free_port())
    with ExitStack() as stack:
        agents = [
            stack.enter_context(
                Ranks(tmp_path, *GIVEN, "--specs", "quantize:bits=8", how=(
                    "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number), "--master-addr", "127.0.0.1",
                    "--master-port", port,
                ))
            )
            for number in range(2)
        ]  # fmt: skip
        first, second = (agent.end() for agent in agents)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "; 4 ranks, each with a link of " in first.out
    assert "topk" not in first.out
    assert second.out == ""


@pytest.mark.parametrize(
    ("arguments", "ranks", "message"),
    [
        slow(("--params", "1M"), 2, "--step-compute not given: expected such as --params 7e9 --step-compute 2s"),
        slow(GIVEN, 1, "torchrun started one rank, which has nobody to exchange with"),
        ((*GIVEN, "--world", "64"), 2, "--world 64: under torchrun it is measured; leave it out"),
    ],
    ids=["missing", "one rank", "measured"],
)
def test_wrong_options_are_shown_once(arguments: tuple[str, ...], ranks: int, message: str, tmp_path: Path) -> None:
    done = plan(tmp_path, *arguments, ranks=ranks)
    assert done.code != 0
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if line.startswith("thinwire plan: error: ")]
    assert len(lines) == 1, done.err
    assert message in lines[0]
