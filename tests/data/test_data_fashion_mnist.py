"""Where the images are searched for, what is refused there, and what load_test and load_training return.

Small files of the same form stand in for the four published ones.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import struct
import threading
import tracemalloc
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from ece408_op.data import TestSet as ImageSet
from ece408_op.data import _fashion_mnist, cache_folder, load_test, load_training, sample
from ece408_op.data.resize import resize
from ece408_op.errors import DataError

COUNT = 6
RANDOM = np.random.RandomState(0)
IMAGES = RANDOM.randint(0, 256, (COUNT, 28, 28)).astype(np.uint8)
LABELS = RANDOM.randint(0, 10, COUNT).astype(np.uint8)
NOWHERE = "http://127.0.0.1:9/"


def write(path: Path, array: np.ndarray) -> bytes:
    """Write the array as a gzipped IDX file; return the content without compression."""
    plain = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(plain))
    return plain


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with four small files that count as the published ones; no other place has any."""
    folder = tmp_path / "published"
    folder.mkdir()
    for which in ("TEST", "TRAINING"):
        files = []
        for file, array in zip(getattr(_fashion_mnist, which), (IMAGES, LABELS)):
            checksum = hashlib.sha256(write(folder / f"{file.name}.gz", array)).hexdigest()
            files.append(_fashion_mnist.PublishedFile(file.name, array.shape, checksum))
        monkeypatch.setattr(_fashion_mnist, which, tuple(files))
    (tmp_path / "project").mkdir()
    monkeypatch.setattr(_fashion_mnist, "PROJECT_FOLDER", tmp_path / "project")
    monkeypatch.setattr(_fashion_mnist, "URL", NOWHERE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ECE408_DATA", raising=False)
    return folder


@pytest.fixture
def server(published: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The published folder as the authors' server."""
    monkeypatch.setattr(_fashion_mnist, "URL", f"{published.as_uri()}/")
    return published


def copy(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


def check(result: ImageSet, size: int = 28, count: int = COUNT) -> None:
    assert result.source == "fashion-mnist"
    assert result.images.dtype == np.float32
    assert result.images.flags.c_contiguous
    np.testing.assert_array_equal(result.images, resize(IMAGES, size)[:count, None])
    np.testing.assert_array_equal(result.labels, LABELS[:count])


def test_explicit_folder(published: Path) -> None:
    check(load_test(folder=published, count=COUNT))
    check(load_test(folder=str(published), count=2), count=2)
    check(load_test(64, count=COUNT, folder=published), 64)
    training = load_training(folder=published)
    assert training.images.dtype == np.uint8
    np.testing.assert_array_equal(training.images, IMAGES[:, None])
    np.testing.assert_array_equal(training.labels, LABELS)
    np.testing.assert_array_equal(load_training(40, published).images, resize(IMAGES, 40)[:, None])


def test_order_of_the_places(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place has the files; a damaged one shows which of them was read."""
    monkeypatch.setenv("ECE408_DATA", str(tmp_path / "mine"))
    for folder in (tmp_path / "mine", tmp_path / "project"):
        copy(published, folder)
        damaged = folder / "t10k-labels-idx1-ubyte.gz"
        damaged.write_bytes(b"damaged")
        check(load_test(folder=published, count=COUNT))
        with pytest.raises(DataError, match=re.escape(str(damaged))):
            load_test(count=COUNT)
        for path in folder.iterdir():
            path.unlink()


@pytest.mark.parametrize("count", [1, COUNT])
def test_files_that_are_not_gzipped(published: Path, count: int) -> None:
    for path in list(published.iterdir()):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    check(load_test(folder=published, count=count), count=count)


def test_folder_without_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        expected = f"{folder}: expected a folder with t10k-images-idx3-ubyte.gz and t10k-labels"
        with pytest.raises(DataError, match=re.escape(expected)):
            load_test(folder=folder)
    monkeypatch.setenv("ECE408_DATA", str(tmp_path / "absent"))
    with pytest.raises(DataError, match=f"ECE408_DATA: expected a folder, got {tmp_path}/absent"):
        load_test(count=COUNT)


def refused(path: Path, content: bytes) -> bool:
    """Whether the labels' file is refused by name with that content; otherwise the published labels are returned."""
    path.write_bytes(content)
    try:
        check(load_test(folder=path.parent, count=COUNT))
    except DataError as error:
        assert str(error).startswith(f"{path}: ")
        return True
    return False


def test_every_truncation_addition_and_wrong_bit_is_refused(published: Path) -> None:
    path = published / "t10k-labels-idx1-ubyte.gz"
    packed = path.read_bytes()
    plain = gzip.decompress(packed)
    assert not refused(path, gzip.compress(plain[:9]) + gzip.compress(plain[9:]))
    assert refused(path, plain + b"\0") and refused(path, packed + b"more") and refused(path, packed + packed)
    for length in range(len(plain)):
        assert refused(path, plain[:length]) and refused(path, gzip.compress(plain[:length]))
    assert all(refused(path, packed[:length]) for length in range(len(packed)))
    for content, least in ((plain, len(plain)), (packed, len(packed) - 10)):  # gzip's header has a time, for example
        flipped = [bytearray(content) for _ in range(8 * len(content))]
        for bit, one in enumerate(flipped):
            one[bit // 8] ^= 1 << bit % 8
        assert sum(refused(path, bytes(one)) for one in flipped) >= 8 * least


def test_a_small_file_that_unpacks_to_a_large_one_does_not_fill_the_memory(published: Path) -> None:
    content = gzip.compress(bytes(2**26), 1)
    tracemalloc.start()
    try:
        assert refused(published / "t10k-labels-idx1-ubyte.gz", content)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_download(server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(load_test(count=COUNT))
    assert "Downloading t10k-images-idx3-ubyte.gz: 100%" in capsys.readouterr().err
    kept = tmp_path / "cache/ece408-op"
    assert sorted(path.name for path in kept.iterdir()) == ["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]
    for path in server.iterdir():
        path.unlink()
    check(load_test(count=COUNT))
    assert capsys.readouterr().err == ""


def test_damaged_download_is_fetched_again(server: Path, tmp_path: Path) -> None:
    copy(server, tmp_path / "cache/ece408-op")
    damaged = tmp_path / "cache/ece408-op/t10k-images-idx3-ubyte.gz"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    check(load_test(count=COUNT))
    assert damaged.read_bytes() == (server / damaged.name).read_bytes()


class Faulty(BaseHTTPRequestHandler):
    """A server with the fault that the URL names; ``gone`` is set when nobody reads any more."""

    gone = threading.Event()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.startswith("/missing"):
            self.send_error(404, "Not here")
            return
        self.send_response(200)
        if self.path.startswith("/length"):
            self.send_header("Content-Length", "long")
        self.end_headers()
        with suppress(OSError):  # the caller has gone
            while self.path.startswith("/slow") and not self.gone.wait(0.02):
                self.wfile.write(b"x")
        if self.path.startswith("/silent"):
            self.gone.wait(60)
        content = gzip.compress(bytes(99))
        with suppress(OSError):
            self.wfile.write(content[:-1] if self.path.startswith("/cut") else content)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("missing", "HTTP Error 404: Not here"),
        ("silent", "timed out"),
        ("cut", "another file, or not all of it"),
        ("other", "another file, or not all of it"),
        ("slow", "expected 10000 bytes per second"),
        ("length", "invalid literal"),
    ],
)
def test_a_failed_download_is_named_and_leaves_no_file(fault, reason, published, tmp_path, monkeypatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Faulty) as http:
        threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{http.server_address[1]}/{fault}/"
        monkeypatch.setattr(_fashion_mnist, "URL", url)
        if reason in ("timed out", "expected 10000 bytes per second"):
            monkeypatch.setattr(_fashion_mnist, "TIMEOUT", 1.0)
        Faulty.gone.clear()
        with pytest.raises(DataError, match=f"{url}train-images-idx3-ubyte.gz: .*{reason}"):
            load_training()
        Faulty.gone.set()
        http.shutdown()
    assert not list((tmp_path / "cache/ece408-op").iterdir())


def test_sample_set_stands_in(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = load_test(count=COUNT)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"{_fashion_mnist.SAMPLE_NOTICE}\n"
    assert len(err) <= 120
    assert result.source == "sample"
    images, labels = sample.generate()
    np.testing.assert_array_equal(result.images, images[:COUNT, None].astype(np.float32))
    np.testing.assert_array_equal(result.labels, labels[:COUNT])


def test_training_set_has_no_stand_in(published: Path) -> None:
    with pytest.raises(DataError, match="set ECE408_DATA to a folder with train-images-idx3-ubyte.gz"):
        load_training()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count: expected 1 to 6, got 0"),
        ({"count": COUNT + 1}, "count: expected 1 to 6, got 7"),
        ({"size": 0}, "size: expected 1 or more, got 0"),
    ],
)
def test_wrong_arguments(published: Path, arguments: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_test(folder=published, **{"count": COUNT, **arguments})


def test_cache_folder_follows_the_xdg_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, expected in ((str(tmp_path / "else"), "else"), ("", ".cache"), ("relative/path", ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
        assert cache_folder() == tmp_path / expected / "ece408-op"


@pytest.mark.skipif("ECE408_DATA" not in os.environ, reason="needs the real Fashion-MNIST in ECE408_DATA")
def test_real_files() -> None:
    """The published files themselves pass, with the known first labels of the test set."""
    images, labels, source = load_test(count=10)
    assert images.shape == (10, 1, 28, 28)
    assert labels.tolist() == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]
    assert source == "fashion-mnist"
