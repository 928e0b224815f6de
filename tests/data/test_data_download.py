"""A download replaces its target only if it is complete and right; every fault of a server is named."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ece408_op.data import _download
from ece408_op.errors import DataError

CONTENT = bytes(range(256)) * 400
SIZE = len(CONTENT)
SHA256 = hashlib.sha256(CONTENT).hexdigest()

release = threading.Event()


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT with the fault that the path names."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        fault = self.path.strip("/")
        if fault == "missing":
            self.send_error(404, "Not here")
            return
        if fault == "silent":
            release.wait(30)
            return
        if fault == "moved":
            self.send_response(302)
            self.send_header("Location", "/right")
            self.end_headers()
            return
        body = {"short": CONTENT[:-1], "long": CONTENT + b"\0", "changed": b"\1" + CONTENT[1:]}.get(fault, CONTENT)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "cut":
            body = body[: SIZE // 2]
        if fault == "stalled":
            self.wfile.write(body[: SIZE // 2])
            self.wfile.flush()
            release.wait(30)
            return
        self.wfile.write(body)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True).start()
    release.clear()
    yield f"http://127.0.0.1:{http.server_address[1]}/"
    release.set()
    http.shutdown()
    http.server_close()


@pytest.mark.parametrize("path", ["right", "moved"])
def test_whole_file_takes_its_place(server: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "file.gz"
    target.write_bytes(b"old")
    _download.fetch(server + path, target, SIZE, SHA256)
    assert target.read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == [target]
    out, err = capsys.readouterr()
    assert out == ""
    assert "Downloading file.gz: 100%" in err


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "HTTP Error 404: Not here"),
        ("short", f"expected {SIZE} bytes, got {SIZE - 1}$"),
        ("cut", f"expected {SIZE} bytes, got {SIZE // 2}$|IncompleteRead"),
        ("long", f"expected {SIZE} bytes, got more$"),
        ("changed", f"expected the SHA-256 {SHA256}, got [0-9a-f]{{64}}$"),
        ("silent", "no answer within 0.3 seconds|timed out"),
        ("stalled", "no answer within 0.3 seconds|timed out"),
    ],
)
def test_fault_is_named_and_the_place_untouched(server: str, path: str, message: str, tmp_path: Path) -> None:
    for before in (None, b"old"):
        target = tmp_path / "file.gz"
        if before is not None:
            target.write_bytes(before)
        with pytest.raises(DataError, match=message) as caught:
            _download.fetch(server + path, target, SIZE, SHA256, timeout=0.3)
        assert str(caught.value).startswith(f"{server}{path}: ")
        assert [child.read_bytes() for child in tmp_path.iterdir()] == ([] if before is None else [before])


def test_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(DataError, match="Connection refused"):
        _download.fetch(f"http://127.0.0.1:{port}/right", tmp_path / "file.gz", SIZE, SHA256)
    assert capsys.readouterr().err == ""  # no bar for a download that never began


def test_search_for_the_host_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that does not answer is no reason to wait longer; a socket's time-out would not see it."""

    def search(*_: object, **__: object) -> list:
        release.wait(5)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", search)
    release.clear()
    try:
        with pytest.raises(DataError, match="no answer within 0.3 seconds"):
            _download.fetch("http://nowhere.invalid/right", tmp_path / "file.gz", SIZE, SHA256, timeout=0.3)
    finally:
        release.set()


def test_place_that_cannot_be_written(server: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="Not a directory"):
        _download.fetch(server + "right", tmp_path / "file" / "file.gz", SIZE, SHA256)
