"""`thinwire train` as a user runs it, with links of a rate: what it shows, and what lies in the folder afterwards."""

import importlib.util
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from support.training_runs import (
    PARAMETERS,
    SMALL,
    Done,
    arguments,
    assert_same_weights,
    changed,
    checkpoints,
    lines,
    logged_steps,
    run,
    train,
    weights,
)
from thinwire import default_compressor
from thinwire.collectives.cost import ring
from thinwire.compressors import format_spec
from thinwire.testing import RankPool
from thinwire.tools import cli
from thinwire.tools.train.metrics import PHASES, reduction
from thinwire.tools.train.models import model_config

HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
CONFIG = changed(SMALL, eval_every=10, log_to=("auto",), compare_dense=True, link="20mbit")


class Ran(NamedTuple):
    cwd: Path
    folder: Path
    done: Done

    @property
    def folders(self) -> tuple[Path, Path]:
        return self.folder, self.folder / "dense"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A whole command behind links, with the dense reference and what is logged if nothing is said."""
    cwd = tmp_path_factory.mktemp("command")
    done = run(cwd, *arguments(CONFIG))
    assert done.code == 0, done.err
    return Ran(cwd, cwd / "runs" / "digits-cnn", done)


def test_the_folder_holds_the_run(ran: Ran) -> None:
    for folder in ran.folders:
        common = {"checkpoints", "config.json", "metrics.jsonl", "weights.pt", *(["tensorboard"] * HAS_TENSORBOARD)}
        own = {"dense", "report.html"} if folder == ran.folder else set()
        assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == common | own
        assert checkpoints(folder) == [25, 30]
        left = [path.name for path in folder.rglob("*") if re.search("partial|new|disk", path.name)]
        assert not left, "nothing that was only needed on the way"


def test_metrics_are_lines_of_known_kinds_in_order(ran: Ran) -> None:
    for folder in ran.folders:
        kinds = [line["kind"] for line in lines(folder)]
        assert (kinds[0], kinds[-1], len(kinds)) == ("conditions", "end", 35)
        assert logged_steps(folder) == list(range(1, 31))
        assert [line["step"] for line in lines(folder, "evaluation")] == [10, 20, 30]
        assert lines(folder, "end")[0]["reason"] == "finished"
        conditions, out = lines(folder)[0], folder.relative_to(ran.cwd)
        dense = {"compressor": "none", "compare_dense": False} if folder != ran.folder else {}
        expected = json.loads(json.dumps(changed(CONFIG, out=out, **dense).record()))
        assert json.loads((folder / "config.json").read_text()) == expected
        assert (conditions["world_size"], conditions["parameters"], conditions["first_step"]) == (2, PARAMETERS, 0)
        assert conditions["config"] == json.loads((folder / "config.json").read_text())
        assert all(json.dumps(line, allow_nan=False) for line in lines(folder))


def test_metrics_say_what_sent_further_bytes(ran: Ran) -> None:
    """Those of a checkpoint and an evaluation are counted with the step after it."""
    for folder in ran.folders:
        expected: dict[int, list[str]] = {step: [] for step in range(1, 31)}
        if folder == ran.folder:
            expected |= {step: ["warm-up"] for step in range(1, 6)}
        for step in (6, 11, 16, 21, 26):
            expected[step] += ["evaluation"] * (step in (11, 21)) + ["checkpoint"]
        if folder == ran.folder:
            expected[16].append("refresh")
        assert {line["step"]: line["events"] for line in lines(folder, "step")} == expected


def test_the_first_step_is_logged(ranks: RankPool, tmp_path: Path) -> None:
    """Also that of a run that goes on: so a curve begins where the run does, and not log_every steps later."""
    config = changed(SMALL, steps=12, log_every=5, checkpoint_every=0, out=Path("run"))
    assert train(ranks, 2, config, tmp_path).finished
    assert logged_steps(tmp_path / "run") == [1, 5, 10, 12]
    assert checkpoints(tmp_path / "run") == [12], "the end is always one"
    assert train(ranks, 2, changed(config, steps=18, resume="auto"), tmp_path).finished
    assert logged_steps(tmp_path / "run") == [1, 5, 10, 12, 13, 15, 18]
    assert lines(tmp_path / "run", "step")[4]["events"] == ["resume"]
    assert [line["step"] for line in lines(tmp_path / "run", "end")] == [18]


def test_times_of_a_step_add_up(ran: Ran) -> None:
    """What is waited for is never more than the step; the phases add up to it, and the speed is computed from it."""
    for folder in ran.folders:
        steps, before = lines(folder, "step"), 0.0
        for line in steps:
            assert set(line["split"]) == set(PHASES)
            assert all(part >= 0 for part in line["split"].values())
            whole = sum(line["split"].values())
            assert 0 < whole <= line["seconds"] - before
            assert line["samples_per_second"] * whole == pytest.approx(2 * CONFIG.batch)
            before = line["seconds"]
        assert lines(folder, "end")[0]["seconds"] >= before


def test_bytes_are_counted(ran: Ran) -> None:
    for folder in ran.folders:
        steps, dense = lines(folder, "step"), ring(4 * PARAMETERS, 2)
        assert [line["bytes_dense"] for line in steps] == [step * dense for step in range(1, 31)]
        sent = [line["bytes_sent"] for line in steps]
        each = [after - before for before, after in zip([0, *sent], sent, strict=False)]
        assert ["reduction_after_warmup" in line for line in steps] == [
            step > (folder == ran.folder) * 5 for step in range(1, 31)
        ]
        if folder != ran.folder:
            assert all(0 <= part - dense < 0.02 * dense for part in each), "and a little to agree"
        else:
            later = lines(folder, "end")[0]["reduction_after_warmup"]
            assert later == pytest.approx(25 * dense / sum(each[5:]), rel=0.05)
            assert max(each[12:]) < min(each[:5]) < dense / 2, "a quarter before the end of the warm-up, then few"


def test_it_learns(ran: Ran) -> None:
    losses = [[line["loss"] for line in lines(folder, "step")] for folder in ran.folders]
    assert losses[0][0] == pytest.approx(losses[1][0]), "both begin with the same weights and data"
    for each in losses:
        assert sum(each[-5:]) < 0.9 * sum(each[:5])
    before, after = model_config(CONFIG.model).build(0).state_dict(), weights(ran.folder)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())


def test_what_is_shown(ran: Ran) -> None:
    shown = [line for line in ran.done.err.splitlines() if line.startswith("step ") and "samples/s" in line]
    assert [line.split()[1] for line in shown] == 2 * [f"{step}/30" for step in range(1, 31)]
    assert ran.done.err.count("validation loss") == 6
    described = f"digits-cnn: {CONFIG.model}, {PARAMETERS:,} parameters, default ({format_spec(default_compressor(2))})"
    assert ran.done.err.startswith("links of 20mbit for each rank, through a relay\n")
    assert ran.done.err.splitlines()[2].startswith(described)
    assert "Warning" not in ran.done.err
    *ends, _, last = ran.done.out.splitlines()
    assert last == "run runs/digits-cnn, report runs/digits-cnn/report.html"
    for text, name, folder in zip(ends, ("default", "dense"), ran.folders, strict=True):
        (end,), (*_, score) = lines(folder, "end"), lines(folder, "evaluation")
        sent = f"{end['bytes_sent'] / 1e6:.2f} MB sent (reduction {reduction(end['bytes_sent'], end['bytes_dense'])})"
        found = f"validation loss {score['loss']:.4f}, accuracy {score['accuracy']:.2%}, {sent} by each rank"
        assert text.startswith(f"{name}: 30 steps in "), text
        assert text.endswith(found), text
    assert "digits-cnn dense" in (ran.folder / "report.html").read_text()


def test_the_pool_trains_to_the_same_weights(ran: Ran, ranks: RankPool, tmp_path: Path) -> None:
    """Which is what other tests compare the command with."""
    assert train(ranks, 2, changed(SMALL, out=Path("run")), tmp_path).finished
    assert_same_weights(tmp_path / "run", ran.folder)


def test_dense_training_waits_for_the_link(ran: Ran) -> None:
    """And the last sentence is that of what metrics.jsonl has of both trainings."""
    ours, dense = (lines(folder, "end")[0] for folder in ran.folders)
    assert dense["seconds"] >= 0.9 * 8 * dense["bytes_sent"] / 20e6, "no more passes than the link carries"
    text = r"^Compared with dense training: ([\d.]+)x as fast, ([\d.]+) % of the bytes, accuracy ([\d.]+)% \(dense "
    found = re.match(text, ran.done.out.splitlines()[-2])
    assert found, ran.done.out
    rounded = {"rel": 0.06, "abs": 0.051}  # to two digits, and below 1 to one
    assert float(found[1]) == pytest.approx(dense["seconds"] / ours["seconds"], **rounded)
    assert float(found[2]) == pytest.approx(100 * ours["bytes_sent"] / dense["bytes_sent"], **rounded)
    assert float(found[3]) == pytest.approx(100 * lines(ran.folder, "evaluation")[-1]["accuracy"], abs=0.06)


# Options.


def test_help_shows_the_defaults_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--recipe", "text-gpt"], ["--recipe=text-gpt"]):
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main(["train", *given, "--help"])
        text = "".join(capsys.readouterr().out.replace("│", " ").split())  # lines are broken at commas too
        for default in ("text-gpt", "gpt:layers=4,width=128,heads=4,context=64", "600", "text"):
            assert f"(default:{default})" in text, default
