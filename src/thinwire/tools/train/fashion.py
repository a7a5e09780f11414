"""Finds Fashion-MNIST in a folder that the user names, or in the folder of Debian's package; it is never downloaded.

The data set is that of Xiao, Rasul and Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine
learning algorithms", 2017.
"""

from pathlib import Path

from . import idx

PACKAGE = "dataset-fashion-mnist"
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
"""The folder of Debian's package."""


def find_folder(folder: Path) -> Path:
    """Return the first of `folder` and Debian's folder that has any of the files; raise ValueError if it lacks one."""
    for place in (folder, INSTALLED):
        missing = idx.missing_files(place)
        if not missing:
            return place
        if len(missing) < len(idx.FILES):
            raise ValueError(
                f"{place} has no {missing[0]}[.gz], but others of Fashion-MNIST's files; {_advice(folder)}"
            )
    raise ValueError(f"neither {folder} nor {INSTALLED} has Fashion-MNIST, and it is not downloaded; {_advice(folder)}")


def _advice(folder: Path) -> str:
    return (
        f"apt-get install {PACKAGE}, or put {', '.join(idx.FILES)}, each with or without .gz, into {folder} or into "
        "another folder that --data-dir names"
    )
