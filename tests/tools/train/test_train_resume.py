"""A run that goes on from a checkpoint is the run that never stopped, bit for bit; and what it may change."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.slow import slow, some_slow
from support.training_runs import (
    SMALL,
    Ended,
    assert_same_weights,
    changed,
    checkpoints,
    copy_run,
    lines,
    logged_steps,
    newest,
    sign,
    train,
    weights,
)
from thinwire.testing import RankPool
from thinwire.tools.train.config import Config, defaults, load_config
from thinwire.tools.train.image_files import CIFAR_FILES, RECORD

RUN = Path("run")
CUT = changed(SMALL, out=RUN, steps=16, checkpoint_every=1, keep=100, eval_every=8)
CONFIGS: dict[str, tuple[int, Config]] = {
    "topk adamw": (2, CUT),
    "topk sgd, three": (3, changed(CUT, optimizer="sgd", lr=0.01)),
    "dense adamw": (2, changed(CUT, compressor="none")),
    "quantize sgd": (2, changed(CUT, compressor="quantize:bits=8", optimizer="sgd", lr=0.01)),
    "randomk bfloat16": (2, changed(CUT, compressor="randomk:ratio=1/8", precision="bfloat16")),
    "batch norm": (2, changed(CUT, model="resnet18:width=4", data="cifar10", data_dir=Path("images"), batch=4)),
    "text": (2, changed(CUT, model="gpt:layers=1,width=16,heads=2,context=16", data="text", batch=4)),
    "sharded": (4, changed(CUT, model="gpt:layers=1,width=32,heads=2,context=16", data="text", batch=4, shard=2)),
}


def put_images(cwd: Path) -> None:
    """Files of the form of CIFAR-10, with noise in them."""
    (cwd / "images").mkdir()
    generator = torch.Generator().manual_seed(0)
    for name in CIFAR_FILES:
        records = torch.randint(256, (20, RECORD), generator=generator, dtype=torch.uint8)
        records[:, 0] %= 10
        (cwd / "images" / name).write_bytes(records.numpy().tobytes())


def forget_after(folder: Path, step: int) -> None:
    """The run as it was when it was killed a little after a checkpoint; metrics were further."""
    for later in checkpoints(folder):
        if later > step:
            shutil.rmtree(folder / "checkpoints" / f"step-{later:08}")
    (folder / "weights.pt").unlink()
    path = folder / "metrics.jsonl"
    texts = path.read_text().splitlines(keepends=True)
    ahead = next(n for n, text in enumerate(texts) if json.loads(text).get("step") == min(step + 3, 16))
    path.write_text("".join(texts[:ahead]) + texts[ahead][:40])  # and the last line was cut off


def assert_whole(folder: Path, steps: int = 16) -> None:
    assert logged_steps(folder) == list(range(1, steps + 1))
    assert [line["reason"] for line in lines(folder, "end")].count("finished") == 1
    assert lines(folder)[-1]["kind"] == "end"


@pytest.mark.parametrize("name", some_slow(CONFIGS, "batch norm", "dense adamw", "text", "topk sgd, three"))
def test_a_resumed_run_is_the_run_that_never_stopped(name: str, ranks: RankPool, tmp_path: Path) -> None:
    """From the first step on: there DDP has not yet put its buckets in order."""
    size, config = CONFIGS[name]
    if config.data == "cifar10":
        put_images(tmp_path)
    assert train(ranks, size, config, tmp_path).finished
    whole = lines(tmp_path / RUN, "step")
    for step in (1, 11):
        cut = copy_run(tmp_path / RUN, tmp_path / f"from-{step}")
        forget_after(cut, step)
        ended = train(ranks, size, changed(config, out=cut, resume="auto"), tmp_path)
        assert ended.finished, ended
        assert f"resuming from step {step}\n" in ended.err
        assert_same_weights(cut, tmp_path / RUN)
        assert_whole(cut)
        for line, other in zip(lines(cut, "step"), whole, strict=True):
            same = ("step", "loss", "lr", "bytes_dense", "skipped")
            assert [line[name] for name in same] == [other[name] for name in same]
        evaluated, before = (lines(folder, "evaluation") for folder in (cut, tmp_path / RUN))
        assert [line["loss"] for line in evaluated] == [line["loss"] for line in before]
        seconds = [line["seconds"] for line in lines(cut) if "seconds" in line]
        assert seconds == sorted(seconds), "time goes on too"
        sent = [line["bytes_sent"] for line in lines(cut, "step")]
        assert sent == sorted(sent)


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, 16 steps, with a checkpoint of each."""
    cwd = tmp_path_factory.mktemp("whole")
    assert train(ranks, 2, CUT, cwd).finished
    assert checkpoints(cwd / RUN) == list(range(1, 17))
    return cwd / RUN


@pytest.fixture
def cut(whole: Path, tmp_path: Path) -> Path:
    """A run that was killed after step 15, with checkpoints up to step 12."""
    folder = copy_run(whole, tmp_path / RUN)
    forget_after(folder, 12)
    return folder


def go_on(ranks: RankPool, folder: Path, size: int = 2, **more: object) -> Ended:
    """As the command would: options that are not given are those of the run. It finishes."""
    config = defaults(["--resume", "auto", "--out", str(folder)])
    ended = train(ranks, size, changed(config, **more), folder.parent)
    assert ended.finished, ended
    return ended


def refused(ranks: RankPool, folder: Path, **more: object) -> tuple[str, str]:
    """The error, and what is shown. Nothing is changed."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    config = defaults(["--resume", "auto", "--out", str(folder)])
    ended = train(ranks, 2, changed(config, **more), folder.parent)
    assert ended.error is not None, more
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before, more
    return ended.error, ended.err


# Damage.


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _manifest(**changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _state(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change what a file says, and its SHA-256 in the manifest with it."""

    def change(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        edit(state)
        torch.save(state, path)
        sign(path)

    return change


def _learner(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return _state(lambda state: edit(state["learner"]))


def _content(content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_bytes(content)
        sign(path)

    return change


class _Opens:
    """What a pickle can do to those who load it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch broken-into",)


DEEP = "[" * 100_000 + "]" * 100_000
DAMAGES = {
    "no ranks": ("manifest.json", _manifest(world_size=0)),
    "a thousand million ranks": ("manifest.json", _manifest(world_size=10**9)),
    "ranks in words": ("manifest.json", _manifest(world_size="two")),
    "a list of files": ("manifest.json", _manifest(files=["model.pt"])),
    "a file in words": ("manifest.json", _manifest(files={"model.pt": "good", "rank0.pt": 1, "rank1.pt": []})),
    "a deep manifest": ("manifest.json", lambda path: path.write_text(DEEP)),
    "digits without end": ("manifest.json", lambda path: path.write_text('{"format": ' + "9" * 10_000 + "}")),
    "a pickle": ("model.pt", _content(pickle.dumps(_Opens()))),
    "no zip": ("model.pt", _content(b"PK\x03\x04 and nothing else")),
    "weights without a run": ("model.pt", _state(lambda state: state.clear())),
    "a count in words": ("model.pt", _state(lambda state: state["counts"].update(samples="many"))),
    "samples without end": ("model.pt", _state(lambda state: state["counts"].update(samples=10**30))),
    "counts of another step": ("model.pt", _state(lambda state: state["counts"].update(step=999))),
    "a split without parts": ("model.pt", _state(lambda state: state["counts"].update(split={}))),
    "a weight in words": ("model.pt", _learner(lambda own: own["model"].update({"head.bias": "heavy"}))),
    "a weight of another shape": ("model.pt", _learner(lambda own: own["model"].update({"head.bias": torch.zeros(3)}))),
    "no exchange": ("rank0.pt", _learner(lambda own: own.update(exchange={"thinwire": 7, "param_groups": 1}))),
    "residuals in words": ("rank0.pt", _learner(lambda own: own["exchange"]["thinwire"].update(residuals=3))),
    "betas in words": (
        "rank1.pt", _learner(lambda own: own["exchange"]["param_groups"][0].update(lr="high", momentum=[])),
    ),
    "shortened weights": ("model.pt", _truncate),
    "a bit of rank 1": ("rank1.pt", _flip),
    "no file of rank 1": ("rank1.pt", Path.unlink),
    "empty manifest": ("manifest.json", lambda path: os.truncate(path, 0)),
    "no manifest": ("manifest.json", Path.unlink),
}  # fmt: skip


def test_damaged_checkpoints_are_reported_and_the_one_before_is_used(
    whole: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Many in a row, each damaged in its own way, from the last one on."""
    damages, part = list(DAMAGES.items()), 12
    for first in range(0, len(damages), part):
        cut = copy_run(whole, tmp_path / f"from-{first}")
        (cut / "weights.pt").unlink()
        by_step = dict(zip(range(16, 2, -1), damages[first : first + part], strict=False))
        left = {}
        for step, (_, (name, break_it)) in by_step.items():
            folder = cut / "checkpoints" / f"step-{step:08}"
            break_it(folder / name)
            left[step] = {path.name for path in folder.iterdir()}
        good = min(by_step) - 1
        ended = go_on(ranks, cut)
        assert f"resuming from step {good}\n" in ended.err
        lines = [line for line in ended.err.splitlines() if "is damaged" in line]
        for line, (step, (what, _)) in zip(lines, by_step.items(), strict=True):
            assert f"step-{step:08} is damaged" in line, what
            assert len(line) < 700, what
            kept = {path.name for path in (cut / "checkpoints" / f"damaged-{step:08}").iterdir()}
            assert kept == left[step], f"{what}: somebody may want to look at it"
        assert not list(tmp_path.rglob("broken-into")), "no pickle was run"
        assert_same_weights(cut, whole)
        assert_whole(cut)


def test_if_all_are_damaged_it_is_an_error_and_all_is_left_as_it_was(cut: Path, ranks: RankPool) -> None:
    """So are those of format 1, with which the version that wrote them can go on."""
    for step in checkpoints(cut)[3:]:
        shutil.rmtree(cut / "checkpoints" / f"step-{step:08}")
    for step, damage in zip(checkpoints(cut), ("a bit of rank 1", "empty manifest", "shortened weights"), strict=True):
        name, break_it = DAMAGES[damage]
        break_it(cut / "checkpoints" / f"step-{step:08}" / name)
    error, shown = refused(ranks, cut)
    assert error.startswith(f"none of the checkpoints in {cut / 'checkpoints'} can be used: ")
    assert error.endswith("; to start anew give another --out")
    assert shown.count("is damaged and not used") == 3
    shutil.copy(newest(cut) / "manifest.json", cut / "checkpoints/step-00000002/manifest.json")
    for step in checkpoints(cut):
        _manifest(format=1)(cut / "checkpoints" / f"step-{step:08}" / "manifest.json")
    error, _ = refused(ranks, cut)
    assert "format 1, and this version of thinwire reads format 2" in error


def test_folders_of_others_are_left_alone(cut: Path, whole: Path, ranks: RankPool) -> None:
    """Names that look like those of checkpoints, in a folder that only --resume and --keep touch."""
    others = [cut / "checkpoints" / name for name in ("step-5", "step-99999999999999999999", "step-٠٠٠٠٠٠١٣", "step-x")]
    for other in others:
        other.mkdir()
    (cut / "checkpoints" / "step-00000099").write_text("a file")
    ended = go_on(ranks, cut, keep=1)
    assert "resuming from step 12" in ended.err
    assert "is damaged" not in ended.err
    assert_same_weights(cut, whole)
    assert all(other.is_dir() for other in others)


# What a run may change, and what not.


@pytest.mark.parametrize(("before", "after"), [slow(2, 3), (3, 2)])
def test_another_number_of_workers_goes_on_from_the_same_step(
    before: int, after: int, ranks: RankPool, tmp_path: Path
) -> None:
    config = changed(SMALL, out=RUN, steps=60, keep=2, checkpoint_every=20)
    assert train(ranks, before, config, tmp_path).finished
    kept, cut = tmp_path / RUN, copy_run(tmp_path / RUN, tmp_path / "other")
    shutil.rmtree(newest(cut))
    ended = go_on(ranks, cut, after)
    assert "resuming from step 40" in ended.err
    assert f"{after} rank" in ended.err
    assert logged_steps(cut) == list(range(1, 61))
    first, *_ = lines(kept, "step")
    assert max(line["loss"] for line in lines(cut, "step")[40:]) < first["loss"]
    score, other = (lines(folder, "evaluation")[-1]["loss"] for folder in (kept, cut))
    assert other == pytest.approx(score, rel=0.25)


def test_a_finished_run_has_nothing_to_go_on_with_but_more_steps(whole: Path, ranks: RankPool, tmp_path: Path) -> None:
    folder = copy_run(whole, tmp_path / RUN)
    for _ in range(2):
        ended = go_on(ranks, folder)
        assert "resuming from step 16" in ended.err
        assert_same_weights(folder, whole)
        assert_whole(folder)
        assert [line["step"] for line in lines(folder, "evaluation")] == [8, 16]
        assert lines(folder, "evaluation")[-1]["loss"] == lines(whole, "evaluation")[-1]["loss"]
        assert "default: 16 steps" in ended.out
    error, _ = refused(ranks, folder, steps=10)
    assert error == "--steps 10, but the run has done 16: give more, or another --out"
    go_on(ranks, folder, steps=20, keep=3)
    assert checkpoints(folder) == [18, 19, 20]
    assert_whole(folder, 20)
    assert load_config(folder).steps == 20
    assert any(not torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(folder).items())


def test_a_comparison_goes_on_where_it_was(whole: Path, ranks: RankPool, tmp_path: Path) -> None:
    """Asked for after the run was finished, and killed in its middle: the run itself is not trained again."""
    folder = copy_run(whole, tmp_path / RUN)
    go_on(ranks, folder, compare_dense=True)
    assert_same_weights(folder, whole)
    dense, expected = folder / "dense", copy_run(folder / "dense", tmp_path / "expected")
    assert_whole(dense)
    forget_after(dense, 8)
    ended = go_on(ranks, folder)
    assert "resuming from step 8" in ended.err
    assert_same_weights(dense, expected)
    assert_whole(dense)
    assert_whole(folder)
    assert re.search(r"^default: .*\ndense: ", ended.out), "both are shown"


def test_what_a_run_cannot_change_is_refused_with_both_values(cut: Path, ranks: RankPool) -> None:
    for name, value in {
        "model": "cnn:width=12,size=8", "compressor": "topk:ratio=1/32,bits=2", "seed": 3, "optimizer": "sgd",
        "warmup_steps": 2, "local_steps": 4,
    }.items():  # fmt: skip
        error, _ = refused(ranks, cut, **{name: value})
        message = f"--{name.replace('_', '-')} {value}, but the run that is resumed has {getattr(CUT, name)}: leave"
        assert error.startswith(message)
    error, _ = refused(ranks, cut, resume="no")
    assert error == f"--out {cut} holds a run: add --resume auto to go on with it, or give another folder"


def test_a_run_without_checkpoints_begins_anew(whole: Path, ranks: RankPool, tmp_path: Path) -> None:
    """It was killed before the first one."""
    folder = copy_run(whole, tmp_path / RUN)
    shutil.rmtree(folder / "checkpoints")
    go_on(ranks, folder)
    assert_same_weights(folder, whole)
    assert_whole(folder)
