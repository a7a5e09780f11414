"""MNIST, Fashion-MNIST and CIFAR-10 from files: what is in them comes out, and other files are refused by name."""

import gzip
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.tools.train import FASHION_FOLDER
from thinwire.tools.train.config import RECIPES
from thinwire.tools.train.image_files import CIFAR_FILES, CIFAR_FOLDER, MNIST_FILES, RECORD
from thinwire.tools.train.images import FITTING, Data, Images, check_fit, load_data
from thinwire.tools.train.models import model_config

COUNT, TESTS = 40, 12
"""Of images; the real ones are of the same format."""


def random_bytes(count: int, seed: int) -> bytes:
    drawn = torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return drawn.numpy().tobytes()


# MNIST and Fashion-MNIST --------------------------------------------------------------------------------------------


def idx(magic: int, *sizes: int, body: bytes) -> bytes:
    return struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + body


def idx_files() -> dict[str, bytes]:
    made = {}
    for seed, ((images, labels), count) in enumerate(((MNIST_FILES[:2], COUNT), (MNIST_FILES[2:], TESTS))):
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


@pytest.mark.parametrize(
    ("name", "mean", "std", "zipped"), [("mnist", 0.1307, 0.3081, True), ("fashion-mnist", 0.2860, 0.3530, False)]
)
def test_images_are_what_is_in_their_files(tmp_path: Path, name: str, mean: float, std: float, zipped: bool) -> None:
    made = idx_files()
    data = Images(name, put(tmp_path, made, zipped))
    assert data.length == COUNT
    pixels = torch.frombuffer(bytearray(made[IMAGES][16:]), dtype=torch.uint8).view(COUNT, 1, 28, 28)
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
    tests = torch.frombuffer(bytearray(made[MNIST_FILES[2]][16:]), dtype=torch.uint8).view(TESTS, 1, 28, 28)
    assert torch.allclose((inputs * std + mean) * 255, tests.float(), atol=1e-2)


IMAGES, LABELS = MNIST_FILES[:2]
BAD_IDX: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "labels for images": (IMAGES, lambda _: idx_files()[LABELS], "48 bytes that begin with 0000080100000028"),
    "images for labels": (LABELS, lambda _: idx_files()[IMAGES], "31,376 bytes that begin with 0000080300000028"),
    "other pixels": (IMAGES, lambda _: idx(0x803, 1, 32, 28, body=bytes(32 * 28)), "expected 800 that begin with"),
    "cut off": (IMAGES, lambda good: good[:-1], "31,375 bytes that begin with"),
    "a byte too many": (IMAGES, lambda good: good + b"\0", "31,377 bytes that begin with"),
    "no header": (IMAGES, lambda _: b"\0\0\x08", "3 bytes that begin with 000008, expected"),
    "empty": (LABELS, lambda _: b"", "0 bytes"),
    "no samples": (LABELS, lambda _: idx(0x801, 0, body=b""), "8 bytes that begin with"),
    "other counts": (LABELS, lambda _: idx(0x801, 39, body=bytes(39)), "39 labels, expected one for each of 40 images"),
    "a label of 10": (LABELS, lambda good: good[:-1] + b"\x0a", "label 10, expected 0 to 9"),
}


def test_a_bad_idx_file_is_named(tmp_path: Path) -> None:
    for number, (what, (name, spoil, message)) in enumerate(BAD_IDX.items()):
        made, zipped = idx_files(), number % 2 == 1
        folder = put(tmp_path / what, {**made, name: spoil(made[name])}, zipped)
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            Images("mnist" if number % 3 else "fashion-mnist", folder)
        assert str(caught.value).startswith(str(folder / name)), what


def test_a_bad_gzip_file_is_named(tmp_path: Path) -> None:
    path = put(tmp_path, idx_files(), zipped=True) / f"{IMAGES}.gz"
    good = path.read_bytes()
    for bad in (good[:-9], b"PK" + good[2:], good[:40] + b"?" + good[41:], good[:-8] + bytes(8)):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=f"{path}: .*expected a whole gzip file"):
            Images("mnist", tmp_path)


def test_a_folder_without_a_file_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "a file").write_bytes(b"")
    lacking = [put(tmp_path / name, {k: v for k, v in idx_files().items() if k != name}) for name in MNIST_FILES]
    apt = f"apt-get install dataset-fashion-mnist puts them into {FASHION_FOLDER}: name the folder by --data-dir"
    for folder in (tmp_path / "nowhere", tmp_path / "a file", tmp_path, *lacking):
        first = folder.name if folder in lacking else IMAGES
        for data, name, advice in (
            ("mnist", first, f"{MNIST_FILES[3]} there.*--download"),
            ("fashion-mnist", first, apt),
            ("cifar10", "data_batch_1.bin", "--download"),
        ):
            with pytest.raises(ValueError, match=f"^{folder} has no {name} of {data}; .*{advice}$"):
                load_data(data, folder)


def test_files_of_the_other_set_are_refused(tmp_path: Path) -> None:
    """Their names are the same."""
    for name, first in (("fashion-mnist", "50419213143536172869"), ("mnist", "90030272550955791064")):
        labels = bytes(map(int, first)) + bytes(COUNT - 20)
        folder = put(tmp_path, {**idx_files(), LABELS: idx(0x801, COUNT, body=labels)})
        message = f"{folder / LABELS}: the labels of another data set, expected {name}; .* by --data-dir$"
        with pytest.raises(ValueError, match=message):
            Images(name, folder)


def test_the_real_fashion(fashion_package: Path) -> None:
    config = RECIPES["fashion-cnn"]
    assert (config.data, config.data_dir) == ("fashion-mnist", fashion_package)
    data = load_data(config.data, config.data_dir)
    check_fit(model_config(config.model), config.data)
    assert data.length == 60_000
    inputs, targets = data.batch(0, 60_000, seed=0)
    assert targets.bincount().tolist() == [6000] * 10
    assert inputs.mean().item() == pytest.approx(0, abs=1e-3)
    assert inputs.std().item() == pytest.approx(1, abs=1e-3)
    (tests,) = data.validation(10_000)
    assert tests.targets.bincount().tolist() == [1000] * 10


# CIFAR-10 -----------------------------------------------------------------------------------------------------------


def cifar_files() -> dict[str, bytes]:
    made = {}
    for seed, name in enumerate(CIFAR_FILES):
        records = [bytes([(seed + number) % 10]) + random_bytes(RECORD - 1, 10 * seed + number) for number in range(8)]
        made[name] = b"".join(records)
    return made


@pytest.fixture
def cifar(tmp_path: Path) -> Images:
    """In the folder of its archive."""
    put(tmp_path / CIFAR_FOLDER, cifar_files())
    return Images("cifar10", tmp_path)


MEAN, STD = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])


def pixels_of(inputs: Tensor) -> Tensor:
    """Bytes, from what the model sees."""
    return ((inputs * STD.view(-1, 1, 1) + MEAN.view(-1, 1, 1)) * 255).round().to(torch.uint8)


def records(name: str) -> tuple[Tensor, Tensor]:
    made = torch.frombuffer(bytearray(cifar_files()[name]), dtype=torch.uint8).view(-1, RECORD)
    return made[:, 1:].view(-1, 3, 32, 32), made[:, 0]


def test_cifar_s_validation_is_what_is_in_its_file(cifar: Images) -> None:
    inputs, targets = (torch.cat(parts) for parts in zip(*cifar.validation(3), strict=True))
    pixels, labels = records(CIFAR_FILES[-1])
    assert torch.equal(pixels_of(inputs), pixels)
    assert torch.equal(targets, labels.long())


def test_training_images_are_shifted_and_mirrored(cifar: Images) -> None:
    """Every image is one of the 9 x 9 x 2 that its original can become, and all shifts come."""
    images, labels = (torch.cat(parts) for parts in zip(*map(records, CIFAR_FILES[:-1]), strict=True))
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


def test_bad_records_are_named(tmp_path: Path) -> None:
    made = cifar_files()
    good = made["data_batch_3.bin"]
    for bad, message in (
        (good[:-1], "24,583 bytes, expected records of 3,073"),
        (b"", "0 bytes, expected records"),
        (b"\x0a" + good[1:], "label 10, expected 0 to 9"),
    ):
        put(tmp_path, {**made, "data_batch_3.bin": bad})
        with pytest.raises(ValueError, match=f"^{tmp_path}/data_batch_3.bin: {message}"):
            Images("cifar10", tmp_path)


# Names, and models that fit ------------------------------------------------------------------------------------------


def test_data_by_its_name_and_a_model_that_fits(tmp_path: Path) -> None:
    put(tmp_path, {**idx_files(), **cifar_files()})
    for name, spec in FITTING.items():
        config = model_config(spec)
        check_fit(config, name)
        inputs, targets = load_data(name, tmp_path, 16 if name == "text" else None).batch(0, 4, seed=0)
        assert inputs.shape[1:] == (config.inputs or (16,))
        assert len(targets) == 4
    check_fit(model_config("cnn:channels=3,size=32"), "cifar10")


def test_a_model_that_does_not_fit_is_refused() -> None:
    for spec, name, message in (
        ("cnn:size=8", "mnist", "model cnn takes 1 x 8 x 8, and mnist has 1 x 28 x 28: use model cnn:size=28"),
        ("cnn:size=32", "cifar10", "3 x 32 x 32: use model resnet18"),
        ("cnn:size=28", "digits", "use model cnn:size=8, or other data"),
        ("resnet18", "text", "model resnet18 takes 3 x 32 x 32, and text has bytes: use model gpt"),
        ("gpt", "mnist", "model gpt takes bytes, and mnist has 1 x 28 x 28: use model cnn:size=28"),
        ("cnn:classes=9", "digits", "model cnn: expected classes=10 or more for digits, got 9"),
        ("cnn", "faces", "data 'faces' is unknown, expected one of text, digits, mnist, fashion-mnist, cifar10"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            check_fit(model_config(spec), name)
