"""MNIST, Fashion-MNIST and CIFAR-10 from files: what is in them comes out, and files that are anything else are refused
by name."""

import gzip
import io
import re
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.tools.train import FASHION_FOLDER
from thinwire.tools.train.cifar import ARCHIVE, FOLDER, LARGEST, RECORD, TEST, TRAIN
from thinwire.tools.train.data import Data
from thinwire.tools.train.idx import files
from thinwire.tools.train.images import CIFAR10, MNIST, FashionMNIST, check_fit, load_data
from thinwire.tools.train.images import IMAGES as IMAGE_SETS
from thinwire.tools.train.models import model_config

COUNT, TESTS = 40, 12
"""Of images; the real ones are of the same format."""


def random_bytes(count: int, seed: int) -> bytes:
    drawn = torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return drawn.numpy().tobytes()


# MNIST and Fashion-MNIST --------------------------------------------------------------------------------------------


def idx(magic: int, *sizes: int, body: bytes) -> bytes:
    return struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + body


def mnist_files() -> dict[str, bytes]:
    made = {}
    for seed, (part, count) in enumerate((("train", COUNT), ("t10k", TESTS))):
        images, labels = files(part)
        made[images] = idx(0x803, count, 28, 28, body=random_bytes(count * 784, seed))
        made[labels] = idx(0x801, count, body=bytes(number % 10 for number in range(count)))
    return made


def put(folder: Path, contents: dict[str, bytes], zipped: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(content) if zipped else content)
    return folder


def epoch_of(data: Data) -> list[tuple[int, Tensor]]:
    batch = data.batch(0, data.length, seed=0)
    return list(zip(batch.targets.tolist(), batch.inputs, strict=True))


MOMENTS: dict[type[MNIST] | type[FashionMNIST], tuple[float, float]] = {
    MNIST: (0.1307, 0.3081),
    FashionMNIST: (0.2860, 0.3530),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("kind", MOMENTS)
def test_images_are_what_is_in_their_files(
    tmp_path: Path, kind: type[MNIST] | type[FashionMNIST], zipped: bool
) -> None:
    mean, std = MOMENTS[kind]
    made = mnist_files()
    data = kind(put(tmp_path, made, zipped))
    assert data.length == COUNT
    pixels = torch.frombuffer(bytearray(made[files("train")[0]][16:]), dtype=torch.uint8).view(COUNT, 1, 28, 28)
    seen = []
    for label, image in epoch_of(data):
        back = (image * std + mean) * 255
        (which,) = [number for number in range(COUNT) if torch.allclose(back, pixels[number].float(), atol=1e-2)]
        assert which % 10 == label
        seen.append(which)
    assert sorted(seen) == list(range(COUNT))
    inputs, targets = (torch.cat(parts) for parts in zip(*data.validation(5), strict=True))
    assert targets.tolist() == [number % 10 for number in range(TESTS)]
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert inputs.shape == (TESTS, *kind.inputs)
    tests = torch.frombuffer(bytearray(made[files("t10k")[0]][16:]), dtype=torch.uint8).view(TESTS, 1, 28, 28)
    assert torch.allclose((inputs * std + mean) * 255, tests.float(), atol=1e-2)


IMAGES, LABELS = files("train")
BAD_IDX: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "labels for images": (IMAGES, lambda _: mnist_files()[LABELS], "magic 0x00000801, expected 0x00000803"),
    "images for labels": (LABELS, lambda _: mnist_files()[IMAGES], "magic 0x00000803, expected 0x00000801"),
    "other pixels": (
        IMAGES,
        lambda _: idx(0x803, 1, 32, 28, body=bytes(32 * 28)),
        "samples of 32 x 28 pixels, expected 28 x 28 pixels",
    ),
    "cut off": (IMAGES, lambda good: good[:-1], "31,359 bytes after the header, expected 31,360 for 40 samples"),
    "a byte too many": (IMAGES, lambda good: good + b"\0", "more bytes after the header, expected 31,360"),
    "a label too many": (LABELS, lambda good: good + b"\0", "more bytes after the header, expected 40 for 40"),
    "no header": (IMAGES, lambda _: b"\0\0\x08", "3 bytes, expected a header of 16"),
    "empty": (LABELS, lambda _: b"", "0 bytes, expected a header of 8"),
    "no samples": (LABELS, lambda _: idx(0x801, 0, body=b""), "0 samples, expected 1 to 1,000,000"),
    "too many samples": (
        IMAGES,
        lambda _: idx(0x803, 2**32 - 1, 28, 28, body=b""),
        "4,294,967,295 samples, expected 1 to 1,000,000",
    ),
    "other counts": (LABELS, lambda _: idx(0x801, 39, body=bytes(39)), "39 labels, expected 40, the images in train-"),
    "a label of 10": (LABELS, lambda good: good[:-1] + b"\x0a", "label 10, expected 0 to 9"),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("kind", MOMENTS)
@pytest.mark.parametrize("what", BAD_IDX)
def test_a_bad_idx_file_is_named(
    tmp_path: Path, what: str, kind: type[MNIST] | type[FashionMNIST], zipped: bool
) -> None:
    name, spoil, message = BAD_IDX[what]
    made = mnist_files()
    folder = put(tmp_path, {**made, name: spoil(made[name])}, zipped)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        kind(folder)
    assert str(caught.value).startswith(str(tmp_path / name))


@pytest.mark.parametrize(
    "spoil",
    [lambda zipped: zipped[:-9], lambda zipped: b"PK" + zipped[2:], lambda zipped: zipped[:40] + b"?" + zipped[41:]],
    ids=["cut off", "not gzip", "changed"],
)
def test_a_bad_gzip_file_is_named(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    path = put(tmp_path, mnist_files(), zipped=True) / f"{IMAGES}.gz"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{path}: .*expected a whole gzip file"):
        MNIST(tmp_path)


@pytest.mark.parametrize("name", [*files("train"), *files("t10k")])
def test_a_folder_with_some_of_fashion_names_what_it_lacks(tmp_path: Path, name: str) -> None:
    (put(tmp_path, mnist_files()) / name).unlink()
    with pytest.raises(ValueError, match=f"^{tmp_path} has no {name}") as caught:
        FashionMNIST(tmp_path)
    assert f"apt-get install dataset-fashion-mnist puts it into {FASHION_FOLDER}, or put" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "first", "given", "expected"),
    [
        (FashionMNIST, "50419213143536172869", "MNIST", "Fashion-MNIST"),
        (MNIST, "90030272550955791064", "Fashion-MNIST", "MNIST"),
    ],
)
def test_files_of_the_other_set_are_refused(
    tmp_path: Path, kind: type[MNIST] | type[FashionMNIST], first: str, given: str, expected: str
) -> None:
    """Their names are the same."""
    labels = bytes(map(int, first)) + bytes(COUNT - 20)
    folder = put(tmp_path, {**mnist_files(), LABELS: idx(0x801, COUNT, body=labels)})
    message = f"{folder / LABELS}: the labels of {given}, expected those of {expected}, .* by --data-dir$"
    with pytest.raises(ValueError, match=message):
        kind(folder)


def test_the_real_fashion(fashion_package: Path) -> None:
    data = FashionMNIST(fashion_package)
    assert data.length == 60_000
    inputs, targets = data.batch(0, 60_000, seed=0)
    assert targets.bincount().tolist() == [6000] * 10
    assert inputs.mean().item() == pytest.approx(0, abs=1e-3)
    assert inputs.std().item() == pytest.approx(1, abs=1e-3)
    (tests,) = data.validation(10_000)
    assert tests.targets.bincount().tolist() == [1000] * 10
    with pytest.raises(ValueError, match="the labels of Fashion-MNIST, expected those of MNIST"):
        MNIST(fashion_package)


# CIFAR-10 -----------------------------------------------------------------------------------------------------------


def cifar_files(count: int = 8) -> dict[str, bytes]:
    made = {}
    for seed, name in enumerate((*TRAIN, TEST)):
        pixels = random_bytes(count * 3072, seed)
        made[name] = b"".join(
            bytes([(seed + number) % 10]) + pixels[number * 3072 : (number + 1) * 3072] for number in range(count)
        )
    return made


def archive(path: Path, contents: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def in_folder(contents: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{FOLDER}/{name}": content for name, content in contents.items()}


@pytest.fixture
def cifar(tmp_path: Path) -> CIFAR10:
    return CIFAR10(put(tmp_path, cifar_files()))


def test_cifar_is_the_same_from_anywhere(tmp_path: Path) -> None:
    made = cifar_files()
    plain, nested, packed = (tmp_path / name for name in ("plain", "nested", "packed"))
    put(plain, made)
    put(nested / FOLDER, made)
    packed.mkdir()
    extra = {f"{FOLDER}/readme.html": b"text", "../outside": b"evil", "/tmp/thinwire-outside": b"evil"}
    archive(packed / ARCHIVE, {**extra, **in_folder(made)})
    sets = [CIFAR10(folder) for folder in (plain, nested, packed)]
    for other in sets[1:]:
        assert other.length == 40
        assert all(map(torch.equal, sets[0].batch(3, 60, seed=1), other.batch(3, 60, seed=1)))
        assert all(map(torch.equal, next(sets[0].validation(8)), next(other.validation(8))))
    assert sorted(path.name for path in packed.iterdir()) == [ARCHIVE]  # nothing was unpacked
    assert not (tmp_path / "outside").exists()
    assert not Path("/tmp/thinwire-outside").exists()


MEAN, STD = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])


def pixels_of(inputs: Tensor) -> Tensor:
    """Bytes, from what the model sees."""
    return ((inputs * STD.view(-1, 1, 1) + MEAN.view(-1, 1, 1)) * 255).round().to(torch.uint8)


def records(name: str) -> tuple[Tensor, Tensor]:
    made = torch.frombuffer(bytearray(cifar_files()[name]), dtype=torch.uint8).view(-1, RECORD)
    return made[:, 1:].view(-1, 3, 32, 32), made[:, 0]


def test_cifar_s_validation_is_what_is_in_its_file(cifar: CIFAR10) -> None:
    inputs, targets = (torch.cat(parts) for parts in zip(*cifar.validation(3), strict=True))
    pixels, labels = records(TEST)
    assert torch.equal(pixels_of(inputs), pixels)
    assert torch.equal(targets, labels.long())
    assert inputs.dtype == torch.float32
    red = (pixels[0, 0].float() / 255 - 0.4914) / 0.2470
    assert torch.allclose(inputs[0, 0], red, atol=1e-5)


def test_training_images_are_shifted_and_mirrored(cifar: CIFAR10) -> None:
    """Every image is one of the 9 x 9 x 2 that its original can become, and all shifts come."""
    images, labels = (torch.cat(parts) for parts in zip(*map(records, TRAIN), strict=True))
    padded = F.pad(images, (4, 4, 4, 4))
    variants: dict[bytes, tuple[int, int, int, bool]] = {}
    for which, image in enumerate(padded):
        for down in range(9):
            for across in range(9):
                crop = image[:, down : down + 32, across : across + 32]
                variants[crop.numpy().tobytes()] = which, down, across, False
                variants[crop.flip(2).numpy().tobytes()] = which, down, across, True
    batch = cifar.batch(0, 400, seed=2)
    found = [variants[image.numpy().tobytes()] for image in pixels_of(batch.inputs)]
    assert [int(labels[which]) for which, *_ in found] == batch.targets.tolist()
    for epoch in range(10):
        assert sorted(which for which, *_ in found[epoch * 40 : epoch * 40 + 40]) == list(range(40))
    _, down, across, mirrored = map(list, zip(*found, strict=True))
    assert set(down) == set(across) == set(range(9))
    assert 150 < sum(mirrored) < 250
    assert 30 < sum(one == other for one, other in zip(down, across, strict=True)) < 70  # a ninth: they are drawn apart


def test_the_ranks_together_see_the_same_images_in_any_world(cifar: CIFAR10) -> None:
    whole = cifar.batch(30, 64, seed=0)  # over the border of an epoch
    for size in (4, 16, 32):
        parts = [cifar.batch(start, size, seed=0) for start in range(30, 94, size)]
        assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    assert not torch.equal(cifar.batch(30, 64, seed=1).inputs, whole.inputs)


BAD_RECORDS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda good: good[:-1], "24,583 bytes, expected records of 3,073"),
    "a byte too many": (lambda good: good + b"\0", "24,585 bytes, expected records of 3,073"),
    "empty": (lambda good: b"", "0 bytes, expected records of 3,073"),
    "too many records": (lambda good: bytes(LARGEST + RECORD), "more than 30,730,000 bytes, expected at most 10,000"),
    "a label of 10": (lambda good: b"\x0a" + good[1:], "label 10, expected 0 to 9"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("what", BAD_RECORDS)
def test_bad_records_are_named(tmp_path: Path, what: str, packed: bool) -> None:
    spoil, message = BAD_RECORDS[what]
    made = cifar_files()
    made["data_batch_3.bin"] = spoil(made["data_batch_3.bin"])
    if packed:
        archive(tmp_path / ARCHIVE, in_folder(made))
    else:
        put(tmp_path, made)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        CIFAR10(tmp_path)
    assert str(caught.value).startswith(
        f"{FOLDER}/data_batch_3.bin in {tmp_path / ARCHIVE}: " if packed else f"{tmp_path / 'data_batch_3.bin'}: "
    )


def test_an_archive_that_lacks_a_file(tmp_path: Path) -> None:
    made = in_folder(cifar_files())
    del made[f"{FOLDER}/{TEST}"]
    archive(tmp_path / ARCHIVE, made)
    with pytest.raises(ValueError, match=f"{ARCHIVE}: without {FOLDER}/{TEST}, expected CIFAR-10's binary version"):
        CIFAR10(tmp_path)


def test_an_archive_with_a_file_twice(tmp_path: Path) -> None:
    made = in_folder(cifar_files())
    with tarfile.open(tmp_path / ARCHIVE, "w:gz") as tar:
        for name in (*made, f"{FOLDER}/{TEST}"):
            member = tarfile.TarInfo(name)
            member.size = len(made[name])
            tar.addfile(member, io.BytesIO(made[name]))
    with pytest.raises(ValueError, match=f"{FOLDER}/{TEST} in .*{ARCHIVE}: found twice, expected once"):
        CIFAR10(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_an_archive_with_a_link_for_a_file(tmp_path: Path, kind: bytes) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(RECORD))
    with tarfile.open(tmp_path / ARCHIVE, "w:gz") as tar:
        member = tarfile.TarInfo(f"{FOLDER}/{TRAIN[0]}")
        member.type, member.linkname = kind, str(secret)
        tar.addfile(member)
    with pytest.raises(ValueError, match=f"{TRAIN[0]} in .*: not a plain file"):
        CIFAR10(tmp_path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda packed: packed[: len(packed) // 2],
        lambda packed: b"PK" + packed[2:],
        lambda packed: packed[:5000] + bytes(100) + packed[5100:],
        lambda packed: gzip.compress(b"no archive" * 100),
    ],
    ids=["cut off", "not gzip", "changed", "not tar"],
)
def test_an_archive_that_is_none(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    path = tmp_path / ARCHIVE
    archive(path, in_folder(cifar_files()))
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=f"^{path}: .*, expected a whole .tar.gz"):
        CIFAR10(tmp_path)


def test_an_archive_that_unpacks_without_end(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / ARCHIVE, "w:gz", compresslevel=1) as tar:
        member = tarfile.TarInfo("zeros")
        member.size = 250_000_000
        tar.addfile(member, Zeros())  # type: ignore[arg-type]
    assert (tmp_path / ARCHIVE).stat().st_size < 2_000_000
    with pytest.raises(ValueError, match=f"{ARCHIVE}: unpacks to more than CIFAR-10, which is 184,380,000 bytes"):
        CIFAR10(tmp_path)


class Zeros:
    def read(self, size: int) -> bytes:
        return bytes(size)


# Folders without data, names, and models that fit -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"), [("mnist", [IMAGES, LABELS, *files("t10k")]), ("cifar10", [ARCHIVE, *TRAIN, TEST])]
)
@pytest.mark.parametrize("kind", ["missing", "empty", "a file"])
def test_a_folder_without_the_data(tmp_path: Path, name: str, expected: list[str], kind: str) -> None:
    folder = tmp_path / "data"
    if kind == "empty":
        folder.mkdir()
    elif kind == "a file":
        folder.write_bytes(b"")
    with pytest.raises(ValueError, match="or add --download") as caught:
        load_data(name, folder)
    assert all(text in str(caught.value) for text in [str(folder), *expected])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["missing", "empty", "a file"])
def test_fashion_that_is_nowhere(tmp_path: Path, kind: str) -> None:
    """It is not downloaded, so the error says how to get it. A folder that was named is not replaced by another."""
    folder = tmp_path / "data"
    if kind == "empty":
        folder.mkdir()
    elif kind == "a file":
        folder.write_bytes(b"")
    with pytest.raises(ValueError, match=f"^{folder} has no .* of Fashion-MNIST") as caught:
        load_data("fashion-mnist", folder)
    for text in ["apt-get install dataset-fashion-mnist", *files("train"), *files("t10k"), "--data-dir"]:
        assert text in str(caught.value)
    assert "--download" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_missing_file_is_named(tmp_path: Path) -> None:
    made = mnist_files()
    del made[files("t10k")[1]]
    with pytest.raises(ValueError, match=f"{tmp_path} has no {files('t10k')[1]}"):
        load_data("mnist", put(tmp_path, made))


def test_data_by_its_name(tmp_path: Path) -> None:
    put(tmp_path, mnist_files())
    put(tmp_path, cifar_files())
    for name in ("text", *IMAGE_SETS):
        data = load_data(name, tmp_path, 16 if name == "text" else None)
        specs = {"text": "gpt:context=16", "digits": "cnn", "cifar10": "resnet18"}
        config = model_config(specs.get(name, "cnn:size=28"))
        check_fit(config, name)
        inputs, targets = data.batch(0, 4, seed=0)
        assert inputs.shape[1:] == ((16,) if name == "text" else getattr(config, "inputs"))  # noqa: B009
        assert len(targets) == 4


@pytest.mark.parametrize(
    ("spec", "name", "message"),
    [
        ("cnn:size=8", "mnist", "1 x 8 x 8, and mnist has 1 x 28 x 28: use model cnn:size=28, or data digits"),
        ("cnn:size=32", "cifar10", "3 x 32 x 32: use model resnet18 or cnn:channels=3,size=32, or other data"),
        ("cnn:size=28", "digits", "use model cnn:size=8, or data mnist or fashion-mnist"),
        ("cnn:size=8", "fashion-mnist", "fashion-mnist has 1 x 28 x 28: use model cnn:size=28, or data digits"),
        ("resnet18", "digits", "model resnet18 takes images of 3 x 32 x 32, and digits has 1 x 8 x 8"),
        ("resnet18", "text", "model resnet18 takes images, and text has none: use model gpt, or data cifar10"),
        ("gpt", "mnist", "model gpt takes text, and mnist has images: use model cnn:size=28, or data text"),
        ("cnn:classes=5", "digits", "model cnn with classes=5, but digits has 10 classes"),
        ("cnn", "faces", "data 'faces' is unknown, expected one of text, digits, mnist, fashion-mnist, cifar10"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(spec: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_fit(model_config(spec), name)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("gpt", "text"),
        ("cnn", "digits"),
        ("cnn:size=28", "mnist"),
        ("cnn:size=28", "fashion-mnist"),
        ("cnn:channels=3,size=32", "cifar10"),
    ],
)
def test_a_model_that_fits(spec: str, name: str) -> None:
    check_fit(model_config(spec), name)
