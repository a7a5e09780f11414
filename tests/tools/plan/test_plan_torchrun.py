"""`thinwire plan` on a cluster: real ranks, started by torchrun, which measure themselves and their links."""

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
OWN = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 10))
    inputs = torch.randn(8, 64)
    return model, lambda module: module(inputs).square().mean()

def nonsense():
    return 7
"""


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


def test_a_model_of_ours_is_measured(tmp_path: Path) -> None:
    done = plan(tmp_path, "--model", "gpt:layers=1,width=64,context=16", "--plot", "plan.svg")
    assert done.code == 0, done.err
    first, compute, codec, *_ = done.out.splitlines()
    assert re.match(
        r"\S+ k parameters in \d+ bucket\(s\) of float32; 2 ranks, each with a link of \S+ .bit/s, latency \S+ .?s$",
        first,
    )
    assert compute.endswith("(measured)")
    assert codec.startswith(
        "codec: measured here, 1 thread(s) per rank; elements compressed per second: quantize:bits=8 "
    )
    for row in (
        "dense +ring",
        "fp16 hook +ring",
        "attach quantize:bits=8 +gather",
        "thinwire.AdamW topk:ratio=1/64,bits=2",
    ):
        assert len(re.findall(rf"^ *{row}", done.out, re.MULTILINE)) == 1, "one rank prints"
    assert re.search(r"^(Use|Do not compress)", done.out, re.MULTILINE)
    assert "<svg" in (tmp_path / "plan.svg").read_text()


@pytest.mark.slow
def test_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    done = plan(tmp_path, "--model", "mine.py:make", "--specs", "quantize:bits=8")
    assert done.code == 0, done.err
    assert done.out.startswith("22.5 k parameters in 1 bucket(s) of float32; 2 ranks")
    assert "topk" not in done.out


@pytest.mark.slow
def test_hosts_with_several_ranks(tmp_path: Path) -> None:
    """Two agents, as on two machines: all ranks measure together, and one prints."""
    port = str(free_port())
    arguments = ("--model", "gpt:layers=1,width=32,context=8", "--specs", "quantize:bits=8")
    with ExitStack() as stack:
        agents = [
            stack.enter_context(
                Ranks(tmp_path, *arguments, how=(
                    "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number), "--master-addr", "127.0.0.1",
                    "--master-port", port,
                ))
            )
            for number in range(2)
        ]  # fmt: skip
        first, second = (agent.end() for agent in agents)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "; 4 ranks, each with a link of " in first.out
    assert re.search(r"attach quantize:bits=8 +(gather|sharded)", first.out)  # by the latency measured
    assert second.out == ""


@pytest.mark.parametrize(
    ("arguments", "ranks", "message"),
    [
        slow((), 2, "--model not given, expected one of thinwire train's"),
        slow(("--model", "gpt"), 1, "torchrun started one rank, which has nobody to exchange with"),
        slow(("--model", "gpt", "--world", "64"), 2, "--world 64: under torchrun it is measured; leave it out"),
        slow(("--model", "gpt", "--cores", "2"), 2, "--cores 2: under torchrun it is measured; leave it out"),
        (("--model", "lstm"), 2, "model 'lstm' in 'lstm' is unknown, expected one of gpt, cnn, resnet18"),
        slow(("--model", "none.py:make"), 2, "there is no file none.py"),
        slow(("--model", "mine.py:absent"), 2, "mine.py has no function 'absent'"),
        slow(("--model", "mine.py:nonsense"), 2, "returned int, expected (module, loss)"),
    ],
    ids=["no model", "one rank", "world", "cores", "unknown model", "no file", "no function", "no module"],
)
def test_wrong_arguments_are_shown_once(arguments: tuple[str, ...], ranks: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    done = plan(tmp_path, *arguments, ranks=ranks)
    assert done.code != 0
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if line.startswith("thinwire plan: error: ")]
    assert len(lines) == 1, done.err
    assert message in lines[0]
