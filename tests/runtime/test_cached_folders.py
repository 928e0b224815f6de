"""Folders of compiled programs: what leaves a full cache."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ece408_op.runtime import cached_folders


def test_what_nobody_used_for_an_hour_leaves_a_full_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_folders, "MOST_BYTES", 10_000)

    def make(key: str, size: int, hours: float) -> None:
        cached_folders.folder(tmp_path, "program", key, lambda folder: _fill(folder / "program", size))
        os.utime(tmp_path / f"program-{key}", (0, time.time() - 3600 * hours))

    # The order of use counts, and another process may be about to use what was used within the hour.
    for key, size, hours in (("old", 1, 3), ("older", 20_000, 4), ("recent", 20_000, 0.9), ("new", 1, 0)):
        make(key, size, hours)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program-new", "program-recent"]


def _fill(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)
