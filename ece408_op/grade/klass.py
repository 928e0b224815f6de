"""Grade many submissions, several at a time, with a progress bar; a log makes it resumable."""

from __future__ import annotations

import hashlib
import os
import queue
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Callable

from tqdm import tqdm

from .grading import Grader, read
from .log import Log, Record
from .submission import Submission


def grade_all(
    found: Sequence[Submission], grader_for: Callable[[str], Grader], jobs: int, log: Log | None = None
) -> list[Record]:
    """The records of all, in the order given; those in the log are not graded again.

    So many are graded at a time; ``grader_for(context)`` gives the grader. Raises what a grader raises.
    """
    keys = [key(one) for one in found]
    done: dict[str, Record] = dict(log.done) if log else {}
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

    waiting = {name: one for name, one in zip(keys, found) if name not in done}
    quiet = len(found) < 2 or not sys.stderr.isatty()
    bar = tqdm(total=len(found), initial=len(found) - len(waiting), desc="submissions", disable=quiet)
    with bar, ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(grade, one): name for name, one in waiting.items()}
        try:
            for future in as_completed(futures):
                name = futures[future]
                done[name] = future.result()
                if log:
                    log.add(name, done[name])
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    records = [done[name] for name in keys]
    point_out_duplicates(records)
    return records


def key(one: Submission) -> str:
    """What a submission is known by in the log: its path, its context and its source's text."""
    digest = hashlib.blake2b(read(one.source).encode(), digest_size=16).hexdigest()
    return f"{one.context}:{digest}:{os.path.abspath(one.path)}"


def point_out_duplicates(records: Sequence[Record]) -> None:
    """Give each record the paths of the others with the same code, comments and white space aside."""
    same: dict[tuple[str, str], list[str]] = defaultdict(list)
    for record in records:
        same[(record["context"], record["fingerprint"])].append(record["path"])
    for record in records:
        others = same[(record["context"], record["fingerprint"])]
        record["duplicates"] = [path for path in others if path != record["path"]] if record["source"] else []
