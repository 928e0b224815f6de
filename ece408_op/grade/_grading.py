"""Grade one submission: build it, try networks and batch sizes, and make one record of it all. Many go through a pool.

A log makes an interrupted class continue: an SQLite file, which no crash damages. A submission counts as done when its
record is in the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ece408_op.errors import DeviceError
from ece408_op.runtime import cuda
from ece408_op.submission import build, sources
from ece408_op.submission.errors import EndedError
from ece408_op.submission.networks import KNOWN, LATER, NETS, Net, batches_in, pointed_to
from ece408_op.submission.programs import new_folder
from ece408_op.submission.sandbox import Tools, beginning
from ece408_op.submission.worker import Program, python_program

from ._device import Device, Turns
from ._real_images import trained
from ._rounds import BRIEF, FULL, TIMES, Bench, try_network
from ._spec import Spec, SpecError
from ._submission import Submission
from ._verdict import PASSED, NetworkResult, is_final, judge_submission, worst

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

    ``graders`` has one per context. Where one raises, or the caller interrupts, all programs are ended.
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
                grader.tools.processes.close()
            wait(futures, _GRACE)  # one that computes in a library, such as CUDA's compiler, may take longer
            raise
    pool.shutdown()
    return [done[name] for name in keys]


def key(one: Submission) -> str:
    """The log's name of a submission: its context, its source's text and its path."""
    digest = hashlib.blake2b(read(one.source).encode(), digest_size=16).hexdigest()
    return f"{one.context}:{digest}:{os.path.abspath(one.path)}".encode(errors="backslashreplace").decode()


#: Images without a grader's file: on a GPU the course's own number. On the CPU a textbook's seven loops do the smaller
#: number with all runs and networks within half a minute, and one call with the larger number within the limit.
_GPU_IMAGES, _CPU_IMAGES, _CPU_TIMED_IMAGES = 10000, 100, 1000
#: The largest arrays of such a batch on the CPU; the harness has copies of them.
_MOST_BYTES = 2 << 30
#: Once a network has timed out, the others get this many seconds per call.
_SHORT_SECONDS = 5.0
#: A file that fails in one run of five should be caught.
_GPU_RUNS = 8


@dataclass(frozen=True)
class Grader(Bench):
    """Grades submissions of one context on one machine."""

    context: str = "cpu"
    #: Images that are tried first, and images of the timed runs that follow (0: none); on the CPU, larger batches get
    #: few runs.
    images: int = _CPU_IMAGES
    timed_images: int = 0
    architecture: str = ""
    #: The device, in words, for the record.
    machine: str = "cpu"
    #: Held by the submission that runs on the GPU.
    alone: AbstractContextManager[Any] = nullcontext()

    def grade(self, submission: Submission) -> Record:
        """The submission's record; raises HarnessError where this machine cannot."""
        source = read(submission.source)[: sources.SEARCHED]
        record: Record = {"path": shown(submission.path), "status": "", "reason": "", "precision": None}
        record.update(context=submission.context, device=self.machine, source=shown(submission.source or ""))
        record["started"] = time.time()
        # Whatever happens, a record has every key.
        record.update(worst=None, seconds={}, images=[], networks=[], printed="", compiler=[], pointed=[])
        try:
            with self.turns.working if self.turns else nullcontext(), new_folder("build") as name:
                record["started"] = time.time()
                program = self._program(submission, Path(name))
                record["compiler"] = [asdict(one) for one in program.notes]
                with self.alone:  # it has the device to itself, which must be well afterwards
                    try:
                        self._run(record, replace(program, source=source, most=self.spec.limits.all_seconds))
                    finally:
                        self.device.check()
        except EndedError as ended:
            record.update(status=ended.status, reason=ended.reason)
        except DeviceError:
            raise
        except Exception as error:  # a fault of the harness's own on one file must not cost a class its night
            text = f"the harness itself failed, no fault of the file's: {type(error).__name__}: {error}"
            record.update(status="unsupported", reason=text)
        record["seconds_in_all"] = time.time() - record["started"]
        return record

    def _program(self, one: Submission, folder: Path) -> Program:
        if one.why:
            raise EndedError("unsupported", one.why)
        if one.source is None:
            name = {"cpu": "new-forward.h", "gpu": "new-forward.cuh"}[one.context]
            raise EndedError("unsupported", f"it holds no {name}, which --context {one.context} asks for")
        self.progress("compiling")
        if one.python:
            folder.chmod(0o755)
            try:
                sources.copy(one.source, folder, one.alone)
            except OSError as error:
                raise EndedError("unsupported", f"{one.source.name} cannot be read: {error}") from None
            return python_program(folder / one.source.name)
        tools, limits = self.tools, self.spec.limits
        built = build.build(one.source, one.context, folder, tools, limits, self.architecture, one.alone)
        return replace(built, arithmetic=arithmetic(sources.text(folder / "src")))

    def _run(self, record: dict[str, Any], program: Program) -> None:
        spec, pointed, demanded = self.spec, pointed_to(program.source), self.spec.demanding
        if demanded:
            tried = [(net, images) for net in spec.nets or NETS for images in (spec.images or (self.images,))]
            results = [self._net(program, *one) for one in tried]
        else:
            results = self._by_itself(program, pointed)
        verdict, decisive = judge_submission(results, demanded=demanded, pointed=pointed)
        if verdict.status == PASSED and self.timed_images > decisive.images and not (demanded or spec.quick):
            results.append(self._net(program, decisive.net, self.timed_images, plan=TIMES))
            decisive.timed = results[-1].status != PASSED
            verdict, decisive = judge_submission(results, demanded=demanded, pointed=pointed)
        record["pointed"] = [net.name for net in pointed]
        record.update(asdict(verdict))
        record["networks"] = [one.as_data() for one in results]
        record["images"] = sorted({one.images for one in results})
        record["printed"] = next((one.printed for one in results if one.printed), "")
        if verdict.status == PASSED:
            passed = [one for one in results if one.status == PASSED]
            record["seconds"] = {one.net.name: one.as_data().get("seconds") for one in passed}
        runs = [run for layer in decisive.layers for run in layer.runs]
        record["worst"] = worst(runs).as_data() if runs else None

    def _by_itself(self, program: Program, pointed: list[Net]) -> list[NetworkResult]:
        """The networks that the file's constants point to, then the others, then batch sizes that it may be tied to."""
        if self.spec.quick:
            return [self._net(program, (pointed or NETS)[0], _CPU_IMAGES, plan=BRIEF)]
        order = pointed + [net for net in KNOWN if net not in pointed]
        results: list[NetworkResult] = []
        seconds = self.spec.limits.run_seconds
        for net in order:
            right = any(one.status == PASSED for one in results)
            if right and net in LATER and net not in pointed:
                continue
            results.append(self._net(program, net, self.images, seconds, BRIEF if pointed and right else FULL))
            if is_final(results[-1], pointed):
                return results
            if results[-1].status == "timed_out":
                seconds = min(seconds, _SHORT_SECONDS)
        # It can do none with the images that it was given: does it hold a batch size of its own?
        for images in [one for one in batches_in(program.source) if one != self.images]:
            for net in order:
                memory = sum(problem.bytes for problem in net.problems(images)) if self.context == "cpu" else 0
                if memory > _MOST_BYTES or any(one.status == PASSED for one in results):
                    continue
                large = self.context == "cpu" and images > self.timed_images
                results.append(self._net(program, net, images, seconds, BRIEF if large else FULL))
                if large and results[-1].status == "wrong":  # to find that out of another network takes minutes
                    return results
        return results

    def _net(
        self, program: Program, net: Net, images: int, seconds: float = math.inf, plan: Sequence[str] = FULL
    ) -> NetworkResult:
        course_nets = trained(net, images) if plan == FULL and self.spec.accuracy else ()
        seconds = min(seconds, self.spec.limits.run_seconds)
        return try_network(self, program, net, images, seconds, plan, course_nets)


def for_cpu(tools: Tools, rules: Spec, jobs: int, in_parallel: bool = False) -> Grader:
    """The grader for this machine's processor, which times calls one at a time unless ``in_parallel``."""
    return Grader(tools, rules, turns=None if in_parallel else Turns(jobs), timed_images=_CPU_TIMED_IMAGES)


def for_gpu(tools: Tools, rules: Spec) -> Grader:
    """The grader for this machine's first GPU; raises DeviceError where there is none."""
    chip = cuda.chip()
    gpu = Grader(tools, rules, Device(0), _GPU_RUNS, context="gpu", images=_GPU_IMAGES, alone=threading.Lock())
    return replace(gpu, architecture=f"sm_{chip.architecture}", machine=chip.name)


def arithmetic(code: str) -> str:
    """The arithmetic units that CUDA code names, a key of ``core.roofline.PRODUCTS``."""
    tensor_cores = re.search(r"\bw?g?mma(_sync|\.sync|_async|::|\.mma)|\bcublas(GemmEx|LtMatmul)\b", code)
    return "fp32" if tensor_cores is None else "tf32" if "tf32" in code.lower() else "fp16"


def read(path: Path | None) -> str:
    """A source's text; empty where there is none that can be read."""
    return beginning(path, sources.MOST_BYTES) if path and os.path.isfile(path) else ""


def shown(path: Path | str) -> str:
    """A path as text in one line from left to right, also where its bytes are none."""
    text = str(path).encode(errors="backslashreplace").decode()
    controls = r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
    return re.sub(controls, lambda one: repr(one[0])[1:-1], text)
