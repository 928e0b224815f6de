"""The records of a class as they come: a file that only grows, so that a killed run goes on where it stopped.

Each line is one record with its submission's key, written in one piece and forced to the disk before the next
submission counts as done. A line cut off by a crash is dropped, and its submission runs again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Log:
    """The log at ``path``. ``rules`` names the grader's file and version: a log of other rules is begun anew."""

    def __init__(self, path: Path, rules: str) -> None:
        self.path = path
        self.done: dict[str, Record] = {}
        kept = self._read(rules)
        # What is kept is a whole number of lines; a torn one behind them is cut off.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, kept)
        os.lseek(self._file, 0, os.SEEK_END)
        if kept == 0:
            self._append({"rules": rules})

    def add(self, key: str, record: Record) -> None:
        """Keep a record for good; one key has one record."""
        if key not in self.done:
            self._append({"key": key, "record": record})
            self.done[key] = record

    def close(self, remove: bool = False) -> None:
        """Close it; remove it once its records stand elsewhere."""
        os.close(self._file)
        if remove:
            self.path.unlink(missing_ok=True)

    def _read(self, rules: str) -> int:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        end = 0
        for number, line in enumerate(data.splitlines(keepends=True)):
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or (number == 0 and entry.get("rules") != rules):
                break
            if number > 0:
                self.done.setdefault(entry["key"], entry["record"])
            end += len(line)
        return end

    def _append(self, entry: dict[str, Any]) -> None:
        line = (json.dumps(entry) + "\n").encode()
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)
