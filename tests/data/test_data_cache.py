"""The cache returns what was stored or nothing, and the package works without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ece408_op.data import _cache

ARRAY = np.random.RandomState(0).randint(0, 256, (7, 5, 5)).astype(np.uint8)

#: Stores two sets of 2 MB alternately under one name until its input ends.
WRITER = """
import sys, threading
import numpy as np
from ece408_op.data import _cache
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
print("ready", flush=True)
while not stop.is_set():
    for value in (1, 2):
        _cache.store("set.u8", np.full((2, 1024, 1024), value, np.uint8))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ece408-op"


def test_returns_what_was_stored(folder: Path) -> None:
    assert _cache.load("set.u8", ARRAY.shape) is None
    for array in (ARRAY, ARRAY[::-1].copy()):
        _cache.store("set.u8", array)
        np.testing.assert_array_equal(_cache.load("set.u8", ARRAY.shape), array)
    assert _cache.load("set.u8", (6, 5, 5)) is None
    assert [path.name for path in folder.iterdir()] == ["set.u8"]


def test_ignores_a_changed_file(folder: Path) -> None:
    _cache.store("set.u8", ARRAY)
    sound = (folder / "set.u8").read_bytes()
    flipped = [sound[:i] + bytes([sound[i] ^ 1]) + sound[i + 1 :] for i in (0, 31, 32, len(sound) - 1)]
    for content in (*flipped, b"", sound[:20], sound[:-1], sound + b"\0"):
        (folder / "set.u8").write_bytes(content)
        assert _cache.load("set.u8", ARRAY.shape) is None


def test_folder_follows_the_xdg_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, expected in ((str(tmp_path / "else"), "else"), ("", ".cache"), ("relative/path", ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
        assert _cache.folder() == tmp_path / expected / "ece408-op"


def test_unwritable_cache_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # a file: not even root can write into it
    _cache.store("set.u8", ARRAY)
    assert _cache.load("set.u8", ARRAY.shape) is None
    monkeypatch.setattr(_cache, "folder", lambda: None)
    _cache.store("set.u8", ARRAY)
    assert _cache.load("set.u8", ARRAY.shape) is None


def test_two_processes_at_once(folder: Path) -> None:
    """Two processes replace a set over and over; every read returns a complete one.

    If the file were written in place, most of these reads would return an incomplete one.
    """
    shape = (2, 1024, 1024)
    _cache.store("set.u8", np.full(shape, 1, np.uint8))
    command = [sys.executable, "-c", WRITER]
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    seen = set()
    try:
        assert [writer.stdout.readline() for writer in writers] == [b"ready\n"] * 2
        for _ in range(100):
            array = _cache.load("set.u8", shape)
            assert array is not None, "a read returned an incomplete set"
            assert array.min() == array.max()
            seen.add(int(array[0, 0, 0]))
    finally:
        for writer in writers:
            writer.communicate()
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen == {1, 2}
    assert [path.name for path in folder.iterdir()] == ["set.u8"]
