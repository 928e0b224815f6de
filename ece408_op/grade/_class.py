"""Grade many submissions, several at a time, with a progress bar; a log makes an interrupted run continue.

The log is a file that only grows. Each line is one record with its submission's key, written in one piece and forced to
the disk before the submission counts as done. A line cut off by a crash is dropped, and its submission runs again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Callable

from tqdm import tqdm

from ._errors import SpecError
from ._grading import Grader, read
from ._submission import Submission

Record = dict[str, Any]
#: A record of another shape is damaged.
_KEYS = {"path", "status", "reason", "context", "fingerprint", "networks"}
#: Grades submissions, by key, and yields each record when it is there.
Runner = Callable[[dict[str, Submission]], Iterator[tuple[str, Record]]]


class Log:
    """The log at ``path``. ``rules`` identifies the grader's file and version: a log of other rules is discarded."""

    def __init__(self, path: Path, rules: str) -> None:
        self.path = path
        self.done: dict[str, Record] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise SpecError(f"{path}: expected a log of this command alone, but another one is writing it") from None
        kept = self._read(rules)
        # A torn line after the whole ones is cut off.
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
        """Take the records up to the first damaged line; the bytes of the lines before it, 0 for other rules."""
        end = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True)):
            try:
                entry = json.loads(line)
                key, record = (entry["key"], entry["record"]) if number else (entry["rules"], {})
                good = isinstance(key, str) and set(record) >= (_KEYS if number else set()) and line.endswith(b"\n")
            except (ValueError, TypeError, KeyError, RecursionError):
                break
            if not good or (number == 0 and key != rules):
                break
            if number > 0:
                self.done.setdefault(key, record)
            end += len(line)
        return end

    def _append(self, entry: dict[str, Any]) -> None:
        line = (json.dumps(entry) + "\n").encode()
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)


def grade_all(found: Sequence[Submission], run: Runner, log: Log | None = None) -> list[Record]:
    """The records of all, in the order given; those in the log are not graded again. Raises what ``run`` raises."""
    keys = [key(one) for one in found]
    done: dict[str, Record] = dict(log.done) if log else {}
    waiting = {name: one for name, one in zip(keys, found) if name not in done}
    quiet = len(found) < 2 or not sys.stderr.isatty()
    with tqdm(total=len(found), initial=len(found) - len(waiting), desc="submissions", disable=quiet) as bar:
        for name, record in run(waiting):
            done[name] = record
            if log:
                log.add(name, record)
            bar.update()
    records = [done[name] for name in keys]
    add_duplicates(records)
    return records


def here(grader_for: Callable[[str], Grader], jobs: int, end: Callable[[], None] = lambda: None) -> Runner:
    """Grades on this machine, ``jobs`` at a time; ``grader_for(context)`` returns the grader.

    Where the caller gives up, ``end()`` has to end the programs of the submissions in work, which are then waited for.
    """

    def run(waiting: dict[str, Submission]) -> Iterator[tuple[str, Record]]:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                futures = {pool.submit(grader_for(one.context).grade, one): name for name, one in waiting.items()}
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                end()
                raise

    return run


def key(one: Submission) -> str:
    """The log's name of a submission: its context, its source's text and its path."""
    digest = hashlib.blake2b(read(one.source).encode(), digest_size=16).hexdigest()
    return f"{one.context}:{digest}:{one.kernel or os.path.abspath(one.path)}"


def add_duplicates(records: Sequence[Record]) -> None:
    """Give each record the paths of the others with the same code, comments and white space aside."""
    same: dict[tuple[str, str], list[str]] = defaultdict(list)
    for record in records:
        if record["fingerprint"]:
            same[(record["context"], record["fingerprint"])].append(record["path"])
    for record in records:
        others = same[(record["context"], record["fingerprint"])]
        record["duplicates"] = [path for path in others if path != record["path"]] if record["fingerprint"] else []
