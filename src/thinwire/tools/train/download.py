"""Downloads data sets into a folder, with pooch, which the extra `thinwire[data]` installs.

A file is renamed to its name when it is complete and has the SHA-256 that is listed here.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import Any

from thinwire.tools.files import sha256_of

from . import cifar, idx

TRIES = 3
"""Number of tries for each mirror, in turns with the others."""
PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds before the second try, doubled before each later one."""
TIMEOUT = 30.0
"""Seconds without a connection, or without a byte, after which a try fails."""
_PIECE = 1 << 16
_BUSY = {408, 425, 429}
"""HTTP status codes for which another try may succeed; other codes from 400 to 499 are final."""

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class File:
    """A file of a data set, with its expected size and SHA-256."""

    name: str
    nbytes: int
    sha256: str
    unpacked: tuple[str, ...] = ()
    """Names of the unpacked files. If the folder has all of them, this file is not needed."""


@dataclass(frozen=True)
class Source:
    """The files of a data set, and the mirrors that have them."""

    files: tuple[File, ...]
    mirrors: tuple[str, ...]
    """URLs without the file's name, in the order in which they are tried."""


_MNIST = (
    (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)
"""Size and SHA-256 of each of `idx.FILES` with .gz."""

SOURCES = {
    "mnist": Source(
        tuple(File(f"{name}.gz", *facts, (name,)) for name, facts in zip(idx.FILES, _MNIST, strict=True)),
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    ),
    "cifar10": Source(
        (
            File(
                name=cifar.ARCHIVE,
                nbytes=170_052_171,
                sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                unpacked=tuple(f"{cifar.FOLDER}/{name}" for name in (*cifar.TRAIN, cifar.TEST)),
            ),
        ),
        ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/"),
    ),
}


def fetch(source: Source, folder: Path, report: Report, warn: Callable[[str], None]) -> list[str]:
    """Download the files of a data set that the folder does not have, or has damaged, and return their names.

    report   called with a file's name, the number of bytes that are done, and its size
    warn     called with a message if a file in the folder is damaged or a try fails

    Raises OSError if a file cannot be downloaded or written, and ValueError if pooch is not installed.
    """
    with _clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    wanted = [file for file in source.files if not _have(folder, file, warn)]
    for file in wanted:
        urls, faults = [mirror + file.name for mirror in source.mirrors] * TRIES, list[str]()
        while urls:
            url = urls.pop(0)
            if faults:
                time.sleep(min(PAUSE * 2 ** (len(faults) - 1), _LONGEST_PAUSE))
            fault, is_final = _try(url, folder, file, report)
            if not fault:
                break
            if is_final:
                urls = [other for other in urls if other != url]
            faults.append(f"{url}: {' '.join(fault.split())}")
            warn(f"{faults[-1]}; {'trying again' if urls else 'giving up'}")
        else:
            tried = "1 try" if len(faults) == 1 else f"{len(faults)} tries"
            raise OSError(
                f"{file.name} could not be downloaded in {tried} ({'; '.join(faults)}); "
                f"put {file.name} into {folder.absolute()} by hand, or try again later"
            )
    return [file.name for file in wanted]


def _have(folder: Path, file: File, warn: Callable[[str], None]) -> bool:
    path = folder / file.name
    with _clear_errors(path, "read"):
        if not path.exists():
            places = [[folder / name for name in file.unpacked], [folder / Path(name).name for name in file.unpacked]]
            return any(paths and all(path.is_file() for path in paths) for paths in places)
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        if path.stat().st_size != file.nbytes:
            warn(f"{path}: {path.stat().st_size:,} bytes, expected {file.nbytes:,}; it will be replaced")
            return False
        digest = sha256_of(path)
    if digest != file.sha256:
        warn(f"{path}: SHA-256 {digest}, expected {file.sha256}; it will be replaced")
    return digest == file.sha256


def _try(url: str, folder: Path, file: File, report: Report) -> tuple[str, bool]:
    """Download a file. Return why that failed, "" if it did not, and whether the same URL cannot succeed later."""
    try:
        import pooch  # here, because only --download needs it
        import requests
    except ModuleNotFoundError as error:
        raise ValueError(f"downloads need {error.name}, which is not installed: pip install 'thinwire[data]'") from None
    pooch.get_logger().setLevel("ERROR")
    downloader = pooch.HTTPDownloader(progressbar=_Progress(file, report), chunk_size=_PIECE, timeout=TIMEOUT)
    given: dict[str, Any] = {"fname": file.name, "path": folder, "downloader": downloader}
    with _clear_errors(folder / file.name):
        try:
            pooch.retrieve(url, f"sha256:{file.sha256}", **given)
            (folder / file.name).chmod(0o644)  # pooch leaves it readable by its owner alone
            return "", False
        except requests.HTTPError as error:
            answer: Any = error.response
            code = answer.status_code
            return f"HTTP {code} {answer.reason}", 400 <= code < 500 and code not in _BUSY
        except (requests.RequestException, ValueError) as error:  # ValueError: of another SHA-256, or `_Progress`
            return str(error) or type(error).__name__, isinstance(error, requests.exceptions.SSLError)


class _Progress:
    """Progress bar of pooch, which ends a download that is longer than the file."""

    total = 0

    def __init__(self, file: File, report: Report) -> None:
        self._file, self._report, self._done = file, report, 0

    def update(self, nbytes: int) -> None:  # the last piece may be shorter
        self._done += nbytes
        if self._done >= self._file.nbytes + 2 * _PIECE:
            raise ValueError(f"more than the {self._file.nbytes:,} bytes that were expected")
        self._report(self._file.name, min(self._done, self._file.nbytes), self._file.nbytes)

    def reset(self) -> None:  # pooch counts the whole file once more at its end
        self._done = 0

    def close(self) -> None:
        pass


@contextmanager
def _clear_errors(path: Path, done: str = "written") -> Iterator[None]:
    """Replace an OSError of the disk by one with the path, the reason and advice."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        full = error.errno in (ENOSPC, EDQUOT, EFBIG)
        advice = "remove it" if done == "read" else "make room there" if full else "check the path"
        raise OSError(f"{path} cannot be {done}: {reason}; {advice}, or give another folder") from error
