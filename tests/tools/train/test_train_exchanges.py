"""`thinwire train` with --local-steps, --shard and --compressor auto: bytes, what ranks end with, and a resume."""

import math
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from support.slow import slow
from support.training_faults import NanBatches, StopInStep
from support.training_runs import (
    LIMIT,
    SMALL,
    Ended,
    assert_same_weights,
    changed,
    checkpoints,
    copy_run,
    lines,
    newest,
    train,
    train_rank,
    weights,
)
from thinwire.testing import RankPool
from thinwire.tools.train.checks import check
from thinwire.tools.train.config import Config

RUN = Path("run")
LOCAL = changed(SMALL, out=RUN, local_steps=8, steps=44, checkpoint_every=20, eval_every=16, log_every=10)
"""Rounds end after steps 8, 16, ...; an exchange is under way for 4 steps. Checkpoints and the end are in between."""


def common_weights(folder: Path, size: int) -> dict[str, torch.Tensor]:
    """The weights in the newest checkpoint, which all ranks have when they have synchronized."""
    found = []
    for rank in range(size):
        state = torch.load(newest(folder) / f"rank{rank}.pt", weights_only=True)
        ours = state["learner"]["exchange"]["thinwire"]
        assert ours["weights"] is None, "not in the middle of a round"
        found.append(ours["common"])
    for name, tensor in found[0].items():
        assert all(torch.equal(tensor, other[name]) for other in found), name
    return found[0]


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks, 44 steps, which nothing stops."""
    cwd = tmp_path_factory.mktemp("whole")
    ended = train(ranks, 3, LOCAL, cwd)
    assert ended.finished, ended
    assert "default (topk:ratio=1/64,bits=2,chunk=4096) after every 8 local steps, 3 ranks" in ended.err
    return cwd / RUN


def test_it_learns_with_few_bytes_and_ranks_end_alike(whole: Path) -> None:
    steps, (*_, evaluated), (end,) = lines(whole, "step"), lines(whole, "evaluation"), lines(whole, "end")
    assert [line["step"] for line in steps] == [5, 10, 20, 30, 40, 44]  # the first loss is read after step 5
    assert all(math.isfinite(line["loss"]) for line in steps)
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    assert evaluated["step"] == 44
    assert evaluated["loss"] < steps[0]["loss"]
    written = weights(whole)
    for name, tensor in common_weights(whole, 3).items():
        assert torch.equal(tensor, written[name].flatten()), name
    dense = 44 * 2 * (3 - 1) / 3 * 4 * sum(tensor.numel() for tensor in written.values())
    assert end["bytes_dense"] == pytest.approx(dense, rel=0.01)
    for each in end["ranks"]:
        assert each["bytes_between_nodes"] + each["bytes_inside_nodes"] < end["bytes_dense"] / 50


@pytest.mark.parametrize(("every", "stopped_at"), [(8, 27), (3, 23)])
def test_a_stopped_run_goes_on_as_if_it_had_not(
    every: int, stopped_at: int, whole: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """In the middle of a round: of 8 steps, while an exchange is under way, and of 3, in which ranks wait."""
    config = changed(LOCAL, local_steps=every)
    if config != LOCAL:
        whole = tmp_path / "whole"
        assert train(ranks, 3, changed(config, out=whole), tmp_path).finished
    stopped = train(ranks, 3, config, tmp_path, StopInStep(23))
    assert stopped.finished is False, stopped
    assert checkpoints(tmp_path / RUN) == [20, stopped_at]
    ended = train(ranks, 3, changed(config, resume="auto"), tmp_path)
    assert ended.finished, ended
    assert f"resuming from step {stopped_at}\n" in ended.err
    assert_same_weights(tmp_path / RUN, whole)
    evaluated, before = (lines(folder, "evaluation") for folder in (tmp_path / RUN, whole))
    assert [line["loss"] for line in evaluated] == [line["loss"] for line in before]
    assert lines(tmp_path / RUN, "end")[-1]["bytes_dense"] == lines(whole, "end")[0]["bytes_dense"]


def test_another_number_of_ranks_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    """Also from a checkpoint that a signal caused in the middle of a round."""
    model = changed(LOCAL, model="gpt:layers=1,width=16,heads=2,context=16", data="text", batch=4)
    assert train(ranks, 3, model, tmp_path, StopInStep(23)).finished is False
    ended = train(ranks, 2, changed(model, resume="auto"), tmp_path)
    assert ended.finished, ended
    assert "damaged" not in ended.err
    assert "resuming from step 27\n" in ended.err
    common_weights(tmp_path / RUN, 2)
    *_, last = lines(tmp_path / RUN, "step")
    assert last["loss"] < lines(tmp_path / RUN, "step")[0]["loss"]


def train_with_nan(rank: int, size: int, config: Config, cwd: str, steps: Collection[int]) -> tuple[Ended, list[str]]:
    """A training in which the last rank has batches of NaN, and the warnings of this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ended = train_rank(rank, size, config, cwd, NanBatches(ranks=size, steps=steps))
    return ended, [str(each.message) for each in caught if "not finite" in str(each.message)]


def test_a_rank_with_nan_is_left_out(ranks: RankPool, tmp_path: Path) -> None:
    """Its weights are not finite for 30 steps, longer than where every step is exchanged; the others go on."""
    config = changed(LOCAL, local_steps=32, checkpoint_every=0, eval_every=0, steps=66)
    (one, quiet), (other, warned) = ranks.run(train_with_nan, 2, config, str(tmp_path), [3], timeout=LIMIT)
    assert one.finished, one
    assert other.finished, other
    assert not quiet
    assert "the weights of rank 1 are not finite after 32 local steps" in warned[0]
    steps, (evaluated,) = lines(tmp_path / RUN, "step"), lines(tmp_path / RUN, "evaluation")
    assert [line["loss"] is None for line in steps] == [False, True, True, True, True, False, False]
    assert evaluated["loss"] < steps[0]["loss"]
    assert steps[-1]["skipped"] == 0


def test_a_loss_that_stays_nan_is_an_error(ranks: RankPool, tmp_path: Path) -> None:
    config = changed(LOCAL, checkpoint_every=0, eval_every=0)
    (one, _), (other, _) = ranks.run(train_with_nan, 2, config, str(tmp_path), range(45), timeout=LIMIT)
    assert one.error == other.error
    assert one.error is not None
    assert "the loss has not been finite for 28 steps" in one.error  # 20, and a round


def test_dense_and_quantized_differences(ranks: RankPool, tmp_path: Path) -> None:
    for compressor, less in (("none", 4), ("quantize:bits=4", 20)):
        out = Path(f"run-{less}")
        more = {"optimizer": "sgd", "lr": 0.02, "steps": 24, "checkpoint_every": 0}
        assert train(ranks, 2, changed(LOCAL, out=out, compressor=compressor, **more), tmp_path).finished
        (end,) = lines(tmp_path / out, "end")
        assert end["bytes_dense"] / (4 * less) < end["bytes_sent"] < end["bytes_dense"] / less, compressor
        common_weights(tmp_path / out, 2)


def test_dense_training_to_compare_with_exchanges_every_step(ranks: RankPool, tmp_path: Path) -> None:
    config = changed(LOCAL, steps=10, compare_dense=True)
    ended = train(ranks, 2, config, tmp_path)
    assert ended.finished, ended
    assert "default: 10 steps in " in ended.out
    dense, ours = (lines(folder, "end")[0] for folder in (tmp_path / RUN / "dense", tmp_path / RUN))
    assert dense["bytes_dense"] == ours["bytes_dense"]
    assert dense["bytes_sent"] >= dense["bytes_dense"]


# Shards.

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


# Auto.

OVER = 34
"""Steps after which there is a choice."""
AUTO = changed(SMALL, compressor="auto", steps=OVER + 12, checkpoint_every=OVER + 4, keep=9)


@pytest.mark.parametrize("optimizer", [slow("adamw"), "sgd"])
def test_it_says_what_it_chose_and_goes_on_with_it(ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    config = changed(AUTO, optimizer=optimizer, out=tmp_path / "run")
    shown = train(ranks, 2, config, tmp_path)
    (choice,) = lines(tmp_path / "run", "choice")
    assert choice["step"] <= OVER
    assert choice["candidates"][0] == "none"
    assert choice["compressor"] in choice["candidates"]
    assert all(seconds > 0 for seconds in choice["step_seconds"])
    assert f"auto: {choice['reason']}" in shown.err

    again = copy_run(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(newest(again))
    (again / "weights.pt").unlink()
    assert checkpoints(again) == [OVER + 4]
    train(ranks, 2, changed(config, out=again, resume="auto"), tmp_path)
    assert lines(again, "choice") == [choice]  # not measured again
    assert_same_weights(tmp_path / "run", again)
