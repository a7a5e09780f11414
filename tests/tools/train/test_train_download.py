"""Downloads, from real servers on this machine: one that fails in every way, and one without a trusted certificate."""

import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.processes import run_module
from thinwire.tools.train import cifar, download, idx
from thinwire.tools.train.download import SOURCES, File, Source, fetch

CONTENT = bytes(range(256)) * 1000
NAME = "images.bin"
FILE = File(NAME, len(CONTENT), sha256(CONTENT).hexdigest())

Reply = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture(autouse=True)
def quick_and_without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "PAUSE", 0.01)


def send(code: int = 200, body: bytes = CONTENT, length: int | None = None) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)

    return reply


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:  # until the other side has closed
        handler.wfile.write(CONTENT)


def silent(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(CONTENT)))
    handler.end_headers()
    handler.wfile.write(CONTENT[:1000])
    handler.wfile.flush()
    time.sleep(20)


def no_answer(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def moved(url: str) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", url)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return reply


class Site:
    """Answers one request after the other with what is planned, the last again and again."""

    def __init__(self, url: str, plan: tuple[Reply, ...]) -> None:
        self.url, self.plan, self.paths = url, list(plan), list[str]()


@contextmanager
def site(*plan: Reply, certificate: Path | None = None) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.paths.append(self.path)
            try:
                (made.plan.pop(0) if len(made.plan) > 1 else made.plan[0])(self)
            except OSError:
                self.close_connection = True

        def log_message(self, *_: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None: ...  # a client that goes away in the middle is what is tested

    server = Server(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    made = Site(f"http{'s' if certificate else ''}://127.0.0.1:{server.server_port}/", plan)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.progress: list[tuple[str, int, int]] = []

    def report(self, *progress: Any) -> None:
        self.progress.append(progress)


def get(folder: Path, *mirrors: str, file: File = FILE, log: Log | None = None) -> list[str]:
    log = log or Log()
    return fetch(Source((file,), mirrors), folder, log.report, log.lines.append)


def only(folder: Path) -> None:
    """The file is there, and nothing that was left behind."""
    assert (folder / NAME).read_bytes() == CONTENT
    assert [path.name for path in folder.iterdir()] == [NAME]


# What comes, and what is there ---------------------------------------------------------------------------------------


def test_a_file_comes_with_its_progress(tmp_path: Path) -> None:
    log, folder = Log(), tmp_path / "new" / "folder"
    with site(send()) as one:
        assert get(folder, one.url, log=log) == [NAME]
        assert one.paths == [f"/{NAME}"]
    only(folder)
    done = [bytes_done for _, bytes_done, _ in log.progress]
    assert done == sorted(done)
    assert log.progress[-1] == (NAME, len(CONTENT), len(CONTENT))
    assert len(log.progress) > 2
    assert log.lines == []
    assert (folder / NAME).stat().st_mode & 0o777 == shutil.copy(
        folder / NAME, tmp_path / "copy"
    ).stat().st_mode & 0o777


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(CONTENT)
    with site(send()) as one:
        assert get(tmp_path, one.url) == []
        assert one.paths == []


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (CONTENT[:-1] + b"?", f"SHA-256 {sha256(CONTENT[:-1] + b'?').hexdigest()}, expected {FILE.sha256}"),
        (CONTENT + b"?", "256,001 bytes, expected 256,000"),
        (b"", "0 bytes, expected 256,000"),
    ],
)
def test_a_wrong_file_is_reported_and_replaced(tmp_path: Path, old: bytes, message: str) -> None:
    (tmp_path / NAME).write_bytes(old)
    log = Log()
    with site(send()) as one:
        assert get(tmp_path, one.url, log=log) == [NAME]
    assert log.lines == [f"{tmp_path / NAME}: {message}; it will be replaced"]
    only(tmp_path)


def test_a_wrong_file_stays_until_there_is_a_better_one(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"old")
    with site(send(404)) as one, pytest.raises(OSError, match="HTTP 404"):
        get(tmp_path, one.url)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == b"old"


def test_unpacked_files_are_enough(tmp_path: Path) -> None:
    file = File(NAME, FILE.nbytes, FILE.sha256, ("inside/1", "inside/2"))
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/1").write_bytes(b"1")
    with site(send()) as one:
        (tmp_path / "inside/2").write_bytes(b"2")
        assert get(tmp_path, one.url, file=file) == []
        (tmp_path / "inside/2").unlink()
        assert get(tmp_path, one.url, file=file) == [NAME]
        (tmp_path / NAME).unlink()
        for name in ("1", "2"):  # directly in the folder, where they are read too
            (tmp_path / name).write_bytes(b"")
        assert get(tmp_path, one.url, file=file) == []


# What goes wrong on the way ------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Reply, str]] = {
    "wrong content": (send(body=CONTENT[::-1]), f"got {sha256(CONTENT[::-1]).hexdigest()}"),
    "500": (send(500, b"oops"), "HTTP 500 Internal Server Error"),
    "429": (send(429, b"slow"), "HTTP 429 Too Many Requests"),
    "cut off": (send(body=CONTENT[:1000], length=len(CONTENT)), "1000 bytes read, 255000 more expected"),
    "short": (send(body=CONTENT[:1000]), "does not match the known hash"),
    "endless": (endless, "more than the 256,000 bytes that were expected"),
    "one too many": (send(body=CONTENT + b"?"), "does not match the known hash"),
    "silence": (silent, "Read timed out"),
    "no answer": (no_answer, "Remote end closed connection without response"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_another_try_helps(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reply, message = FAULTS[what]
    if what == "silence":
        monkeypatch.setattr(download, "TIMEOUT", 2.0)
    log = Log()
    with site(reply, send()) as one:
        assert get(tmp_path, one.url, log=log) == [NAME]
        assert len(one.paths) == 2
        assert len(log.lines) == 1
        assert log.lines[0].startswith(f"{one.url}{NAME}: ")
        assert message in log.lines[0]
        assert log.lines[0].endswith("; trying again")
    only(tmp_path)


@pytest.mark.parametrize("what", ["wrong content", "500", "cut off", "endless"])
def test_in_the_end_it_is_given_up(tmp_path: Path, what: str) -> None:
    reply, message = FAULTS[what]
    with site(reply) as one:
        with pytest.raises(OSError, match="could not be downloaded in 3 tries") as caught:
            get(tmp_path, one.url)
        assert len(one.paths) == 3
        text = str(caught.value)
        assert text.count(f"{one.url}{NAME}: ") == 3
        assert text.count(message) >= 3
        assert text.endswith(f"put {NAME} into {tmp_path} by hand, or try again later")
        assert "\n" not in text
    assert list(tmp_path.iterdir()) == []


def test_mirrors_are_asked_in_turns(tmp_path: Path) -> None:
    with site(send(503)) as bad, site(send(500), send()) as good:
        assert get(tmp_path, bad.url, good.url) == [NAME]
        assert (len(bad.paths), len(good.paths)) == (2, 2)
    only(tmp_path)


def test_what_is_not_there_is_asked_for_once(tmp_path: Path) -> None:
    with site(send(404)) as without, site(send(500)) as broken:
        with pytest.raises(OSError, match="in 4 tries") as caught:
            get(tmp_path, without.url, broken.url)
        assert (len(without.paths), len(broken.paths)) == (1, 3)
        assert "HTTP 404 Not Found" in str(caught.value)


def test_nobody_there(tmp_path: Path) -> None:
    with site(send()) as gone:
        pass
    with pytest.raises(OSError, match="Connection refused"):
        get(tmp_path, gone.url)


def test_pauses_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TRIES", 4)
    monkeypatch.setattr(download, "PAUSE", 0.1)
    with site(send(500)) as one:
        started = time.monotonic()
        with pytest.raises(OSError, match="in 4 tries"):
            get(tmp_path, one.url)
        assert time.monotonic() - started >= 0.1 + 0.2 + 0.4


def test_an_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with site(send()) as one, pytest.raises(KeyboardInterrupt):
        fetch(Source((FILE,), (one.url,)), tmp_path, interrupt, print)
    assert list(tmp_path.iterdir()) == []


# Certificates --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    path = tmp_path_factory.mktemp("certificate") / "own.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    where = ["-keyout", str(path.with_suffix(".key")), "-out", str(path)]
    subprocess.run([*made.split(), *where], check=True, capture_output=True, timeout=60)
    return path


def test_a_certificate_that_nobody_signed_is_refused(tmp_path: Path, certificate: Path) -> None:
    with site(send(), certificate=certificate) as one:
        with pytest.raises(OSError, match=r"in 1 try .*CERTIFICATE_VERIFY_FAILED"):
            get(tmp_path, one.url)
        assert one.paths == []  # not even asked
    assert list(tmp_path.iterdir()) == []


def test_a_certificate_that_is_trusted_is_enough(
    tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    with site(send(), certificate=certificate) as one:
        assert get(tmp_path, one.url) == [NAME]
    only(tmp_path)


def test_a_file_that_has_moved_is_found(tmp_path: Path) -> None:
    with site(send()) as now, site(moved(f"{now.url}elsewhere")) as before:
        assert get(tmp_path, before.url) == [NAME]
        assert now.paths == ["/elsewhere"]
    only(tmp_path)


# The disk ------------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """The system lets that process write 100,000 bytes into a file and no more."""
    with site(send()) as one:
        printed = run_module("full_disk", one.url, tmp_path, NAME, FILE.nbytes, FILE.sha256)
        assert len(one.paths) == 1  # another try would not help
    expected = f"{re.escape(str(tmp_path))}/{NAME} cannot be written: File too large; make room there, .*"
    assert re.fullmatch(expected, printed), printed
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=f"^{folder} cannot be written: .*; check the path, or give another folder$"):
            get(folder, "http://127.0.0.1:1/")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder that even root cannot write to")
def test_a_folder_that_cannot_be_written() -> None:
    with site(send()) as one:
        with pytest.raises(OSError, match=f"^/proc/self/{NAME} cannot be written: "):
            get(Path("/proc/self"), one.url)
        assert one.paths == []


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with site(send()) as one, pytest.raises(OSError, match=f"^{tmp_path / NAME} cannot be read: Is a directory"):
        get(tmp_path, one.url)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


# The list of sources -------------------------------------------------------------------------------------------------


def test_the_files_that_are_listed_are_those_that_are_read() -> None:
    assert {file.name for file in SOURCES["mnist"].files} == {
        f"{name}.gz" for part in ("train", "t10k") for name in idx.files(part)
    }
    assert [file.name for file in SOURCES["cifar10"].files] == [cifar.ARCHIVE]
    for source in SOURCES.values():
        assert all(mirror.startswith("https://") and mirror.endswith("/") for mirror in source.mirrors)
        assert len(source.mirrors) > 1
        assert all(re.fullmatch("[0-9a-f]{64}", file.sha256) and file.unpacked for file in source.files)


def test_without_pooch_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(
        ValueError, match=r"downloads need pooch, which is not installed: pip install 'thinwire\[data\]'"
    ):
        get(tmp_path, "http://127.0.0.1:1/")
