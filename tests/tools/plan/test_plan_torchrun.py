"""`thinwire plan` under torchrun: real ranks, which measure their links and their codec.

Ranks on two machines are in tests/tools/train/test_two_machines.py.
"""

import re
from pathlib import Path

import pytest

from support.slow import slow
from support.training_runs import TORCHRUN, Done, run

GIVEN = ("--params", "22.5k", "--step-compute", "100ms")


def plan(cwd: Path, *arguments: str, ranks: int = 2) -> Done:
    """What torchrun does, on a port that the system chooses."""
    place = ("--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    return run(cwd, *arguments, program=(*TORCHRUN, *place, "-m", "thinwire", "plan"), OMP_NUM_THREADS="1")


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
