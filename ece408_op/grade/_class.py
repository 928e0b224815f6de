"""Grade many submissions, several at a time, with a progress bar; a log makes an interrupted run continue.

The log is an SQLite file, which no crash damages. A submission counts as done when its record is in the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ._errors import SpecError
from ._grading import Grader, read
from ._submission import Submission

Record = dict[str, Any]
#: How the names of the threads that grade begin, and the seconds that they have to end after an interrupt.
THREADS, _GRACE = "ece408-grade", 1.0


class Log:
    """The log at ``path``. ``rules`` identifies the grader's file and version: records of other rules are dropped.

    Raises SpecError where another command has it, or it cannot be written.
    """

    def __init__(self, path: Path, rules: str) -> None:
        self.path, self._rules = path, rules
        try:
            self._file = sqlite3.connect(path, timeout=0, isolation_level=None)
        except sqlite3.OperationalError as error:
            raise SpecError(f"{path}: expected a file that can be written, got {error}") from None
        try:
            self._file.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._file.execute("CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, rules TEXT, record TEXT)")
            self._file.execute("DELETE FROM records WHERE rules != ?", (rules,))
            rows = self._file.execute("SELECT key, record FROM records").fetchall()
            self.done: dict[str, Record] = {key: json.loads(record) for key, record in rows}
        except sqlite3.OperationalError as error:  # the file may be a good log: it stays
            self._file.close()
            locked = "locked" in str(error)
            said = "a log of this command alone, but another one is writing it" if locked else f"a log, got {error}"
            raise SpecError(f"{path}: expected {said}") from None
        except (sqlite3.DatabaseError, ValueError):
            self._file.close()
            path.unlink()  # no log, or one that another program has damaged
            self.__init__(path, rules)  # type: ignore[misc]

    def add(self, key: str, record: Record) -> None:
        """Keep a record for good; one key has one record."""
        self.done.setdefault(key, record)
        self._file.execute("INSERT OR IGNORE INTO records VALUES (?, ?, ?)", (key, self._rules, json.dumps(record)))

    def close(self, remove: bool = False) -> None:
        """Close it; remove it once its records stand elsewhere."""
        self._file.close()
        if remove:
            self.path.unlink(missing_ok=True)


def grade_all(
    found: Sequence[Submission], graders: Mapping[str, Grader], jobs: int, log: Log | None = None
) -> list[Record]:
    """The records of all, in the order given, ``jobs`` at a time; those in the log are not graded again.

    ``graders`` has one per context. Where one raises, or the caller interrupts, all programs are ended. Threads named
    THREADS that compute in a library at that time, such as CUDA's compiler, may go on for a while.
    """
    keys = [key(one) for one in found]
    done: dict[str, Record] = dict(log.done) if log else {}
    waiting = {name: one for name, one in zip(keys, found) if name not in done}
    quiet = len(found) < 2 or not sys.stderr.isatty()
    bar = tqdm(total=len(found), initial=len(found) - len(waiting), desc="submissions", disable=quiet)
    pool = ThreadPoolExecutor(jobs, THREADS)
    futures: dict[Future[Record], str] = {}
    with bar:
        try:
            futures = {pool.submit(graders[one.context].grade, one): name for name, one in waiting.items()}
            for future in as_completed(futures):
                done[futures[future]] = future.result()
                if log:
                    log.add(futures[future], future.result())
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for grader in graders.values():
                grader.bench.tools.processes.close()
            wait(futures, _GRACE)
            raise
    pool.shutdown()
    records = [done[name] for name in keys]
    add_duplicates(records)
    return records


def key(one: Submission) -> str:
    """The log's name of a submission: its context, its source's text and its path."""
    digest = hashlib.blake2b(read(one.source).encode(), digest_size=16).hexdigest()
    name = one.kernel or os.path.abspath(one.path)
    return f"{one.context}:{digest}:{name}".encode(errors="backslashreplace").decode()


def add_duplicates(records: Sequence[Record]) -> None:
    """Give each record the paths of the others with the same code, comments and white space aside."""
    same: dict[tuple[str, str], list[str]] = defaultdict(list)
    for record in records:
        if record["fingerprint"]:
            same[(record["context"], record["fingerprint"])].append(record["path"])
    for record in records:
        others = same[(record["context"], record["fingerprint"])]
        record["duplicates"] = [path for path in others if path != record["path"]] if record["fingerprint"] else []
