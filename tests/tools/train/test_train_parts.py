"""What stands beside the loop: TensorBoard and Weights & Biases, lines of metrics."""

import importlib.util
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.training_runs import SMALL, changed, lines, train
from thinwire.testing import RankPool
from thinwire.tools.place import Place
from thinwire.tools.train.config import RECIPES
from thinwire.tools.train.learner import Learner
from thinwire.tools.train.metrics import Metrics, chosen_sinks

RUN = Path("run")


def need(package: str) -> None:
    """Skip without it, but not where nobody would see it."""
    if importlib.util.find_spec(package) is None:
        assert not os.environ.get("CI"), f"{package} is not installed"
        pytest.skip(f"{package} is not installed")


def assert_drawn_as_written(folder: Path) -> None:
    """What TensorBoard would draw."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for kind, name in (("step", "loss"), ("step", "lr"), ("step", "bytes_sent"), ("evaluation", "accuracy")):
        drawn = [(event.step, event.value) for event in events.Scalars(f"{kind}/{name}")]
        written = [(line["step"], pytest.approx(line[name])) for line in lines(folder, kind)]
        assert drawn == written, name
    assert events.Scalars("step/split/compute")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_draws_each_step_once_after_a_resume_too(ranks: RankPool, tmp_path: Path) -> None:
    need("tensorboard")
    config = changed(SMALL, out=RUN, log_to=("auto",), eval_every=4, steps=12, keep=9, checkpoint_every=4)
    assert train(ranks, 2, config, tmp_path).finished
    assert_drawn_as_written(tmp_path / RUN)
    for later in (8, 12):
        shutil.rmtree(tmp_path / RUN / "checkpoints" / f"step-{later:08}")
    assert train(ranks, 2, changed(config, resume="auto"), tmp_path).finished
    assert len(list((tmp_path / RUN / "tensorboard").iterdir())) == 2
    assert_drawn_as_written(tmp_path / RUN)
    shutil.rmtree(tmp_path / RUN / "checkpoints")  # as if it was killed before the first one
    assert train(ranks, 2, changed(config, resume="auto"), tmp_path).finished
    assert_drawn_as_written(tmp_path / RUN)


def test_wandb_writes_into_the_folder_without_a_network(ranks: RankPool, tmp_path: Path) -> None:
    need("wandb")
    config = changed(SMALL, out=RUN, log_to=("wandb-offline",), steps=2)
    assert train(ranks, 1, config, tmp_path).finished
    identity = (tmp_path / RUN / "wandb-id").read_text()
    assert identity.startswith("run-")
    (written,) = (tmp_path / RUN / "wandb").glob(f"offline-run-*/run-{identity}.wandb")
    assert written.stat().st_size > 0


def test_sinks_are_chosen_by_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in ([], ["tensorboard"], ["tensorboard", "wandb"]):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, there=installed: name if name in there else None)
        assert chosen_sinks(["auto"]) == installed[:1]
        assert chosen_sinks(["none"]) == []
        for name in ("tensorboard", "wandb", "wandb-offline"):
            if name.partition("-")[0] in installed:
                assert sorted({*chosen_sinks([name]), *chosen_sinks(["auto", name])}) == sorted({name, "tensorboard"})
            else:
                with pytest.raises(ValueError, match=f"--log-to {name}, but .* is not installed: pip install"):
                    chosen_sinks([name])


# Lines of metrics.


def test_metrics_that_come_again_are_cut_off(tmp_path: Path) -> None:
    def write(first_step: int, *steps: int, reason: str = "") -> None:
        metrics = Metrics(tmp_path, SMALL, first_step, {"world_size": 2})
        for step in steps:
            metrics.write("step", {"step": step, "loss": math.nan, "split": {"wait": math.inf}})
        if reason:
            metrics.write("end", {"step": steps[-1], "reason": reason})
        metrics.close()

    def read() -> list[object]:
        return [line.get("step", line["kind"]) for line in lines(tmp_path)]

    write(0, 1, 2, 3, 4, 5)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "ste')
    write(3, 4, 5, 6, reason="stopped")
    assert read() == ["conditions", 1, 2, 3, "conditions", 4, 5, 6, 6]
    assert lines(tmp_path)[1] == {"kind": "step", "step": 1, "loss": None, "split": {"wait": None}}
    write(6, 7)
    assert read() == ["conditions", 1, 2, 3, "conditions", 4, 5, 6, 6, "conditions", 7], "the end at step 6 stays"
    write(7, 8, reason="finished")
    write(8, 9)
    assert read()[-4:] == ["conditions", 8, "conditions", 9], "a run that goes on has not finished"
    write(2, 3)
    assert read() == ["conditions", 1, 2, "conditions", 3]
    write(0)
    assert read() == ["conditions", "conditions"]


def test_lines_of_metrics_that_are_damaged_are_left_out(tmp_path: Path) -> None:
    """A disk that lost power may have anything in a file's last block."""
    path, good = tmp_path / "metrics.jsonl", b'{"kind": "step", "step": 1}'
    for damage in (b"\0\0\0", b'{"kind": "step", "st', b"\xff\xfe", b"", b'{"kind": "step"}'):
        path.write_bytes(good + b"\n" + damage + b"\n" + damage)
        Metrics(tmp_path, SMALL, 2, {}).close()
        kept = [line for line in path.read_bytes().splitlines() if line != b'{"kind": "step"}']
        assert kept[0] == good
        assert [json.loads(line)["kind"] for line in kept] == ["step", "conditions"], damage


# Where a rank is.


def test_a_place_is_what_torchrun_says() -> None:
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Place.of_torchrun(given) == Place(5, 8, 1, 4)
    assert Place.of_torchrun({}) is Place.of_torchrun({"RANK": "0"}) is None
    assert Place.of_torchrun({"RANK": "1", "WORLD_SIZE": "2"}) == Place(1, 2, 0, 1)


# Evaluation.


def evaluate_averages(rank: int, world_size: int) -> None:
    config = changed(RECIPES["cifar10-resnet18"], model="resnet18:width=4", device="cpu")
    learner = Learner(config, torch.device("cpu"))
    floats = [buffer for buffer in learner.model.buffers() if buffer.is_floating_point()]
    for buffer in floats:
        buffer.fill_(rank + 1)
    learner._module.eval()(torch.zeros(1, 3, 32, 32))  # DDP's forward pass sends no buffers
    learner._module.train()

    def total(numbers: list[float]) -> list[float]:
        summed = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(summed)
        return summed.tolist()

    with learner.evaluating(total):
        assert not learner.model.training
        assert all((buffer == 1.5).all() for buffer in floats)
    assert learner.model.training
    assert all((buffer == rank + 1).all() for buffer in floats)


def test_evaluation_has_the_means_over_ranks_of_running_statistics(ranks: RankPool) -> None:
    ranks.run(evaluate_averages, 2)
