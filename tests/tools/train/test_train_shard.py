"""`thinwire train --shard`: what a rank of a sharded model sends, and what is refused."""

from pathlib import Path

import pytest

from support.training_runs import SMALL, changed, lines, train
from thinwire.testing import RankPool
from thinwire.tools.train.checks import check

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


def test_what_cannot_be_sharded_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for changes, message in (
        ({"shard": 0}, "--shard 0, expected 1 to "),
        ({"shard": 2, "model": SMALL.model, "data": "digits"}, "expected a gpt"),
        ({"shard": 2, "compressor": "quantize:bits=8"}, "expected a sparse compressor, default, auto or none"),
    ):
        with pytest.raises(ValueError, match=message):
            check(changed(GPT, **changes))
    ended = train(ranks, 3, changed(GPT, shard=2), tmp_path)
    assert ended.error == "--shard 2 with 3 ranks, expected a divisor of their number"
