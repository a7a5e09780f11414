"""`thinwire train --config FILE`: options in a file, which the command line overrides; errors name the nearest one."""

import json
from pathlib import Path

import pytest

from support.training_runs import SMALL, assert_same_weights, changed, train
from thinwire.testing import RankPool
from thinwire.tools import cli
from thinwire.tools.train.command import Options
from thinwire.tools.train.config import RECIPES, Config, defaults, read_config

TOML = """
# A comment.
recipe = "text-gpt"
steps = 40
lr = 1e-3
weight_decay = 0
compressor = "topk:ratio=1/64,bits=2"
resume = "no"
compare_dense = true
out = "runs/mine"
data_dir = "elsewhere"
log_to = ["tensorboard", "wandb-offline"]
keep = 5
"""
GIVEN = {
    "recipe": "text-gpt", "steps": 40, "lr": 1e-3, "weight_decay": 0, "compressor": "topk:ratio=1/64,bits=2",
    "resume": "no", "compare_dense": True, "out": "runs/mine", "data_dir": "elsewhere",
    "log_to": ["tensorboard", "wandb-offline"], "keep": 5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("thinwire.tools.train.launch.Workers", None)  # nothing is trained in this process


def put(content: object, name: str = "mine.json") -> str:
    Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
    return name


def test_toml_and_json_give_the_same_options() -> None:
    """The rest is the recipe's, which the file may name."""
    expected = changed(
        RECIPES["text-gpt"], steps=40, lr=1e-3, weight_decay=0, compressor="topk:ratio=1/64,bits=2", compare_dense=True,
        out=Path("runs/mine"), data_dir=Path("elsewhere"), log_to=("tensorboard", "wandb-offline"), keep=5,
    )  # fmt: skip
    for name in (put(TOML, "mine.toml"), put(GIVEN)):
        assert defaults(["--config", name]) == defaults([f"--config={name}"]) == expected, name


def test_the_command_line_overrides_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    name = put({"recipe": "text-gpt", "steps": 40, "seed": 3, "compare_dense": True})
    made: list[Config] = []
    monkeypatch.setattr("thinwire.tools.train.launch.launch", lambda config: made.append(config) or 0)
    monkeypatch.setattr("thinwire.testing.server.start", lambda: None)
    assert cli.main(["train", "--seed", "4", "--config", name, "--no-compare-dense"]) == 0
    assert made == [changed(RECIPES["text-gpt"], steps=40, seed=4)]
    assert cli.main(["train", "--config", name, "--recipe", "mnist-cnn"]) == 0
    assert (made[1].recipe, made[1].data, made[1].steps, made[1].seed) == ("mnist-cnn", "mnist", 40, 3)
    assert Options.defaults([]).config is None


def test_the_config_of_a_run_starts_the_same_run_in_another_folder(ranks: RankPool, tmp_path: Path) -> None:
    config = changed(SMALL, out=Path("first"), steps=6, keep=1, seed=5)
    assert train(ranks, 2, config, tmp_path).finished
    assert train(ranks, 2, defaults(["--config", "first/config.json"]), tmp_path).finished
    assert_same_weights(tmp_path / "runs/digits-cnn", tmp_path / "first")
    again = json.loads((tmp_path / "runs/digits-cnn/config.json").read_text())
    assert {**again, "out": "first"} == json.loads((tmp_path / "first/config.json").read_text())


def test_a_resumed_run_has_its_own_options_where_the_file_has_none() -> None:
    Path("run").mkdir()
    Path("run/config.json").write_text(json.dumps(changed(SMALL, out=Path("run")).record()))
    name = put({"out": "run", "resume": "auto", "steps": 90})
    expected = changed(SMALL, out=Path("run"), resume="auto", steps=90)
    assert defaults(["--config", name]) == expected
    assert defaults(["--config", put({"steps": 90}), "--resume", "auto", "--out", "run"]) == expected


def test_only_beside_metrics_is_a_config_that_of_a_run() -> None:
    put({"out": "elsewhere", "resume": "auto"}, "config.json")
    assert read_config(Path("config.json")) == {"out": Path("elsewhere"), "resume": "auto"}
    Path("metrics.jsonl").touch()
    assert read_config(Path("config.json")) == {}


def test_what_does_not_fit_is_named() -> None:
    for content, message in [
        ({"wieght_decay": 0.1}, "unknown option 'wieght_decay'; did you mean weight_decay?"),
        ({"weight-decay": 0.1}, "unknown option 'weight-decay'; did you mean weight_decay?"),
        ({"batch_size": 8}, "unknown option 'batch_size'; did you mean batch?"),
        ({"steps": "3"}, "steps is '3', expected a whole number"),
        ({"steps": 3.5}, "steps is 3.5, expected a whole number"),
        ({"steps": True}, "steps is True, expected a whole number"),
        ({"steps": None}, "steps is None, expected a whole number"),
        ({"lr": "fast"}, "lr is 'fast', expected a number"),
        ({"lr": 10**400}, "int too large to convert to float"),
        ({"compare_dense": 1}, "compare_dense is 1, expected true or false"),
        ({"log_to": "none"}, "log_to is 'none', expected a list of texts"),
        ({"log_to": [1]}, "log_to is [1], expected a list of texts"),
        ({"out": 3}, "out is 3, expected text or nothing"),
        ({"data": "mnits"}, "data is 'mnits', expected digits, text, mnist, fashion-mnist, cifar10"),
        ({"data": ["mnist"]}, "data is ['mnist'], expected digits, text, mnist, "),
        ([1], "a list, expected options with their values"),
        ("", "Expecting value"),
        ("[" * 100_000, "recursion"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=r"^--config mine\.json: ") as caught:
            read_config(Path(put(content)))
        assert message in str(caught.value)
    for name, content, message in [
        ("mine.toml", "steps: 3", "mine.toml: Expected '='"),
        ("mine.toml", "steps = 1979-05-27", "steps is datetime.date(1979, 5, 27), expected a whole number"),
        ("mine.yaml", "steps: 3", "YAML is not read any more: write the options as TOML (steps = 100) or JSON"),
        ("mine.txt", "", "the name ends in .txt, expected .json or .toml"),
        (".", None, "--config . cannot be read (Is a directory)"),
        ("absent.json", None, "--config absent.json cannot be read (No such file or directory)"),
    ]:
        if content is not None:
            put(content, name)
        with pytest.raises(ValueError, match=r"^--config ") as caught:
            read_config(Path(name))
        assert message in str(caught.value)
    Path("bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"--config bytes\.json: "):
        read_config(Path("bytes.json"))


def test_a_wrong_file_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    for content, message in [
        ({"keep": 0}, "keep 0, expected 1 or more"),
        ('{"weight_decay": NaN}', "weight_decay nan, expected 0 or more"),
        ("{", "--config mine.json: Expecting property name"),
    ]:
        assert cli.main(["train", "--config", put(content)]) == 2
        output = capfd.readouterr()
        assert (output.out, output.err.count("\n")) == ("", 1), output.err
        assert output.err.startswith(f"thinwire train: error: {message}")
