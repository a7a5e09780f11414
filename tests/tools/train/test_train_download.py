"""Downloads by pooch, from servers on this machine that fail in many ways."""

import gzip
import io
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from thinwire.tools.train import image_files as module
from thinwire.tools.train.image_files import (
    CIFAR_ARCHIVE,
    CIFAR_FILES,
    CIFAR_FOLDER,
    DOWNLOADS,
    MNIST_FILES,
    download,
    find,
)

CONTENT = gzip.compress(bytes(range(256)) * 1000, mtime=0) * 200
NAME = "images.bin.gz"

Reply = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy, and no pauses between tries."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("pooch.core.time.sleep", lambda _: None)


def send(code: int = 200, body: bytes = CONTENT, length: int | None = None) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)

    return reply


class Handler(BaseHTTPRequestHandler):
    server: "Site"

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        plan = self.server.plan
        with suppress(OSError):  # a client that goes away in the middle is what is tested
            (plan.pop(0) if len(plan) > 1 else plan[0])(self)

    def log_message(self, *_: Any) -> None: ...


class Site(ThreadingHTTPServer):
    """Answers one request after the other with what is planned, the last again and again."""

    daemon_threads = True

    def __init__(self, plan: tuple[Reply, ...]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.plan, self.paths = f"http://127.0.0.1:{self.server_port}/", list(plan), list[str]()

    def handle_error(self, *_: Any) -> None: ...


@contextmanager
def site(*plan: Reply) -> Iterator[Site]:
    with Site(plan) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join(10)


def get(folder: Path, *mirrors: str) -> None:
    """Download a data set of one file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DOWNLOADS, "mnist", (mirrors, {NAME: sha256(CONTENT).hexdigest()}))
        download("mnist", folder)


def assert_only(folder: Path) -> None:
    """The file is there, and nothing that was left behind."""
    assert (folder / NAME).read_bytes() == CONTENT
    assert [path.name for path in folder.iterdir()] == [NAME]


def test_a_file_is_fetched_once_and_a_damaged_one_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with site(send()) as one:
        for before, requests in ((None, 1), (CONTENT, 1), (CONTENT[:-1] + b"?", 2), (b"", 3)):
            if before is not None:
                (folder / NAME).write_bytes(before)
            get(folder, one.url)
            assert one.paths == [f"/{NAME}"] * requests
            assert_only(folder)
    assert (folder / NAME).stat().st_mode & 0o777 == 0o644


def test_unpacked_files_are_enough(tmp_path: Path) -> None:
    for name in (*MNIST_FILES, *CIFAR_FILES):
        (tmp_path / name).write_bytes(b"")
    get(tmp_path, "http://127.0.0.1:1/")
    download("cifar10", tmp_path)


def test_an_archive_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in (*CIFAR_FILES, "../outside"):
            member = tarfile.TarInfo(f"{CIFAR_FOLDER}/{name}")
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    with site(send(body=file.getvalue())) as one:
        digest = sha256(file.getvalue()).hexdigest()
        monkeypatch.setitem(DOWNLOADS, "cifar10", ((one.url,), {CIFAR_ARCHIVE: digest}))
        download("cifar10", tmp_path)
        download("cifar10", tmp_path)
        assert len(one.paths) == 1
    assert [path.read_text() for path in find("cifar10", tmp_path)] == list(CIFAR_FILES)
    assert {path.name for path in tmp_path.iterdir()} == {CIFAR_ARCHIVE, CIFAR_FOLDER}


def silent(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(CONTENT)))
    handler.end_headers()
    handler.wfile.write(CONTENT[:1000])
    handler.wfile.flush()
    handler.connection.settimeout(20)
    handler.connection.recv(1)  # until the other side has closed


FAULTS: dict[str, tuple[Reply, str]] = {
    "wrong content": (send(body=CONTENT[::-1]), "does not match the known hash"),
    "500": (send(500, b"oops"), "500 Server Error"),
    "cut off": (send(body=CONTENT[:1000], length=len(CONTENT)), "IncompleteRead"),
    "silence": (silent, "Read timed out"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_another_try_helps_and_in_the_end_it_is_an_error(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, message = FAULTS[what]
    if what == "silence":
        monkeypatch.setattr(module, "TIMEOUT", 0.5)
    with site(reply, send()) as one:
        get(tmp_path, one.url)
        assert len(one.paths) == 2
    assert_only(tmp_path)
    (tmp_path / NAME).write_bytes(b"old")
    with site(reply) as bad:
        with pytest.raises(OSError, match=f"^{NAME} could not be downloaded") as caught:
            get(tmp_path, bad.url)
        assert len(bad.paths) == 3
    assert f"({bad.url}{NAME}: " in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (tmp_path / NAME).read_bytes() == b"old", "it stays until there is a better one"


def test_the_next_mirror_is_asked(tmp_path: Path) -> None:
    with site(send()) as gone:
        pass
    with site(send(404)) as without, site(send()) as good:
        get(tmp_path, gone.url, without.url, good.url)
        assert_only(tmp_path)
        (tmp_path / NAME).unlink()
        with pytest.raises(
            OSError, match=rf"{gone.url}{NAME}: .*Connection refused.*; {without.url}{NAME}: 404 Client"
        ):
            get(tmp_path, gone.url, without.url)


def test_without_pooch_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ValueError, match=r"downloads need pooch, .*: pip install 'thinwire\[data\]'"):
        get(tmp_path, "http://127.0.0.1:1/")
