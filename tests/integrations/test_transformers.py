"""The Trainer of Transformers, started by torchrun: the same as a plain loop, bit for bit, also after a resume."""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from support.frameworks.runs import PROGRAMS, Trained, environment, require, trained_by
from support.training_runs import TORCHRUN, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained_by("transformers", tmp_path_factory.mktemp("transformers") / "run")


def test_training_is_that_of_a_plain_loop(trained: Trained, plain: Trained) -> None:
    trained.assert_like_plain(plain)


def test_a_gpt2_learns_with_the_arguments_that_transformers_has(trained: Trained) -> None:
    """Clipping by max_grad_norm, which thinwire does, accumulation and bfloat16."""
    losses, norms = trained.result["gpt2"], trained.result["norms"]
    assert losses[-1] < 0.7 * losses[0], losses
    assert trained.result["gpt2_steps"] == 40, "one exchange for two batches"
    assert trained.result["max"] == 1.0
    assert all(0.01 < norm < 100 for norm in norms), norms
    trained.assert_same("gpt2")


REFUSED = {
    "optimizers": "options of thinwire.AdamW go into optimizer_cls_and_kwargs=",
    "optim": "optim='sgd'",
    "optim of 8 bits": "optim='adamw_torch_8bit'",
    "optim_args": "optim_args='foreach=True'",
    "auto_find_batch_size": "auto_find_batch_size=True",
    "fsdp": "fsdp in the TrainingArguments",
    "deepspeed": "deepspeed in the TrainingArguments",
}


def test_what_the_trainer_cannot_do_is_refused(trained: Trained) -> None:
    for argument, words in REFUSED.items():
        assert words in trained.result["refused"][argument]


def test_states_of_all_ranks_are_not_loaded_onto_a_gpu(tmp_path: Path) -> None:
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
def test_each_node_saves_and_a_compiled_model_is_trained(tmp_path: Path) -> None:
    """Both have the weights of a training without, and go on from what was saved."""
    found = trained_by("transformers", tmp_path / "run", 20, "others")
    for name in ("each-node", "each-node-resumed", "compiled-resumed", "compiled"):
        found.assert_same(name, as_name="each-node")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(sys.executable,), (*TORCHRUN, "--standalone")], ids=["python", "torchrun"])
def test_one_process_trains_with_any_launcher(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """Accelerate makes the model DDP if it is torchrun's, too."""
    require("transformers")
    program = *launcher, PROGRAMS["transformers"][-1]
    done = run(tmp_path, str(tmp_path / "run"), "alone", program=program, **environment())
    assert done.code == 0, done.err
    assert "same bits True" in done.out
