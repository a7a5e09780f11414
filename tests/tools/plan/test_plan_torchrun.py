"""`thinwire plan` under torchrun: real ranks, which measure their links and their codec.

Ranks on two machines are in tests/tools/train/test_two_machines.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from support.slow import slow

GIVEN = ("--params", "22.5k", "--step-compute", "100ms")


class Done(NamedTuple):
    code: int
    out: str
    err: str


def plan(cwd: Path, *arguments: str, ranks: int = 2) -> Done:
    """Start torchrun on a port that the system chooses; it is killed if it does not end."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLUMNS")
    clean = {name: value for name, value in os.environ.items() if name not in hidden}
    process = subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "127.0.0.1:0", "-m", "thinwire", "plan", *arguments,
        ],
        cwd=cwd, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**clean, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.terminate()  # it ends its ranks; nothing happens if it has ended
        process.wait(30)
    return Done(process.returncode, out, err)


def test_links_and_codec_are_measured(tmp_path: Path) -> None:
    done = plan(tmp_path, *GIVEN)
    assert done.code == 0, done.err
    first, compute, codec, *_ = done.out.splitlines()
    link = r"each with a link of \S+ .bit/s, latency \S+ .?s"
    assert re.fullmatch(rf"22.5 k parameters in 1 bucket\(s\) of float32; 2 ranks, {link}", first)
    assert compute.startswith("a step without communication: 100 ms, ")
    assert codec.startswith("codec: as measured on 1 thread(s) per rank here; elements compressed per second: quantize")
    for row in ("dense +ring", "fp16 hook +ring", "attach quantize:bits=8 +gather", "thinwire.AdamW topk"):
        assert len(re.findall(rf"^ *{row}", done.out, re.MULTILINE)) == 1, "one rank prints"
    assert re.search(r"^(Use|Do not compress)", done.out, re.MULTILINE)


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
