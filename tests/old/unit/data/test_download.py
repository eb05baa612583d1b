"""Downloads from a server on this machine: whole, damaged, missing, cut off, and only once."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.data import download
from paceline.data.download import REMOTE_FILES, RemoteFile, directory_of, fetch
from paceline.errors import DataError
from paceline.spec import DataSpec

CONTENT = bytes(range(256)) * 3000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    requests: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        if self.path == "/absent":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        body = {"/short": CONTENT[:1000], "/damaged": b"?" + CONTENT[1:]}.get(self.path, CONTENT)
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.requests = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def test_fetches_once(server: Server, tmp_path: Path) -> None:
    files = [RemoteFile("a.gz", (f"{server.url}/a",), MD5), RemoteFile("b.gz", (f"{server.url}/b",), MD5)]
    for _ in range(2):
        fetch(files, tmp_path / "new" / "place")
    assert server.requests == ["/a", "/b"]
    assert (tmp_path / "new" / "place" / "b.gz").read_bytes() == CONTENT
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("bad", ["absent", "damaged", "short"])
def test_goes_on_to_the_mirror(server: Server, tmp_path: Path, bad: str) -> None:
    fetch([RemoteFile("a", (f"{server.url}/{bad}", f"{server.url}/good"), MD5)], tmp_path)
    assert (tmp_path / "a").read_bytes() == CONTENT


@pytest.mark.parametrize(("bad", "reason"), [("absent", "Not Found"), ("damaged", "MD5"), ("short", "")])
def test_says_which_file_and_address_failed(server: Server, tmp_path: Path, bad: str, reason: str) -> None:
    url = f"{server.url}/{bad}"
    with pytest.raises(DataError) as caught:
        fetch([RemoteFile("digits.gz", (url,), MD5)], tmp_path)
    message = str(caught.value)
    assert "digits.gz" in message and url in message and reason in message and "data.dir" in message
    assert [path.name for path in tmp_path.iterdir()] == [".download.lock"]


def test_no_network(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a could not be downloaded from http://127.0.0.1:1/a \(.*refused"):
        fetch([RemoteFile("a", ("http://127.0.0.1:1/a",), MD5)], tmp_path)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="PACELINE_DATA"):
        fetch([RemoteFile("a", ("http://127.0.0.1:1/a",), MD5)], tmp_path / "file" / "sub")


def test_a_bar_is_drawn_on_a_terminal_only(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch([RemoteFile("a.gz", (f"{server.url}/a",), MD5)], tmp_path)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    fetch([RemoteFile("b.gz", (f"{server.url}/b",), MD5)], tmp_path)
    out, err = capsys.readouterr()
    assert out == "" and "b.gz" in err


def test_only_the_cache_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setitem(download.REMOTE_FILES, "mnist", (RemoteFile("a.gz", (f"{server.url}/a",), MD5),))
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "cache"))
    (tmp_path / "mine").mkdir()
    assert directory_of(DataSpec("mnist", dir=str(tmp_path / "mine"))) == tmp_path / "mine"
    assert server.requests == [] and not list((tmp_path / "mine").iterdir())
    assert (directory_of(DataSpec("mnist")) / "a.gz").read_bytes() == CONTENT
    with pytest.raises(DataError, match="not a directory"):
        directory_of(DataSpec("mnist", dir=str(tmp_path / "nowhere")))


def test_the_published_checksums_are_checksums() -> None:
    for files in REMOTE_FILES.values():
        for file in files:
            assert len(bytes.fromhex(file.md5)) == 16 and all(url.endswith(file.name) for url in file.urls)
