"""Grade a submission: build it, try networks and batch sizes, and make one record. A pool grades several at a time.

A log makes an interrupted class continue: an SQLite file, which no crash damages. A submission counts as done when its
record is in the file.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ece408_op.errors import DeviceError
from ece408_op.problem import KNOWN_NETS, LATER_NETS, NETS, Net
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip
from ece408_op.submission import EndedError, HarnessError, build, sources
from ece408_op.submission.build import new_folder
from ece408_op.submission.sandbox import Tools, beginning
from ece408_op.submission.sources import batches_in, pointed_to
from ece408_op.submission.worker import Program

from ._buffers import Device
from ._real_images import trained
from ._rounds import NO_MEMORY, Bench, Trial, Turns
from ._spec import Spec, SpecError
from ._submission import Submission
from ._verdict import NEAR_DUPLICATE, PASSED, POISONED, TIMED, WARM_UP, NetworkResult, is_final, judge_submission, worst

Record = dict[str, Any]
#: How the names of the threads that grade begin, and the seconds that they have to end after an interrupt.
THREADS, _GRACE = "ece408-grade", 1.0


class Log:
    """The records so far, ``done`` by key, kept in the file at ``path``; without one, in memory.

    ``rules`` identifies the grader's file and version: records of other rules are dropped. Raises SpecError where
    another command has the file, or it cannot be written.
    """

    def __init__(self, path: Path | None, rules: str) -> None:
        self._path, self._rules = path, rules
        try:
            self._file = sqlite3.connect(path or ":memory:", timeout=0, isolation_level=None)
            self._file.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._file.execute("CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, rules TEXT, record TEXT)")
            self._file.execute("DELETE FROM records WHERE rules != ?", (rules,))
            rows = self._file.execute("SELECT key, record FROM records").fetchall()
            self.done: dict[str, Record] = {key: json.loads(record) for key, record in rows}
        except sqlite3.OperationalError as error:  # the file may be a good log: it stays
            said = "one that another command is writing" if "locked" in str(error) else error
            raise SpecError(f"{path}: expected a log that this command can write, got {said}") from None
        except (sqlite3.DatabaseError, ValueError):
            self._file.close()
            Path(str(path)).unlink()  # no log, or one that another program has damaged
            self.__init__(path, rules)  # type: ignore[misc]

    def add(self, key: str, record: Record) -> None:
        """Keep a record for good; one key has one record. Raises HarnessError where the disk is full."""
        self.done.setdefault(key, record)
        try:
            self._file.execute("INSERT OR IGNORE INTO records VALUES (?, ?, ?)", (key, self._rules, json.dumps(record)))
        except sqlite3.Error as error:
            raise HarnessError(f"{self._path}: expected room for one more record, got {error}") from None

    def close(self) -> None:
        self._file.close()


def grade_all(found: Sequence[Submission], graders: Mapping[str, Grader], jobs: int, log: Log) -> list[Record]:
    """The records of all, in the order given, ``jobs`` at a time; those in the log are not graded again.

    ``graders`` has one per context. Where one raises, or the caller interrupts, all programs are ended.
    """
    keys = [key(one) for one in found]
    waiting = {name: one for name, one in zip(keys, found) if name not in log.done}
    # Without a terminal there is no bar.
    bar = tqdm(desc="submissions", total=len(found), initial=len(found) - len(waiting), leave=False, disable=None)
    graders = {context: replace(one, progress=bar.set_postfix_str) for context, one in graders.items()}
    pool = ThreadPoolExecutor(jobs, THREADS)
    futures: dict[Future[Record], str] = {}
    try:
        with bar:
            futures.update({pool.submit(graders[one.context].grade, one): name for name, one in waiting.items()})
            for future in as_completed(futures):
                log.add(futures[future], future.result())
                bar.update()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for grader in graders.values():
            grader.tools.processes.close()
        wait(futures, _GRACE)  # one that computes in a library, such as CUDA's compiler, may take longer
        raise
    pool.shutdown()
    return [log.done[name] for name in keys]


def key(one: Submission) -> str:
    """The log's name of a submission: its context, all that is compiled of it, and its path."""
    digest = build.sources_digest(one.source, alone=one.alone) if one.source else ""
    return f"{one.context}:{digest}:{shown(os.path.abspath(one.path))}"


#: How much of a network is tried: all that a verdict needs; enough to see whether it can pass; times, once it passed.
FULL, BRIEF, TIMES = "full", "brief", "times"
#: Images without a grader's file: on a GPU the course's own number. On the CPU a textbook's seven loops do the smaller
#: number with all runs and networks within half a minute, and one call with the larger number within the limit.
_GPU_IMAGES, _CPU_IMAGES, _CPU_TIMED_IMAGES = 10000, 100, 1000
#: Timed runs where the grader's file does not say. A file that fails in one run of five should be caught on a GPU.
_GPU_RUNS, _CPU_RUNS = 8, 3
_MOST_BYTES = 2 << 30  # the largest arrays of a batch that a file asks for, on the CPU; the harness has copies of them
#: The record of a file that was not run: every record has every key.
_NOT_RUN: Record = {"precision": None, "worst": None, "seconds": {}, "images": [], "networks": []}
_NOT_RUN.update(printed="", compiler=[], pointed=[])
#: Errors of a machine that lacks disk, memory or descriptors: they say nothing of a file, which is graded later.
_LACKING = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG)
_SHORT_SECONDS = 5.0  # once a network has timed out, the others get this many seconds per call


@dataclass(frozen=True)
class Grader(Bench):
    """Grades submissions for the CPU, or for one GPU, the ``chip``, whose submission holds ``alone`` while it runs.

    ``images`` are tried first, and ``timed_images`` in the timed runs that follow (0: none).
    """

    chip: Chip | None = None
    images: int = _CPU_IMAGES
    timed_images: int = 0
    runs: int = _CPU_RUNS
    alone: AbstractContextManager[Any] = nullcontext()

    def check_memory(self, jobs: int) -> None:
        """Raise SpecError where the device cannot hold the batches of the grader's file for ``jobs`` submissions."""
        if not self.spec.demanding:
            return
        have = self.device.memory_bytes()
        for net, images in itertools.product(self.spec.nets or NETS, self.spec.images or (self.images,)):
            # The worker's arrays, and the grader's copies.
            need = 2 * jobs * sum(problem.bytes for problem in net.problems(images))
            if need > have:
                at_a_time = f" for {jobs} submissions at a time; --jobs changes their number" if jobs > 1 else ""
                raise SpecError(
                    f"images: expected batches that fit into {have >> 30} GiB of memory, "
                    f"got {images} images of network {net.name}, which take {need >> 30} GiB{at_a_time}"
                )

    def grade(self, submission: Submission) -> Record:
        """The submission's record; raises HarnessError where this machine cannot."""
        with self.turns.working if self.turns else nullcontext():
            started = time.time()
            try:
                with new_folder("build") as folder:
                    found = self._try(self._program(submission, folder))
            except EndedError as ended:
                found = {"status": ended.status, "reason": ended.reason}
            except DeviceError:
                raise
            except Exception as error:  # a fault of the harness's own on one file must not cost a class its night
                if getattr(error, "errno", None) in _LACKING:
                    raise HarnessError(f"expected room for {shown(submission.path)}'s programs, got {error}") from error
                text = f"the harness itself failed, no fault of the file's: {type(error).__name__}: {error}"
                found = {"status": "unsupported", "reason": text}
        record = {"path": shown(submission.path), "source": shown(submission.source or ""), **_NOT_RUN, **found}
        record["reason"] = escaped(record["reason"], kept="\n\t")
        record["printed"] = escaped(record["printed"], kept="\n\r\t")
        record.update(context=submission.context, device=self.chip.name if self.chip else "cpu")
        record.update(started=started, seconds_in_all=time.time() - started)
        # JSON has no infinity and no NaN: they become text.
        return dict(json.loads(json.dumps(record), parse_constant=lambda text: str(float(text))))

    def _program(self, one: Submission, folder: Path) -> Program:
        if one.why or one.source is None:
            raise EndedError("unsupported", one.why)
        self.progress("compiling")
        limits, architecture = self.spec.limits, f"sm_{self.chip.architecture}" if self.chip else ""
        program = build.build(one.source, one.context, folder, self.tools, limits, architecture, one.alone)
        return replace(program, source=beginning(one.source, sources.SEARCHED), most=limits.all_seconds)

    def _try(self, program: Program) -> Record:
        spec, pointed, demanded = self.spec, pointed_to(program.source), self.spec.demanding
        with self.alone, ExitStack() as stack:  # it has the device to itself, which must be well afterwards
            stack.callback(self.device.check)
            if demanded:
                tried = itertools.product(spec.nets or NETS, spec.images or (self.images,))
                results = [self._net(program, net, images) for net, images in tried]
            else:
                results = self._by_itself(program, pointed)
            verdict, decisive = judge_submission(results, demanded=demanded, pointed=pointed)
            if verdict.status == PASSED and self.timed_images > decisive.images and not (demanded or spec.quick):
                results.append(self._net(program, decisive.net, self.timed_images, TIMES))
                last, decisive.timed = results[-1].status, results[-1].status != PASSED
                excused = last in (PASSED, "timed_out") or results[-1].verdict.reason.startswith(NO_MEMORY)
                judged = results if excused else results[-1:]
                verdict, decisive = judge_submission(judged, demanded=not excused, pointed=pointed)
        networks = [one.as_data() for one in results]
        right = [one for one in networks if verdict.status == one["status"] == PASSED]
        runs = [run for layer in decisive.layers for run in layer.runs]
        return {
            **asdict(verdict),
            "worst": asdict(worst(runs)) if runs else None,
            "seconds": {one["network"]: one.get("seconds") for one in right},
            "images": sorted({one.images for one in results}),
            "networks": networks,
            "printed": next((one.printed for one in results if one.printed), ""),
            "compiler": [asdict(one) for one in program.notes],
            "pointed": [net.name for net in pointed],
        }

    def _by_itself(self, program: Program, pointed: list[Net]) -> list[NetworkResult]:
        """The networks that the file's constants point to, then the others, then batch sizes that it may be tied to."""
        if self.spec.quick:
            return [self._net(program, (pointed or NETS)[0], _CPU_IMAGES, BRIEF)]
        order = pointed + [net for net in KNOWN_NETS if net not in pointed]
        results: list[NetworkResult] = []
        seconds = math.inf
        for net in order:
            right = any(one.status == PASSED for one in results)
            if right and net in LATER_NETS and net not in pointed:  # most files can do any network
                continue
            results.append(self._net(program, net, self.images, BRIEF if pointed and right else FULL, seconds))
            if is_final(results[-1], pointed):
                return results
            if results[-1].status == "timed_out":
                seconds = _SHORT_SECONDS
        # It can do none with the images that it was given: does it hold a batch size of its own?
        for images, net in itertools.product(batches_in(program.source), order):
            if any(one.status == PASSED for one in results):
                break
            memory = 0 if self.device.gpu else sum(problem.bytes for problem in net.problems(images))
            if images == self.images or memory > _MOST_BYTES:
                continue
            large = not self.device.gpu and images > self.timed_images
            results.append(self._net(program, net, images, BRIEF if large else FULL, seconds))
            if large and results[-1].status == "wrong":  # to find that out of another network takes minutes
                break
        return results

    def _net(self, program: Program, net: Net, images: int, what: str = FULL, most: float = math.inf) -> NetworkResult:
        timed = [TIMED] * (self.spec.runs or self.runs)
        purposes = {FULL: [WARM_UP, POISONED, *timed, NEAR_DUPLICATE], BRIEF: [WARM_UP, TIMED], TIMES: timed}[what]
        nets = trained(net, images) if what == FULL and self.spec.accuracy else ()
        return Trial(self, program, net, images, min(most, self.spec.limits.run_seconds), purposes, nets).run()


def for_cpu(tools: Tools, rules: Spec, jobs: int, in_parallel: bool = False) -> Grader:
    """The grader for this machine's processor, which times calls one at a time unless ``in_parallel``."""
    return Grader(tools, rules, turns=None if in_parallel else Turns(jobs), timed_images=_CPU_TIMED_IMAGES)


def for_gpu(tools: Tools, rules: Spec) -> Grader:
    """The grader for this machine's first GPU; raises DeviceError where there is none."""
    alone = threading.Lock()
    return Grader(tools, rules, Device(0), chip=cuda.chip(), images=_GPU_IMAGES, runs=_GPU_RUNS, alone=alone)


def shown(path: Path | str) -> str:
    """A path as text in one line from left to right, also where its bytes are none; no other path has that text."""
    return escaped(str(path).replace("\\", "\\\\"))


def escaped(text: str, kept: str = "") -> str:
    """The text with escapes for what controls a terminal, turns its direction or is invisible, but for ``kept``."""
    return "".join(one if one.isprintable() or one in kept else repr(one)[1:-1] for one in text)
