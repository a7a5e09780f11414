"""The files of MNIST, Fashion-MNIST and CIFAR-10: how they are found, fetched and read; images and labels are uint8.

MNIST and Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017) are in IDX files, gzipped or not: the bytes 0, 0, 8 (unsigned
bytes) and the number of dimensions; these, in 4 bytes each with the highest first; then the values.

CIFAR-10's binary version has records of 3,073 bytes: the label, then 32 x 32 red, green and blue values.
"""

import gzip
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from . import FASHION_FOLDER

FASHION_PACKAGE = "dataset-fashion-mnist"
CLASSES = 10
RECORD = 1 + 3 * 32 * 32
CIFAR_FOLDER, CIFAR_ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
MNIST_FILES = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip
CIFAR_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
FILES = {
    "mnist": (MNIST_FILES, "put them there, gzipped or not, or add --download"),
    "fashion-mnist": (
        MNIST_FILES,
        f"apt-get install {FASHION_PACKAGE} puts them into {FASHION_FOLDER}: name the folder by --data-dir",
    ),
    "cifar10": (CIFAR_FILES, f"unpack {CIFAR_ARCHIVE} there, or add --download"),
}
"""The files of each data set, those of the validation last, and how to get them."""
DOWNLOADS = {
    "mnist": (
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        {
            f"{MNIST_FILES[0]}.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            f"{MNIST_FILES[1]}.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            f"{MNIST_FILES[2]}.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            f"{MNIST_FILES[3]}.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "cifar10": (
        ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/"),
        {CIFAR_ARCHIVE: "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    ),
}
"""The mirrors of a data set, and the SHA-256 of what they have."""
RETRIES, TIMEOUT = 2, 30.0  # Further tries for each mirror, and seconds without a byte after which a try fails
_FIRST_LABELS = {"mnist": "50419213143536172869", "fashion-mnist": "90030272550955791064"}  # Else these are alike

Parts = dict[str, tuple[Tensor, Tensor]]  # The images and labels of "train" and "test"


def find(data: str, folder: Path) -> list[Path]:
    """Return the paths of the files of a data set; raise ValueError, with how to get them, if one is missing."""
    names, advice = FILES[data]
    found = []
    for name in names:
        places = folder / name, folder / f"{name}.gz", folder / CIFAR_FOLDER / name
        path = next(filter(Path.is_file, places), None)
        if path is None:
            raise ValueError(f"{folder} has no {name} of {data}; expected {', '.join(names)} there; {advice}")
        found.append(path)
    return found


def download(data: str, folder: Path) -> None:
    """Fetch the files of a data set that the folder lacks, or has damaged; raise OSError if one cannot be fetched."""
    if data not in DOWNLOADS:
        return
    with suppress(ValueError):
        if all(path.suffix != ".gz" for path in find(data, folder)):
            return
    try:
        import pooch
    except ModuleNotFoundError:
        raise ValueError("downloads need pooch, which is not installed: pip install 'thinwire[data]'") from None
    mirrors, digests = DOWNLOADS[data]
    members = [f"{CIFAR_FOLDER}/{name}" for name in CIFAR_FILES]
    for name, digest in digests.items():
        unpack = pooch.Untar(members=members, extract_dir=".") if name == CIFAR_ARCHIVE else None
        faults = []
        for mirror in mirrors:
            cache = pooch.create(folder, mirror, registry={name: f"sha256:{digest}"}, retry_if_failed=RETRIES)
            try:
                cache.fetch(name, processor=unpack, downloader=pooch.HTTPDownloader(timeout=TIMEOUT))
                (folder / name).chmod(0o644)  # pooch leaves it readable by its owner alone
                break
            except (OSError, ValueError) as error:  # ValueError: another SHA-256
                faults.append(f"{mirror}{name}: {' '.join(str(error).split())}")
        else:
            raise OSError(f"{name} could not be downloaded into {folder.absolute()} ({'; '.join(faults)})")


def read(data: str, folder: Path) -> Parts:
    """Read a data set; raise ValueError if a file is missing, damaged or of another one."""
    paths = find(data, folder)
    if data == "cifar10":
        found = [_read_records(path) for path in paths]
        images, labels = map(torch.cat, zip(*found[:-1], strict=True))
        return {"train": (images, labels), "test": found[-1]}
    parts = {}
    for part, (images_path, labels_path) in (("train", paths[:2]), ("test", paths[2:])):
        images, labels = _read_idx(images_path, (28, 28)), _read_idx(labels_path, ())
        if len(images) != len(labels):
            raise ValueError(f"{labels_path}: {len(labels)} labels, expected one for each of {len(images)} images")
        parts[part] = images[:, None], _checked(labels, labels_path)
    first = "".join(map(str, parts["train"][1][:20].tolist()))
    if first in _FIRST_LABELS.values() and first != _FIRST_LABELS[data]:
        raise ValueError(f"{paths[1]}: the labels of another data set, expected {data}; give its folder by --data-dir")
    return parts


def _read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    content = _content(path)
    count = int.from_bytes(content[4:8], "big")
    header = struct.pack(f">{2 + len(shape)}I", 0x0801 + len(shape), count, *shape)
    nbytes = len(header) + count * torch.Size(shape).numel()
    if not count or not content.startswith(header) or len(content) != nbytes:
        got = f"{len(content):,} bytes that begin with {content[: len(header)].hex()}"
        raise ValueError(f"{path}: {got}, expected {nbytes:,} that begin with {header.hex()}")
    return torch.frombuffer(bytearray(content[len(header) :]), dtype=torch.uint8).view(count, *shape)


def _read_records(path: Path) -> tuple[Tensor, Tensor]:
    content = _content(path)
    if not content or len(content) % RECORD:
        raise ValueError(f"{path}: {len(content):,} bytes, expected records of {RECORD:,}")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), _checked(records[:, 0].clone(), path)


def _checked(labels: Tensor, path: Path) -> Tensor:
    if labels.max() >= CLASSES:
        raise ValueError(f"{path}: label {int(labels.max())}, expected 0 to {CLASSES - 1}")
    return labels


def _content(path: Path) -> bytes:
    """Return the content of a file, unpacked if it ends in .gz."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: {error}, expected a whole gzip file") from None
