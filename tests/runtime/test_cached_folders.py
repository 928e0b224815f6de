"""Folders of compiled programs: what leaves a full cache."""

import os
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from process import printed

from ece408_op.runtime import cached_folders


def test_what_nobody_used_for_an_hour_leaves_a_full_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cached_folders, "MOST_BYTES", 10_000)

    def make(key: str, size: int, hours: float) -> None:
        cached_folders.folder(tmp_path, "program", key, lambda folder: _fill(folder / "program", size))
        os.utime(tmp_path / f"program-{key}", (0, time.time() - 3600 * hours))

    # The order of use counts, and another process may be about to use what was used within the hour.
    for key, size, hours in (("old", 1, 3), ("older", 20_000, 4), ("recent", 20_000, 0.9), ("new", 1, 0)):
        make(key, size, hours)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program-new", "program-recent"]


@pytest.mark.parametrize(
    ("sizes", "listed"),
    [({"program": None}, ""), ({"headers/one.h": 9}, ""), ({"program": None, ".sizes.json": None}, ""), ({}, "[]")],
    ids=str,
)
def test_a_damaged_folder_is_made_again(tmp_path, sizes, listed):
    def make(folder: Path) -> None:
        (folder / "headers").mkdir()
        _fill(folder / "headers" / "one.h", 10)
        _fill(folder / "program", 100)

    path = cached_folders.folder(tmp_path, "program", "key", make)
    for name, size in sizes.items():
        (path / name).unlink()
        if size is not None:
            _fill(path / name, size)
    if listed:  # something else than a list of sizes
        _fill(path / "program", 99)
        (path / ".sizes.json").write_text(listed, encoding="utf-8")
    assert cached_folders.folder(tmp_path, "program", "key", make) == path
    assert [(path / name).stat().st_size for name in ("program", "headers/one.h")] == [100, 10]
    assert [one.name for one in tmp_path.iterdir()] == ["program-key"]


def test_a_damaged_folder_is_made_again_though_a_remover_was_killed(tmp_path):
    (tmp_path / ".program-key").mkdir()
    _fill(tmp_path / ".program-key" / "rest", 1)
    for _ in range(2):
        path = cached_folders.folder(tmp_path, "program", "key", lambda folder: _fill(folder / "program", 10))
        assert (path / "program").stat().st_size == 10
        _fill(path / "program", 0)


def test_a_whole_folder_is_not_made_again_where_it_may_only_be_read(tmp_path, monkeypatch):
    path = cached_folders.folder(tmp_path, "program", "key", lambda folder: _fill(folder / "program", 1))

    refused = Mock(side_effect=PermissionError)
    monkeypatch.setattr(os, "utime", refused)
    assert cached_folders.folder(tmp_path, "program", "key", refused) == path


def test_a_cache_that_cannot_be_written_is_replaced_until_the_program_ends(tmp_path):
    program = "from ece408_op.runtime import cached_folders as c; c.folder(c.base(), 'a', 'b', lambda _: None)"
    program += "; print(c.base() == c.base(), c.base(private=False).stat().st_mode & 0o777, c.base())"
    places = {"HOME": "/dev/null", "XDG_CACHE_HOME": "", "TMPDIR": str(tmp_path)}
    same, mode, base = printed("-c", program, **places).split()
    assert (same, int(mode), Path(base).parent) == ("True", 0o755, tmp_path)
    assert not list(tmp_path.iterdir())


def _fill(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)
