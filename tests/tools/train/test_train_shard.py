"""`thinwire train --shard`: what a rank of a sharded model sends, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from support.training_runs import SMALL, changed, lines, train
from thinwire.testing import RankPool
from thinwire.tools.train.checks import check, check_world
from thinwire.tools.train.view import PHASES, Result, print_results

GPT = changed(SMALL, model="gpt:layers=1,width=64,heads=2,context=16", data="text", batch=4, steps=8, out=Path("run"))


def test_ranks_of_a_replica_share_bytes_and_learn(ranks: RankPool, tmp_path: Path) -> None:
    """Two replicas of two ranks, beside two ranks of DDP."""
    for name, size, shard in (("ddp", 2, 1), ("sharded", 4, 2)):
        assert train(ranks, size, changed(GPT, out=Path(name), shard=shard), tmp_path).finished
    ddp, sharded = (lines(tmp_path / name, "step") for name in ("ddp", "sharded"))
    assert sharded[-1]["bytes_sent"] == pytest.approx(ddp[-1]["bytes_sent"] / 2, rel=0.05)
    assert sharded[-1]["bytes_dense"] == pytest.approx(ddp[-1]["bytes_dense"] / 2, rel=0.01)
    assert sharded[-1]["loss"] < sharded[0]["loss"]
    (evaluated,) = lines(tmp_path / "sharded", "evaluation")
    assert evaluated["loss"] < 6
    found = [lines(tmp_path / name, "end")[0]["ranks"] for name in ("ddp", "sharded")]
    assert [(each["rank"], each["replica"], each["shard"]) for each in found[1]] == [
        (0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1),
    ]  # fmt: skip
    assert ["replica" in each for each in found[0]] == [False, False]
    for each in found[1]:
        assert each["bytes_between_nodes"] == pytest.approx(found[0][0]["bytes_between_nodes"] / 2, rel=0.05)
        assert each["bytes_between_nodes"] < each["bytes_dense"]
        assert each["bytes_inside_nodes"] == 0  # those of FSDP are not thinwire's


def test_the_table_says_who_sent_what(capsys: pytest.CaptureFixture[str]) -> None:
    def result(**others: Any) -> Result:
        return Result(
            name="topk", steps=5, loss=1.0, accuracy=0.5, bytes_sent=3_000_000, bytes_dense=9_000_000,
            reduction_after_warmup=7.0, interface_bytes=None, seconds=1.0, split=dict.fromkeys(PHASES, 0.1), **others,
        )  # fmt: skip

    def sent(rank: int, between: int, inside: int, **place: int) -> dict[str, int]:
        return {"rank": rank, **place, "bytes_between_nodes": between, "bytes_inside_nodes": inside, "bytes_dense": 9}

    def rows(ranks: list[dict[str, int]]) -> dict[str, str]:
        print_results([result(ranks=ranks)], 4)
        return dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])  # type: ignore[misc]

    sharded = rows([sent(rank, 10_000 * (rank + 1), 0, replica=rank // 2, shard=rank % 2) for rank in range(4)])
    assert sharded["replica 0, by shard"] == "0.01 0.02"
    assert sharded["replica 1, by shard"] == "0.03 0.04"
    assert (sharded["reduction"], sharded["after the warm-up"]) == ("3.0x", "7.0x")
    assert "inside nodes" not in sharded
    nodes = rows([sent(0, 1_000_000, 2_000_000), sent(1, 0, 0)])
    assert (nodes["between nodes"], nodes["inside nodes"]) == ("1.00", "2.00")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shard": 0}, "--shard 0, expected 1 or more"),
        ({"shard": 2, "model": SMALL.model, "data": "digits"}, "expected a gpt, such as --recipe text-gpt"),
        ({"shard": 2, "compressor": "quantize:bits=8"}, "expected a sparse compressor, default, auto or none"),
    ],
)
def test_what_cannot_be_sharded_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(changed(GPT, **changes))


def test_replicas_are_whole() -> None:
    with pytest.raises(ValueError, match="--shard 4 with 6 ranks, expected a divisor"):
        check_world(changed(GPT, shard=4), 6)
    check_world(changed(GPT, shard=3), 6)
