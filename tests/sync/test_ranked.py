"""States of ranks in `torch.distributed.checkpoint`, which would keep one rank's for all."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from test_checkpoints import Run

import thinwire
from support.training import plain_module, raises
from thinwire import Collective
from thinwire.testing import RankPool

HOW: dict[str, dict[str, Any]] = {
    "attach": {"kind": "attach", "ddp": True, "collective": Collective(algorithm="sharded")},
    "AdamW": {"kind": "AdamW", "ddp": True},
    "SGD plain": {"kind": "SGD", "ddp": False},
}


def save(rank: int, world_size: int, folder: Path, how: dict[str, Any]) -> Any:
    run = Run(**how)
    run.train(rank, 0, 15)
    dcp.save({**torchs_state(run), "owner": thinwire.per_rank(run.owner)}, checkpoint_id=folder / "checkpoint")
    run.train(rank, 15, 20)
    return run.bits()


def torchs_state(run: Run) -> dict[str, Any]:
    state = {name: kept for name, kept in run.state().items() if name == "model" or run.kind == "attach"}
    state.pop("sync", None)
    return state


def load(rank: int, world_size: int, folder: Path, how: dict[str, Any]) -> Any:
    run, fresh = Run(**how), Run(**how)
    if run.kind == "attach":  # so that torch's optimizer has a state to load into
        run.train(rank, 0, 1)
    state = torchs_state(run)
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    plain_module(fresh.model).load_state_dict(state["model"])
    if run.kind == "attach":
        fresh.optimizer.load_state_dict(state["optimizer"])
    fresh.owner.load_state_dict(thinwire.load_per_rank(folder / "checkpoint", "owner"))
    fresh.train(rank, 15, 20)
    return fresh.bits()


@pytest.mark.parametrize("name", HOW)
def test_a_run_goes_on_with_the_same_bits(ranks: RankPool, tmp_path: Path, name: str) -> None:
    whole = ranks.run(save, 2, tmp_path, HOW[name])
    assert ranks.run(load, 2, tmp_path, HOW[name]) == whole


def load_elsewhere(rank: int, world_size: int, folder: Path, how: dict[str, Any]) -> int:
    run = Run(**how)
    run.owner.load_state_dict(thinwire.load_per_rank(folder / "checkpoint", "owner"))
    with raises(ValueError, "'nothing'", "model", "owner"):
        thinwire.load_per_rank(folder / "checkpoint", "nothing")
    return int(run.sync.steps)


def test_a_run_goes_on_with_another_number_of_ranks_and_a_wrong_key_is_an_error(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(save, 2, tmp_path, HOW["AdamW"])
    assert ranks.run(load_elsewhere, 3, tmp_path, HOW["AdamW"]) == [15, 15, 15]
