"""What cannot be trained is an error of one line, and leaves nothing behind."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.disks import small_disk
from support.training_faults import FullDisk, InSteps
from support.training_runs import (
    SMALL,
    Done,
    arguments,
    assert_one_line,
    assert_same_weights,
    changed,
    checkpoints,
    logged_steps,
    planted,
    run,
    train,
)
from thinwire.testing import RankPool
from thinwire.tools import cli
from thinwire.tools.train.config import Config, defaults, load_config, newest_run
from thinwire.tools.train.folder import choose_folder, locked

RUN = Path("run")
CONFIG = changed(SMALL, out=RUN)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--steps", "0"], "--steps 0, expected 1 or more"),
        (["--steps", "many"], "--steps"),
        (["--steps", "1.5"], "--steps"),
        (["--steps"], "--steps"),
        (["--batch", "-1"], "--batch -1, expected 1 or more"),
        (["--workers", "0"], "--workers 0, expected 1 or more"),
        (["--workers", "1000"], "--workers 1000, expected at most 64"),
        (["--eval-every", "-5"], "--eval-every -5, expected 0 or more"),
        (["--checkpoint-every", "-5"], "--checkpoint-every -5, expected 0 or more"),
        (["--warmup-steps", "-1"], "--warmup-steps -1, expected 0 or more"),
        (["--warmup-steps", "0"], "--warmup-steps 0 with default"),
        (["--seed", "-1"], "--seed -1, expected 0 or more"),
        (["--seed", str(2**70)], "--seed"),
        (["--lr", "0"], "--lr 0, expected a number above 0"),
        (["--lr", "nan"], "--lr nan, expected a number above 0"),
        (["--lr", "inf"], "--lr inf, expected a number above 0"),
        (["--lr", "fast"], "--lr"),
        (["--optimizer", "lion"], "'lion'"),
        (["--precision", "float16"], "'float16'"),
        (["--device", "tpu"], "'tpu'"),
        (["--data", "imagenet"], "'imagenet'"),
        (["--recipe", "bert"], "'bert'"),
        (["--recipe"], "--recipe"),
        (["--resume", "yes"], "'yes'"),
        (["--compressor", "zip"], "compressor 'zip' in 'zip' is unknown"),
        (["--compressor", "topk:ratio=2"], "ratio='2' in 'topk:ratio=2'"),
        (["--model", "bert"], "model 'bert' in 'bert' is unknown"),
        (["--model", "cnn:depth=3"], "'depth=3' in 'cnn:depth=3'"),
        (["--model", "cnn:size=28"], "model cnn takes images of 1 x 28 x 28, and digits has 1 x 8 x 8"),
        (["--model", "gpt"], "model gpt takes text, and digits has images"),
        (["--data", "text"], "model cnn takes images, and text has none"),
        (["--log-to", "everywhere"], "--log-to everywhere, expected some of"),
        (["--log-to", "none", "auto"], "none cannot be combined with others"),
        (["--log-to"], "--log-to"),
        (["--frobnicate"], "--frobnicate"),
        (["surplus"], "surplus"),
        (["--out", "a-file"], "--out a-file is a file"),
        (["--out", "a-file", "--resume", "auto"], "--out a-file is a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_options_are_one_line(
    given: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before any rank is started."""
    (tmp_path / "a-file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("thinwire.tools.train.launch.Workers", None)
    assert cli.main(["train", *given]) == 2
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err
    assert output.err.startswith("thinwire train: error: ")
    assert message in output.err
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


def test_a_budget_in_the_environment_that_is_nonsense_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before any rank is started, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("thinwire.tools.train.launch.Workers", None)
    monkeypatch.setenv("THINWIRE_MAX_BYTES", "banana")
    assert cli.main(["train", "--out", "run"]) == 2
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err
    assert output.err.startswith("thinwire train: error: THINWIRE_MAX_BYTES='banana', expected bytes")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"torch.{'cuda' if device == 'cuda' else 'backends.mps'}.is_available", lambda: False)
    assert cli.main(["train", "--device", device]) == 2
    assert f"--device {device}, but torch finds no {device.upper()} device here" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_data_that_is_not_there_is_one_line_and_leaves_no_folder(tmp_path: Path) -> None:
    """Found by the ranks, of which one reports it."""
    (tmp_path / "data").mkdir()
    done = run(tmp_path, "--recipe", "mnist-cnn", "--device", "cpu")
    assert done.code == 2
    assert done.err.count("\n") == 1, done.err
    assert_one_line(done, "thinwire train: error: data ", "train-images", "--download")
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["data"]


def test_missing_fashion_is_one_line_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before any rank is started, where files are to be fetched."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("thinwire.tools.train.launch.Workers", None)
    given = ["--recipe", "fashion-cnn", "--data-dir", "nowhere", "--download", "--device", "cpu"]
    assert cli.main(["train", *given]) == 2
    output = capfd.readouterr()
    assert_one_line(
        Done(2, output.out, output.err), "nowhere has no train-images-idx3-ubyte[.gz] of Fashion-MNIST",
        "apt-get install dataset-fashion-mnist", "t10k-labels-idx1-ubyte", "--data-dir",
    )  # fmt: skip
    assert output.err.count("\n") == 1, output.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["/proc/run", "a-file/run"])
def test_a_folder_that_cannot_be_made_is_one_line(out: str, ranks: RankPool, tmp_path: Path) -> None:
    """The same on all ranks, by the word of rank 0."""
    (tmp_path / "a-file").touch()
    ended = train(ranks, 2, changed(CONFIG, out=Path(out)), tmp_path)
    assert ended.error is not None
    assert out.partition("/run")[0] in ended.error


# A disk that is full.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MB."""
    with ExitStack() as stack:
        try:
            path = stack.enter_context(small_disk(tmp_path / "disk"))
        except PermissionError as error:
            refuse(str(error))
        yield path


def refuse(reason: str) -> None:
    """Skip, but not where nobody would see it."""
    assert not os.environ.get("CI"), reason
    pytest.skip(reason)


def test_a_full_disk_is_one_line_and_the_run_goes_on_once_there_is_room(
    disk: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Room for two checkpoints and a bit; the third is kept until it is whole, and so finds none."""
    config = changed(CONFIG, keep=50)
    assert train(ranks, 2, config, tmp_path).finished
    ballast = disk / "ballast"
    done = run(disk, *arguments(config), **planted(InSteps(FullDisk(rank=0, step=13, path=ballast))))
    assert done.code == 2, done.err
    assert_one_line(done, "thinwire train: error: the checkpoint could not be written by rank ", "No space left")
    assert checkpoints(disk / RUN) == [5, 10]
    ballast.unlink()
    ended = train(ranks, 2, defaults(["--resume", "auto", "--out", str(disk / RUN)]), disk)
    assert ended.finished, ended
    assert "resuming from step 10" in ended.err
    assert_same_weights(disk / RUN, tmp_path / RUN)
    assert logged_steps(disk / RUN) == list(range(1, 31))


@pytest.mark.slow
def test_a_limit_of_file_size_is_the_same_error(ranks: RankPool, tmp_path: Path) -> None:
    """As of a quota. The metrics and not a checkpoint meet it first, if steps are many."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        done = run(tmp_path, *arguments(changed(CONFIG, workers=1, checkpoint_every=0, steps=200)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert done.code == 2, done.err
    assert_one_line(done, "thinwire train: error: ", "File too large")


# Folders, in this process.


def test_folders_are_named_by_the_recipe_and_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = [choose_folder(changed(SMALL, recipe=recipe)) for recipe in ("digits-cnn", "text-gpt", *["digits-cnn"] * 2)]
    assert [str(path) for path in made] == [
        "runs/digits-cnn", "runs/text-gpt", "runs/digits-cnn-2", "runs/digits-cnn-3",
    ]  # fmt: skip
    assert all(path.is_dir() for path in made)
    assert choose_folder(changed(SMALL, out=Path("a/b/c"))).is_dir()


def test_a_folder_is_held_by_one(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ValueError, match="is in use by another training"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def put_config(folder: Path, at: float, **more: object) -> None:
    folder.mkdir(parents=True)
    path = folder / "config.json"
    path.write_text(json.dumps({**changed(SMALL, out=folder).record(), **more}))
    os.utime(path, (at, at))


def test_options_that_are_not_given_are_those_of_the_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
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


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"steps": 3}', "a", "[" * 100_000, "9" * 10_000, "[[1], {}]", None,
        {"steps": 3.5}, {"log_to": 3.5}, {"log_to": ["none", 3.5]}, {"log_to": [["none"]]}, {"model": 3.5},
    ],
    ids=lambda content: str(content)[:30],
)  # fmt: skip
def test_a_config_that_is_damaged_is_one_line(
    content: str | dict[str, object] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Or has values of other types than the options."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("thinwire.tools.train.launch.Workers", None)
    put_config(RUN, 0, **(content if isinstance(content, dict) else {}))
    if content is None:
        (RUN / "config.json").write_bytes(b"\xff\xfe")
    elif isinstance(content, str):
        (RUN / "config.json").write_text(content)
    assert cli.main(["train", "--resume", "auto", "--out", "run"]) == 2
    text = capfd.readouterr().err
    assert text.count("\n") == 1, text
    assert "run/config.json" in text


def test_a_config_comes_back_as_it_was(tmp_path: Path) -> None:
    put_config(tmp_path / RUN, 0)
    assert load_config(tmp_path / RUN) == changed(SMALL, out=tmp_path / RUN)
