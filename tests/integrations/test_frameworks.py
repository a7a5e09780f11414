"""Training by frameworks, started as their users start them: the same as a plain loop, bit for bit, also resumed."""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from support.frameworks.runs import PROGRAMS, Trained, environment, require, trained_by, trained_plainly
from support.training_runs import TORCHRUN, run
from thinwire.testing import RankPool


@pytest.fixture(scope="module")
def plain(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The training by a plain loop, with which those by frameworks are compared."""
    return trained_plainly(ranks, tmp_path_factory.mktemp("plain") / "run")


def test_accelerate(plain: Trained, tmp_path: Path) -> None:
    """With accumulation and bfloat16, too; clipping by Accelerate is refused."""
    trained = trained_by("accelerate", tmp_path / "run")
    trained.assert_like_plain(plain)
    assert trained.result["accumulated_steps"] == 10, "one exchange for two batches"
    trained.assert_same("accumulated")
    assert "max_grad_norm=" in trained.result["clipped"]


def test_lightning(plain: Trained, tmp_path: Path) -> None:
    trained = trained_by("lightning", tmp_path / "run")
    result = trained.result
    trained.assert_like_plain(plain)
    assert result["accumulated_steps"] == 10, "one exchange for two batches"
    assert sum(result["accumulated"][-4:]) < sum(result["accumulated"][:4])
    trained.assert_same("accumulated")
    # float16 with a GradScaler: steps are skipped on both ranks until the scale is small enough.
    assert result["skipped"] > 0
    assert result["scaled_steps"] == 20 - result["skipped"] > 5
    assert sum(result["scaled"][-4:]) < sum(result["scaled"][:4])
    trained.assert_same("scaled")
    assert "grad_scaler=scaler" in result["without_scaler"]
    assert "max_grad_norm=" in result["clipped"]
    # attach exchanges, and is in checkpoints.
    assert result["attached_bytes"] > 0
    trained.assert_same("attached")
    trained.assert_same("attached-resumed", as_name="attached")
    # A second fit goes on with the residuals of the first, also after a test with a checkpoint; another module
    # starts anew, as do Lightning's optimizers.
    assert result["fitted_again"] == [10, 20, 30, 10]
    assert result["ours_again"] == [10, 20]


REFUSED = {
    "optimizers": "options of thinwire.AdamW go into optimizer_cls_and_kwargs=",
    "optim": "optim='sgd'",
    "optim of 8 bits": "optim='adamw_torch_8bit'",
    "optim_args": "optim_args='foreach=True'",
    "auto_find_batch_size": "auto_find_batch_size=True",
    "fsdp": "fsdp in the TrainingArguments",
    "deepspeed": "deepspeed in the TrainingArguments",
}


def test_transformers(plain: Trained, tmp_path: Path) -> None:
    """A GPT-2 learns, too, with clipping by max_grad_norm, which thinwire does, accumulation and bfloat16."""
    trained = trained_by("transformers", tmp_path / "run")
    trained.assert_like_plain(plain)
    losses, norms = trained.result["gpt2"], trained.result["norms"]
    assert losses[-1] < 0.7 * losses[0], losses
    assert trained.result["gpt2_steps"] == 40, "one exchange for two batches"
    assert trained.result["max"] == 1.0
    assert all(0.01 < norm < 100 for norm in norms), norms
    trained.assert_same("gpt2")
    for argument, words in REFUSED.items():
        assert words in trained.result["refused"][argument]


def test_transformers_loads_states_of_all_ranks_onto_no_gpu(tmp_path: Path) -> None:
    require("transformers")
    from thinwire.frameworks.transformers import Trainer

    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({"name": name, "tensor": torch.ones(3)}, tmp_path / name)
    trainer, optimizer, scheduler = Trainer.__new__(Trainer), Mock(), Mock()
    trainer.optimizer, trainer.lr_scheduler = optimizer, scheduler
    trainer.args = SimpleNamespace(device=torch.device("meta"), world_size=2)  # meta for a GPU
    trainer.is_deepspeed_enabled = trainer.is_fsdp_enabled = trainer.is_fsdp_xla_v1_enabled = False
    trainer._load_optimizer_and_scheduler(None)
    trainer._load_optimizer_and_scheduler(str(tmp_path / "missing"))
    assert not optimizer.load_state_dict.called
    trainer._load_optimizer_and_scheduler(str(tmp_path))
    for name, each in (("optimizer.pt", optimizer), ("scheduler.pt", scheduler)):
        state = each.load_state_dict.call_args.args[0]
        assert (state["name"], state["tensor"].device.type) == (name, "cpu")


@pytest.mark.slow
def test_transformers_on_each_node_compiled_and_alone(tmp_path: Path) -> None:
    """Each node saves; a compiled model: both have the weights of a training without, and go on from what was saved.

    One process trains by any launcher: Accelerate makes the model DDP if it is torchrun's, too.
    """
    found = trained_by("transformers", tmp_path / "run", 20, "others")
    for name in ("each-node", "each-node-resumed", "compiled-resumed", "compiled"):
        found.assert_same(name, as_name="each-node")
    for number, launcher in enumerate(((sys.executable,), (*TORCHRUN, "--standalone"))):
        program = *launcher, PROGRAMS["transformers"][-1]
        done = run(tmp_path, str(tmp_path / f"run {number}"), "alone", program=program, **environment())
        assert done.code == 0, done.err
        assert "same bits True" in done.out
