"""Downloads data sets into a folder.

A file is accepted only if it has the size and the SHA-256 that are listed here. It is written to a temporary file,
which is renamed when it is complete and correct: a reader sees the old file or the new one. Certificates are verified
as the system does it, and a redirect from https to http is not followed.
"""

import os
import secrets
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from errno import EDQUOT, EFBIG, ENOSPC
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from . import cifar, idx

_PIECE = 1 << 16
_LONGEST_PAUSE = 30.0
_BUSY = {408, 425, 429}
"""HTTP status codes for which another try may succeed; other codes from 400 to 499 are final."""


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


def _mnist(name: str, nbytes: int, digest: str) -> File:
    return File(f"{name}.gz", nbytes, digest, (name,))


SOURCES = {
    "mnist": Source(
        (
            _mnist(
                idx.files("train")[0], 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
            ),
            _mnist(idx.files("train")[1], 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            _mnist(idx.files("t10k")[0], 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            _mnist(idx.files("t10k")[1], 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    ),
    "cifar10": Source(
        (
            File(
                cifar.ARCHIVE,
                170_052_171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                tuple(f"{cifar.FOLDER}/{name}" for name in (*cifar.TRAIN, cifar.TEST)),
            ),
        ),
        ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/"),
    ),
}


def fetch(
    dataset: str,
    folder: Path,
    *,
    report: Callable[[str, int, int], None] | None = None,
    tell: Callable[[str], None] | None = None,
    sources: Mapping[str, Source] = SOURCES,
    tries: int = 3,
    pause: float = 1.0,
    timeout: float = 30.0,
) -> list[str]:
    """Download the files of a data set that the folder does not have, or has damaged, and return their names.

    report    called with a file's name, the number of bytes that are done, and its size
    tell      called with a message if a file in the folder is damaged or a try fails; prints to stderr if not given
    tries     number of tries for each mirror, in turns with the others
    pause     seconds before the second try; doubled before each later try
    timeout   seconds without a connection, or without a byte, after which a try fails

    Raises OSError, with the reason and advice, if a file cannot be downloaded or written.
    """
    if dataset not in sources:
        raise ValueError(f"data {dataset!r} cannot be downloaded, expected one of {', '.join(sources)}")
    source, tell = sources[dataset], tell or _to_stderr
    with _clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    wanted = [file for file in source.files if not _have(folder, file, tell)]
    for file in wanted:
        _fetch_file(folder, file, source.mirrors, report, tell, tries=tries, pause=pause, timeout=timeout)
    return [file.name for file in wanted]


def _have(folder: Path, file: File, tell: Callable[[str], None]) -> bool:
    path = folder / file.name
    with _clear_errors(path, "read"):
        if not path.exists():
            places = [[folder / name for name in file.unpacked], [folder / Path(name).name for name in file.unpacked]]
            return any(paths and all(path.is_file() for path in paths) for paths in places)
        if path.stat().st_size != file.nbytes:
            tell(f"{path}: {path.stat().st_size:,} bytes, expected {file.nbytes:,}; it will be replaced")
            return False
        with path.open("rb") as content:
            digest = _digest(content)
    if digest != file.sha256:
        tell(f"{path}: SHA-256 {digest}, expected {file.sha256}; it will be replaced")
    return digest == file.sha256


def _fetch_file(
    folder: Path,
    file: File,
    mirrors: tuple[str, ...],
    report: Callable[[str, int, int], None] | None,
    tell: Callable[[str], None],
    *,
    tries: int,
    pause: float,
    timeout: float,
) -> None:
    opener = build_opener(HTTPSHandler(context=ssl.create_default_context()), _SafeRedirects())
    asked = [mirror + file.name for mirror in mirrors] * tries
    faults: list[str] = []
    while asked:
        url = asked.pop(0)
        if faults:
            time.sleep(min(pause * 2 ** (len(faults) - 1), _LONGEST_PAUSE))
        try:
            _try(opener, url, folder, file, report, timeout)
            return
        except _FailedTry as fault:
            if fault.final:
                asked = [other for other in asked if other != url]
            faults.append(f"{url}: {fault}")
            tell(f"{faults[-1]}; {'trying again' if asked else 'giving up'}")
    tried = "1 try" if len(faults) == 1 else f"{len(faults)} tries"
    raise OSError(
        f"{file.name} could not be downloaded in {tried} ({'; '.join(faults)}); "
        f"put {file.name} into {folder.absolute()} by hand, or try again later"
    )


def _try(
    opener: OpenerDirector,
    url: str,
    folder: Path,
    file: File,
    report: Callable[[str, int, int], None] | None,
    timeout: float,
) -> None:
    part = folder / f".{file.name}.{secrets.token_hex(4)}.part"
    digest, done = sha256(), 0
    try:
        with _clear_errors(part):
            content = part.open("xb")
        with content:
            for piece in _pieces(opener, url, file.nbytes, timeout):
                with _clear_errors(part):
                    content.write(piece)
                digest.update(piece)
                done += len(piece)
                if report is not None:
                    report(file.name, done, file.nbytes)
            with _clear_errors(part):
                content.flush()  # a full disk may raise only here
        if digest.hexdigest() != file.sha256:
            raise _FailedTry(f"SHA-256 {digest.hexdigest()}, expected {file.sha256}")
        with _clear_errors(folder / file.name):
            os.replace(part, folder / file.name)
    finally:
        part.unlink(missing_ok=True)


def _pieces(opener: OpenerDirector, url: str, nbytes: int, timeout: float) -> Iterator[bytes]:
    """Yield exactly `nbytes` bytes in pieces; raise _FailedTry if there are more or fewer, or the network fails."""
    done = 0
    try:
        with opener.open(Request(url, headers={"User-Agent": "thinwire"}), timeout=timeout) as response:
            while piece := response.read1(_PIECE):
                done += len(piece)
                if done > nbytes:
                    raise _FailedTry(f"more than the {nbytes:,} bytes that were expected")
                yield piece
    except HTTPError as error:
        error.close()
        final = 400 <= error.code < 500 and error.code not in _BUSY
        raise _FailedTry(f"HTTP {error.code} {error.reason}", final=final) from error
    except URLError as error:
        final = isinstance(error.reason, ssl.SSLCertVerificationError)
        raise _FailedTry(_line(error.reason), final=final) from error
    except (OSError, HTTPException) as error:
        raise _FailedTry(f"after {done:,} bytes: {_line(error)}") from error
    if done < nbytes:
        raise _FailedTry(f"ended after {done:,} of {nbytes:,} bytes")


class _FailedTry(Exception):
    """A failed try to download a file; `final` if another try at the same URL cannot succeed."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class _SafeRedirects(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> Request | None:
        if req.type == "https" and not newurl.lower().startswith("https://"):
            raise URLError(f"sent on to {newurl}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


@contextmanager
def _clear_errors(path: Path, done: str = "written") -> Iterator[None]:
    """Replace an OSError of the disk by one with the path, the reason and advice in one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        full = error.errno in (ENOSPC, EDQUOT, EFBIG)
        advice = "remove it" if done == "read" else "make room there" if full else "check the path"
        raise OSError(f"{path} cannot be {done}: {reason}; {advice}, or give another folder") from error


def _digest(content: IO[bytes]) -> str:
    digest = sha256()
    while piece := content.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()


def _line(error: object) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
