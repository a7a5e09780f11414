"""Options of a command line, a file, or the run that is resumed; what cannot be trained is an error of one line."""

import json
import math
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.disks import small_disk
from support.training_faults import FullDisk, InSteps
from support.training_runs import SMALL, assert_same_weights, changed, checkpoints, logged_steps, train
from thinwire.testing import RankPool
from thinwire.tools import cli
from thinwire.tools.train.checks import check
from thinwire.tools.train.command import Options
from thinwire.tools.train.config import RECIPES, Config, defaults, newest_run, read_config
from thinwire.tools.train.rank import choose_folder

RUN = Path("run")


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
    for name in (put(TOML, "mine.toml"), put(tomllib.loads(TOML))):
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


def test_a_resumed_run_has_its_own_options_where_the_file_has_none() -> None:
    Path("run").mkdir()
    Path("run/config.json").write_text(json.dumps(changed(SMALL, out=Path("run")).record()))
    name = put({"out": "run", "resume": "auto", "steps": 90})
    expected = changed(SMALL, out=Path("run"), resume="auto", steps=90)
    assert defaults(["--config", name]) == expected
    assert defaults(["--config", put({"steps": 90}), "--resume", "auto", "--out", "run"]) == expected


def test_what_does_not_fit_is_named() -> None:
    for name, content, message in [
        ("mine.json", {"wieght_decay": 0.1}, "unknown option 'wieght_decay'; did you mean weight_decay?"),
        ("mine.json", {"weight-decay": 0.1}, "unknown option 'weight-decay'; did you mean weight_decay?"),
        ("mine.json", {"steps": "3"}, "steps is '3', expected a value such as 300"),
        ("mine.json", {"steps": True}, "steps is True, expected a value such as 300"),
        ("mine.json", {"lr": "fast"}, "lr is 'fast', expected a value such as 0.001"),
        ("mine.json", {"lr": 10**400}, "int too large to convert to float"),
        ("mine.json", {"compare_dense": 1}, "compare_dense is 1, expected a value such as false"),
        ("mine.json", {"log_to": "none"}, "log_to is 'none', expected a value such as"),
        ("mine.json", {"log_to": [1]}, "log_to is [1], expected a value such as"),
        ("mine.json", {"out": 3}, "out is 3, expected a value such as null"),
        ("mine.json", {"data": "mnits"}, "data is 'mnits', expected digits, text, mnist, fashion-mnist, cifar10"),
        ("mine.json", [1], "expected options with their values, got a list"),
        ("mine.json", "", "Expecting value"),
        ("mine.json", "[" * 100_000, "recursion"),
        ("mine.toml", "steps: 3", "Expected '='"),
        ("mine.yaml", "steps: 3", "expected a file of TOML (steps = 100) or JSON"),
        (".", None, "Is a directory"),
        ("absent.json", None, "No such file or directory"),
    ]:  # fmt: skip
        if content is not None:
            put(content, name)
        with pytest.raises(ValueError, match=f"^config {name}: ") as caught:
            read_config(Path(name))
        assert message in str(caught.value)


# What cannot be trained.


WRONG: list[tuple[dict[str, object], str]] = [
    ({"steps": 0}, "--steps 0, expected 1 to 1,099,511,627,776"),
    ({"workers": 1000}, "--workers 1000, expected 1 to 64"),
    ({"log_every": 0}, "log_every 0, expected 1 to "),
    ({"eval_every": -5}, "--eval-every -5, expected 0 to "),
    ({"seed": 2**70}, "--seed 1180591620717411303424, expected 0 to "),
    ({"warmup_steps": 0}, "--warmup-steps 0 with default"),
    ({"lr": math.nan}, "--lr nan, expected a number above 0"),
    ({"lr": math.inf}, "--lr inf, expected a number above 0"),
    ({"compressor": "zip"}, "compressor 'zip' in 'zip' is unknown"),
    ({"model": "bert"}, "model 'bert' in 'bert' is unknown"),
    ({"model": "cnn:size=28"}, "model cnn takes 1 x 28 x 28, and digits has 1 x 8 x 8"),
    ({"log_to": ("everywhere",)}, "--log-to everywhere, expected none, or some of"),
    ({"log_to": ("none", "auto")}, "--log-to none auto, expected none, or some of"),
    ({"local_steps": 8, "compressor": "auto"}, "--local-steps with --compressor auto"),
    ({"local_steps": 8, "model": "gpt", "data": "text", "shard": 2}, "--local-steps with --shard: each rank"),
    ({"link": "1gbit", "device": "cuda"}, "--device cuda, but torch finds no CUDA device here"),
    ({"link": "1gbit", "download": True}, "--link with --device cuda, --shard, --download or"),
]


def test_wrong_options_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for given, message in WRONG:
        with pytest.raises(ValueError, match=re.escape(message)):
            check(changed(SMALL, **given))
    monkeypatch.setenv("THINWIRE_MAX_BYTES", "banana")
    with pytest.raises(ValueError, match="THINWIRE_MAX_BYTES='banana', expected bytes"):
        check(SMALL)


def test_wrong_usage_is_one_line_before_any_rank_is_started(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for given, message in [
        (["--steps", "many"], "--steps"),
        (["--steps", "0"], "--steps 0, expected 1 to "),
        (["--optimizer", "lion"], "'lion'"),
        (["--device", "mps"], "'mps' for argument '--device'. Expected one of ('auto', 'cpu', 'cuda')"),
        (["--weight-decay", "0"], "--weight-decay"),
        (["surplus"], "surplus"),
        (["--link", "fast"], "rate 'fast', expected bits per second"),
        (["--link", "10gbit"], "expected 100 kbit/s to 2 Gbit/s through a relay"),
        (["--link", "1gbit", "--recipe", "text-gpt", "--workers", "4", "--shard", "2"], "--link with --device cuda, "),
    ]:
        assert cli.main(["train", *given]) == 2, given
        output = capfd.readouterr()
        assert (output.out, output.err.count("\n")) == ("", 1), output
        assert output.err.startswith("thinwire train: error: ")
        assert message in output.err
    assert not list(tmp_path.iterdir())


def test_data_that_is_not_there_is_an_error_that_leaves_no_folder(ranks: RankPool, tmp_path: Path) -> None:
    """Found by the ranks; the parent shows the error of one."""
    (tmp_path / "data").mkdir()
    ended = train(ranks, 2, changed(RECIPES["mnist-cnn"], device="cpu"), tmp_path)
    assert ended.error is not None
    assert re.match("data has no train-images.*--download$", ended.error)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_folder_that_cannot_be_made_is_one_line(ranks: RankPool, tmp_path: Path) -> None:
    """The same on all ranks, by the word of rank 0."""
    (tmp_path / "a-file").touch()
    for out in ("/proc/run", "a-file/run"):
        ended = train(ranks, 2, changed(SMALL, out=Path(out)), tmp_path)
        assert ended.error is not None
        assert re.match(rf"\[Errno \d+\] .*: '{out}'$", ended.error)


# A disk that is full.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MB."""
    with ExitStack() as stack:
        try:
            path = stack.enter_context(small_disk(tmp_path / "disk"))
        except PermissionError as error:
            if os.environ.get("CI"):  # where nobody would see that it is skipped
                raise
            pytest.skip(str(error))
        yield path


def test_a_full_disk_is_one_line_and_the_run_goes_on_once_there_is_room(
    disk: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Room for two checkpoints and a bit; the third is kept until it is whole, and so finds none."""
    config = changed(SMALL, out=RUN, keep=50)
    assert train(ranks, 2, config, tmp_path).finished
    ballast = disk / "ballast"
    ended = train(ranks, 2, config, disk, InSteps(FullDisk(rank=0, step=13, path=ballast)))
    assert ended.error is not None
    assert re.match("the checkpoint could not be written by rank .*No space left", ended.error)
    assert checkpoints(disk / RUN) == [5, 10]
    ballast.unlink()
    ended = train(ranks, 2, defaults(["--resume", "auto", "--out", str(disk / RUN)]), disk)
    assert ended.finished, ended
    assert "resuming from step 10" in ended.err
    assert_same_weights(disk / RUN, tmp_path / RUN)
    assert logged_steps(disk / RUN) == list(range(1, 31))


# Folders.


def test_folders_are_named_by_the_recipe_and_numbered() -> None:
    made = [choose_folder(changed(SMALL, recipe=recipe)) for recipe in ("digits-cnn", "text-gpt", *["digits-cnn"] * 2)]
    assert [str(path) for path in made] == [
        "runs/digits-cnn", "runs/text-gpt", "runs/digits-cnn-2", "runs/digits-cnn-3",
    ]  # fmt: skip
    assert all(path.is_dir() for path in made)
    assert choose_folder(changed(SMALL, out=Path("a/b/c"))).is_dir()


def put_config(folder: Path, at: float, **more: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({**changed(SMALL, out=folder).record(), **more}))
    os.utime(path, (at, at))


def test_the_config_of_a_run_starts_another_run() -> None:
    """In a folder of its own. Only beside metrics is a config.json that of a run."""
    put_config(Path("run"), 0, seed=5, resume="auto")
    given = ["--config", "run/config.json", "--resume", "no"]
    assert defaults(given) == changed(SMALL, seed=5, out=RUN, resume="auto")
    Path("run/metrics.jsonl").touch()
    assert defaults(given) == changed(SMALL, seed=5)


def test_options_that_are_not_given_are_those_of_the_newest_run() -> None:
    assert defaults(["--resume", "auto"]) == Config(), "there is no run yet"
    put_config(Path("runs/digits-cnn-2"), 3000, seed=1)
    put_config(Path("runs/digits-cnn"), 1000, seed=2)
    put_config(Path("runs/text-gpt"), 2000, seed=3, recipe="text-gpt")
    put_config(Path("elsewhere"), 4000, seed=4)
    for given, folder, seed in [
        ([], "runs/digits-cnn-2", 1),
        (["--recipe", "text-gpt"], "runs/text-gpt", 3),
        (["--recipe=digits-cnn"], "runs/digits-cnn-2", 1),
        (["--out", "elsewhere"], "elsewhere", 4),
        (["--out=runs/digits-cnn"], "runs/digits-cnn", 2),
    ]:
        config = defaults(["--resume", "auto", *given])
        assert (config.out, config.seed, config.resume) == (Path(folder), seed, "auto")
        assert (config.steps, config.log_to) == (SMALL.steps, SMALL.log_to)
    assert defaults(["--out", "elsewhere"]) == Config(), "only a run that is resumed gives its options"
    assert defaults(["--resume", "auto", "--out", "new"]) == Config()
    assert newest_run("mnist-cnn") is None


def test_a_config_that_is_damaged_is_named(tmp_path: Path) -> None:
    """Or has values of other types than the options."""
    put_config(tmp_path, 0)
    good = json.loads((tmp_path / "config.json").read_text())
    for content in (
        b"", b"[]", b"{}", b'{"steps": 3}', b"a", b"[" * 100_000, b"9" * 10_000, b"[[1], {}]", b"\xff\xfe",
        *(json.dumps({**good, name: value}).encode() for name, value in (
            ("steps", 3.5), ("log_to", 3.5), ("log_to", ["none", 3.5]), ("log_to", [["none"]]), ("model", 3.5),
        )),
    ):  # fmt: skip
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=f"^(config )?{tmp_path}/config.json: "):
            defaults(["--resume", "auto", "--out", str(tmp_path)])
