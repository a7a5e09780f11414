"""States of ranks in `torch.distributed.checkpoint`, which would keep one rank's for all."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from test_checkpoints import Run

import thinwire
from support.training import raises
from thinwire.testing import RankPool

HOW: dict[str, dict[str, Any]] = {
    "attach": {"kind": "attach", "ddp": True, "algorithm": "sharded"},
    "AdamW": {"kind": "AdamW", "ddp": True},
    "SGD plain": {"kind": "SGD", "ddp": False},
}


def owner(run: Run) -> Any:
    return run.sync if run.kind == "attach" else run.optimizer


def save(rank: int, world_size: int, folder: Path, how: dict[str, Any]) -> Any:
    run = Run(**how)
    run.train(rank, 0, 15)
    state = {"model": run.state()["model"], "owner": thinwire.per_rank(owner(run))}
    if run.kind == "attach":
        state["optimizer"] = run.optimizer.state_dict()
    dcp.save(state, checkpoint_id=folder / "checkpoint")
    run.train(rank, 15, 20)
    return run.bits()


def load(rank: int, world_size: int, folder: Path, how: dict[str, Any]) -> Any:
    run = Run(**how)
    if run.kind == "attach":  # so that torch's optimizer has a state to load into
        run.train(rank, 0, 1)
    state = {"model": run.state()["model"]}
    if run.kind == "attach":
        state["optimizer"] = run.optimizer.state_dict()
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    fresh = Run(**how)
    fresh.model.load_state_dict({f"module.{k}" if how["ddp"] else k: v for k, v in state["model"].items()})
    if run.kind == "attach":
        fresh.optimizer.load_state_dict(state["optimizer"])
    owner(fresh).load_state_dict(thinwire.load_per_rank(folder / "checkpoint", "owner"))
    fresh.train(rank, 15, 20)
    return fresh.bits()


@pytest.mark.parametrize("name", HOW)
def test_a_run_goes_on_with_the_same_bits(ranks: RankPool, tmp_path: Path, name: str) -> None:
    whole = ranks.run(save, 2, tmp_path, HOW[name])
    assert ranks.run(load, 2, tmp_path, HOW[name]) == whole


def load_elsewhere(rank: int, world_size: int, folder: Path, how: dict[str, Any]) -> int:
    run = Run(**how)
    owner(run).load_state_dict(thinwire.load_per_rank(folder / "checkpoint", "owner"))
    with raises(ValueError, "'nothing'", "model", "owner"):
        thinwire.load_per_rank(folder / "checkpoint", "nothing")
    return int(run.sync.steps)


def test_a_run_goes_on_with_another_number_of_ranks_and_a_wrong_key_is_an_error(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(save, 2, tmp_path, HOW["AdamW"])
    assert ranks.run(load_elsewhere, 3, tmp_path, HOW["AdamW"]) == [15, 15, 15]
