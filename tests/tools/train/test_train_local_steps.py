"""`thinwire train --local-steps`: it learns with few bytes, ranks end alike, and a run goes on where it stopped."""

import math
import warnings
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from support.training_faults import NanBatches, StopInStep
from support.training_runs import (
    LIMIT,
    SMALL,
    Ended,
    assert_same_weights,
    changed,
    checkpoints,
    lines,
    newest,
    train,
    train_rank,
)
from thinwire.testing import RankPool
from thinwire.tools.train.config import Config

RUN = Path("run")
LOCAL = changed(SMALL, out=RUN, local_steps=8, steps=44, checkpoint_every=20, eval_every=16, log_every=10)
"""Rounds end after steps 8, 16, ...; an exchange is under way for 4 steps. Checkpoints and the end are in between."""


def states(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The weights of each rank in the newest checkpoint, which are the common ones when ranks have synchronized."""
    found = []
    for path in sorted(newest(folder).glob("rank*.pt")):
        ours = torch.load(path, weights_only=True)["learner"]["exchange"]["thinwire"]
        assert ours["weights"] is None, "not in the middle of a round"
        found.append(ours["common"])
    return found


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
    first, *others = states(whole)
    assert len(others) == 2
    written = torch.load(whole / "weights.pt", weights_only=True)
    for name, tensor in first.items():
        assert all(torch.equal(tensor, other[name]) for other in others), name
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
    first, *others = states(tmp_path / RUN)
    assert len(others) == 1
    assert all(torch.equal(tensor, others[0][name]) for name, tensor in first.items())
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
        config = changed(LOCAL, compressor=compressor, optimizer="sgd", lr=0.02, steps=24, checkpoint_every=0)
        config = changed(config, out=Path(f"run-{less}"))
        assert train(ranks, 2, config, tmp_path).finished
        (end,) = lines(tmp_path / f"run-{less}", "end")
        assert end["bytes_sent"] < end["bytes_dense"] / less, compressor
        first, other = states(tmp_path / f"run-{less}")
        assert all(torch.equal(tensor, other[name]) for name, tensor in first.items()), compressor


def test_dense_training_to_compare_with_exchanges_every_step(ranks: RankPool, tmp_path: Path) -> None:
    config = changed(LOCAL, steps=10, compare_dense=True)
    ended = train(ranks, 2, config, tmp_path)
    assert ended.finished, ended
    assert "default: 10 steps in " in ended.out
    dense, ours = (lines(folder, "end")[0] for folder in (tmp_path / RUN / "dense", tmp_path / RUN))
    assert dense["bytes_dense"] == ours["bytes_dense"]
    assert dense["bytes_sent"] >= dense["bytes_dense"]
