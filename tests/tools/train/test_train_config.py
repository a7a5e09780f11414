"""`thinwire train --config FILE`: options in a file, which the command line overrides; errors name the nearest one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.training_runs import SMALL, assert_same_weights, changed, train
from thinwire.testing import RankPool
from thinwire.tools import cli
from thinwire.tools.train.command import Options
from thinwire.tools.train.config import Config
from thinwire.tools.train.options import RECIPES, defaults, read_config

YAML = """
# A comment.
recipe: text-gpt
steps: 40
lr: 1e-3          # text by the rules of YAML 1.1
weight_decay: 0
compressor: topk:ratio=1/64,bits=2
resume: no        # false by them
compare_dense: true
out: runs/mine
data_dir: elsewhere
log_to: [tensorboard, wandb-offline]
keep: 5
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


@pytest.mark.parametrize("name", ["mine.yaml", "mine.yml", "mine.json"])
def test_the_same_options_by_either_format(name: str) -> None:
    """The rest is the recipe's, which the file may name."""
    put(GIVEN if name.endswith("json") else YAML, name)
    expected = changed(
        RECIPES["text-gpt"], steps=40, lr=1e-3, weight_decay=0, compressor="topk:ratio=1/64,bits=2", compare_dense=True,
        out=Path("runs/mine"), data_dir=Path("elsewhere"), log_to=("tensorboard", "wandb-offline"), keep=5,
    )  # fmt: skip
    assert defaults(["--config", name]) == expected
    assert defaults([f"--config={name}"]) == expected


def test_the_command_line_overrides_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    name = put({"recipe": "text-gpt", "steps": 40, "seed": 3, "compare_dense": True})
    made: list[Config] = []
    monkeypatch.setattr("thinwire.tools.train.launch.launch", lambda config, _: made.append(config) or 0)
    monkeypatch.setattr("thinwire.testing.server.start", lambda: None)
    assert cli.main(["train", "--seed", "4", "--config", name, "--no-compare-dense"]) == 0
    assert made == [changed(RECIPES["text-gpt"], steps=40, seed=4)]
    assert cli.main(["train", "--config", name, "--recipe", "mnist-cnn"]) == 0
    assert (made[1].recipe, made[1].data, made[1].steps, made[1].seed) == ("mnist-cnn", "mnist", 40, 3)
    assert Options.defaults([]).config is None


def test_a_run_goes_again_by_its_own_config(ranks: RankPool, tmp_path: Path) -> None:
    """In a folder of its own, to the same weights."""
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


def test_the_config_of_a_run_that_is_not_there_yet_keeps_its_folder() -> None:
    """Only beside metrics is it that of a run."""
    put({"out": "elsewhere", "resume": "auto"}, "config.json")
    assert read_config(Path("config.json")) == {"out": Path("elsewhere"), "resume": "auto"}
    Path("metrics.jsonl").touch()
    assert read_config(Path("config.json")) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"wieght_decay": 0.1}, "unknown option 'wieght_decay'; did you mean weight_decay?"),
        ({"weight-decay": 0.1}, "unknown option 'weight-decay'; did you mean weight_decay?"),
        ({"learning_rate": 0.1}, "unknown option 'learning_rate'; did you mean lr?"),
        ({"batch_size": 8}, "unknown option 'batch_size'; did you mean batch?"),
        ({"step": 3}, "unknown option 'step'; did you mean steps?"),
        ({"steps": "3"}, "steps is '3', expected int"),
        ({"steps": 3.5}, "steps is 3.5, expected int"),
        ({"steps": True}, "steps is True, expected int"),
        ({"steps": None}, "steps is None, expected int"),
        ({"lr": "fast"}, "lr is 'fast', expected int or float"),
        ({"compare_dense": 1}, "compare_dense is 1, expected true or false"),
        ({"log_to": "none"}, "log_to is 'none', expected a list of texts"),
        ({"log_to": [1]}, "log_to is [1], expected a list of texts"),
        ({"out": 3}, "out is 3, expected text or nothing"),
        ({"data": "mnits"}, "data is 'mnits', expected one of digits, text, mnist, fashion-mnist, "),
        ({"data": "mnits"}, "; did you mean mnist?"),
        ({"recipe": "text_gpt"}, "did you mean text-gpt?"),
        ({"steps": 0}, "--steps 0, expected 1 or more"),
        ({"weight_decay": -0.1}, "error: weight_decay -0.1, expected 0 or more"),
        ('{"weight_decay": NaN}', "error: weight_decay nan, expected 0 or more"),
        ({"keep": 0}, "error: keep 0, expected 1 or more"),
        ({"log_every": 0}, "error: log_every 0, expected 1 or more"),
        ({"lr": 10**400}, "lr is a whole number of 401 digits, expected a float"),
        ({"steps": 10**400}, ", expected at most 2**40"),
        ([1], "list, expected options with their values"),
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ('{"steps": 3, "steps": 4}', "'steps' is given twice"),
        ("[" * 100_000, "recursion"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(content: object, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--config", put(content)]) == 2
    assert_one_line(capfd, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("steps: 3\nsteps: 4\n", "'steps' is given twice"),
        ("stesp: 3", "unknown option 'stesp'; did you mean steps?"),
        ("steps", "str, expected options with their values"),
        ("", "NoneType, expected options"),
        ("a: [", "not YAML: "),
        ("steps: !!python/object/apply:os.getcwd []", "not YAML: could not determine a constructor"),
        ("1: 2", "unknown option 1; did you mean "),
        ("? [a]\n: 2", "unhashable"),
        ("compare_dense: yes", "compare_dense is 'yes', expected true or false"),
        ("compare_dense: truest", "compare_dense is 'truest', expected true or false"),
        ("steps: 1e2", "steps is 100.0, expected int"),
    ],
)
def test_yaml_that_does_not_fit_is_one_line(content: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing but plain values is made of it."""
    assert cli.main(["train", "--config", put(content, "mine.yaml")]) == 2
    assert_one_line(capfd, message, "mine.yaml")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("absent.json", "--config absent.json cannot be read (No such file or directory)"),
        (".", "--config . cannot be read (Is a directory)"),
        ("mine.toml", "mine.toml ends in .toml, expected .json, .yaml or .yml"),
    ],
)
def test_files_that_are_none(given: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    put("", "mine.toml")
    assert cli.main(["train", "--config", given]) == 2
    assert_one_line(capfd, message)
    Path("bytes.json").write_bytes(b"\xff\xfe")
    assert cli.main(["train", "--config", "bytes.json"]) == 2
    assert_one_line(capfd, "--config bytes.json: ")


def test_yaml_without_its_package_says_what_to_install() -> None:
    """JSON needs none."""
    script = "import sys; sys.modules['yaml'] = None\nfrom thinwire.tools.cli import main\nsys.exit(main(sys.argv[1:]))"
    for name in (put("stesp: 3", "mine.yaml"), put({"stesp": 3})):
        command = [sys.executable, "-c", script, "train", "--config", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        found = "mine.yaml needs PyYAML: pip install 'thinwire[yaml]', or write it as JSON" in done.stderr
        assert found is name.endswith("yaml"), done.stderr


def assert_one_line(capfd: pytest.CaptureFixture[str], message: str, file: str = "") -> None:
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err
    assert output.err.startswith("thinwire train: error: ")
    assert message in output.err
    assert file in output.err
