"""A file as the text of a training: its bytes, the last twentieth for validation; what cannot be read is said."""

import gzip
import lzma
from pathlib import Path

import pytest
import torch

from thinwire.tools.train.data import Text, file_parts
from thinwire.tools.train.images import load_data

TEXT = bytes(range(256)) * 100


@pytest.mark.parametrize(("suffix", "pack"), [(".txt", bytes), (".xz", lzma.compress), (".gz", gzip.compress)])
def test_the_bytes_of_a_file(tmp_path: Path, suffix: str, pack: object) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(pack(TEXT))  # type: ignore[operator]
    train, validation = file_parts(path)
    assert train + validation == TEXT
    assert len(validation) == len(TEXT) // 20
    inputs, targets = load_data("text", path, 16).batch(0, 4, seed=0)
    assert torch.equal((inputs + 1) % 256, targets), "each byte is one more than the last"


def test_a_folder_leaves_the_text_as_it_is(tmp_path: Path) -> None:
    assert load_data("text", tmp_path, 16).length == Text(16).length


@pytest.mark.parametrize("name", ["damaged.xz", "damaged.gz"])
def test_a_damaged_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no archive")
    with pytest.raises(ValueError, match="cannot be read"):
        file_parts(tmp_path / name)


def test_a_file_that_is_too_short(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(TEXT[:100])
    with pytest.raises(ValueError, match="only 5 bytes of text"):
        Text(16, file=path)
