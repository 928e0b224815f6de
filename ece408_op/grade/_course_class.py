"""Grade many submissions, several at a time, with a progress bar; a log makes it resumable."""

from __future__ import annotations

import hashlib
import os
import queue
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Callable

from tqdm import tqdm

from ._grading import Grader, read
from ._log import Log, Record
from ._submission import Submission

#: Grades submissions, by key, and gives each record as it is there.
Runner = Callable[[dict[str, Submission]], Iterator[tuple[str, Record]]]


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
    point_out_duplicates(records)
    return records


def here(grader_for: Callable[[str], Grader], jobs: int, end: Callable[[], None] = lambda: None) -> Runner:
    """Grades on this machine, so many at a time; ``grader_for(context)`` gives the grader.

    Where the caller gives up, ``end()`` is to end the programs of those being graded, which are then waited for.
    """
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(jobs):
        slots.put(slot)

    def grade(one: Submission) -> Record:
        slot = slots.get()
        try:
            grader = grader_for(one.context)
            return replace(grader, bench=replace(grader.bench, slot=slot)).grade(one)
        finally:
            slots.put(slot)

    def run(waiting: dict[str, Submission]) -> Iterator[tuple[str, Record]]:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                futures = {pool.submit(grade, one): name for name, one in waiting.items()}
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                end()
                raise

    return run


def key(one: Submission) -> str:
    """What a submission is known by in the log: its path, its context and its source's text."""
    digest = hashlib.blake2b(read(one.source).encode(), digest_size=16).hexdigest()
    return f"{one.context}:{digest}:{one.kernel or os.path.abspath(one.path)}"


def point_out_duplicates(records: Sequence[Record]) -> None:
    """Give each record the paths of the others with the same code, comments and white space aside."""
    same: dict[tuple[str, str], list[str]] = defaultdict(list)
    for record in records:
        if record["fingerprint"]:
            same[(record["context"], record["fingerprint"])].append(record["path"])
    for record in records:
        others = same[(record["context"], record["fingerprint"])]
        record["duplicates"] = [path for path in others if path != record["path"]] if record["fingerprint"] else []
