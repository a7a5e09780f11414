"""`thinwire train --shard`: what a rank of a sharded model sends, and what is refused."""

from pathlib import Path

import pytest

from support.training_runs import SMALL, changed, lines, train
from thinwire.testing import RankPool
from thinwire.tools.train.checks import check, check_world

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
