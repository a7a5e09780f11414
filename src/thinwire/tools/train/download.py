"""Downloads data sets into a folder by pooch, which the extra `thinwire[data]` installs: retries, mirrors, SHA-256."""

from pathlib import Path

from .image_files import CIFAR_ARCHIVE, CIFAR_FILES, CIFAR_FOLDER, MNIST_FILES

RETRIES = 2
"""Further tries after the first one, for each mirror."""
TIMEOUT = 30.0
"""Seconds without a connection, or without a byte, after which a try fails."""
_MNIST = (
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
"""SHA-256 of each of `MNIST_FILES` with .gz."""
FILES: dict[str, dict[str, str]] = {
    "mnist": {f"{name}.gz": digest for name, digest in zip(MNIST_FILES, _MNIST, strict=True)},
    "cifar10": {CIFAR_ARCHIVE: "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
}
"""The SHA-256 of each file of a data set, by its name."""
MIRRORS = {
    "mnist": ["https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"],
    "cifar10": ["https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/"],
}


def download(data: str, folder: Path) -> None:
    """Fetch the files of a data set that the folder lacks, or has damaged; pooch says so on stderr.

    Raises ValueError if pooch is not installed, and OSError if a file cannot be fetched or written.
    """
    try:
        import pooch
        import requests
    except ModuleNotFoundError as error:
        raise ValueError(f"downloads need {error.name}, which is not installed: pip install 'thinwire[data]'") from None
    downloader = pooch.HTTPDownloader(timeout=TIMEOUT)
    for name, digest in FILES[data].items():
        unpacked = CIFAR_FILES if name == CIFAR_ARCHIVE else [name.removesuffix(".gz")]
        if any(all((place / each).is_file() for each in unpacked) for place in (folder, folder / CIFAR_FOLDER)):
            continue
        faults = []
        for mirror in MIRRORS[data]:
            cache = pooch.create(folder, mirror, registry={name: f"sha256:{digest}"}, retry_if_failed=RETRIES)
            try:
                cache.fetch(name, downloader=downloader)
                (folder / name).chmod(0o644)  # pooch leaves it readable by its owner alone
                break
            except (requests.RequestException, ValueError) as error:  # ValueError: another SHA-256
                faults.append(f"{mirror}{name}: {' '.join(str(error).split())}")
            except OSError as error:
                raise OSError(f"{folder / name} cannot be written: {error}") from None
        else:
            raise OSError(
                f"{name} could not be downloaded ({'; '.join(faults)}); put it into {folder.absolute()} by hand, or "
                "try again later"
            )
