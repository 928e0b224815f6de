"""Grade one submission: build it, try networks and batch sizes, and make one record of it all."""

from __future__ import annotations

import hashlib
import io
import math
import queue
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ece408_op.errors import DeviceError
from ece408_op.runtime import cuda
from ece408_op.runtime.occupancy import KernelNotes

from . import _build, _python_side, _sources
from ._device import Device, Turns
from ._errors import EndedError
from ._networks import KNOWN, LATER, NETS, Net, batches_in, pointed_to
from ._real_images import trained
from ._rounds import BRIEF, FULL, TIMES, Bench, try_network
from ._sandbox import Tools
from ._spec import Spec
from ._submission import Submission
from ._tools import new_folder
from ._verdict import PASSED, NetworkResult, is_final, judge_submission, worst
from ._worker import Program

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
class Grader:
    """Grades submissions of one context on one machine."""

    bench: Bench
    context: str
    #: Images that are tried first, and images of the timed runs that follow (0: none); on the CPU, larger batches get
    #: few runs.
    images: int
    timed_images: int = 0
    architecture: str = ""
    #: The device, in words, for the record.
    device: str = "cpu"
    #: The GPUs that are free, and how many there are.
    free: queue.SimpleQueue[Device] | None = None
    devices: int = 0

    def grade(self, submission: Submission) -> dict[str, Any]:
        """The submission's record; raises HarnessError where this machine cannot."""
        with self.bench.turns.working() if self.bench.turns else nullcontext():
            return self._grade(submission)

    def _grade(self, submission: Submission) -> dict[str, Any]:
        started, source = time.time(), read(submission.source)
        record: dict[str, Any] = {"path": shown(submission.path), "status": "", "reason": "", "precision": None}
        record.update(context=submission.context, device=self.device, source=shown(submission.source or ""))
        record["fingerprint"] = fingerprint(source)
        # Whatever happens, a record has every key.
        record.update(worst=None, seconds={}, images=[], networks=[], printed="", compiler=[], pointed=[])
        record.update(containment={"had": [], "lacks": []}, device_afterwards=None)
        try:
            with new_folder("build") as name:
                program, notes = self._program(submission, Path(name))
                record["compiler"] = [asdict(one) for one in notes]
                self._run_on_a_device(record, replace(program, source=source, most=self.bench.spec.limits.all_seconds))
        except EndedError as ended:
            record.update(status=ended.status, reason=ended.reason)
        except DeviceError:
            raise
        except Exception as error:  # a fault of the harness's own on one file must not cost a class its night
            text = f"the harness itself failed, no fault of the file's: {type(error).__name__}: {error}"
            record.update(status="unsupported", reason=text)
        record["started"], record["seconds_in_all"] = started, time.time() - started
        return record

    def _program(self, one: Submission, folder: Path) -> tuple[Program, tuple[KernelNotes, ...]]:
        """The worker's program, made in the folder, and what the compiler reports."""
        if one.why:
            raise EndedError("unsupported", one.why)
        if one.kernel:
            return _python_side.program(one.kernel), ()
        if one.source is None:
            name = {"cpu": "new-forward.h", "gpu": "new-forward.cuh"}[one.context]
            raise EndedError("unsupported", f"it holds no {name}, which --context {one.context} asks for")
        self.bench.progress("compiling")
        if one.python:
            folder.chmod(0o755)
            _sources.copy(one.source, folder, one.alone)
            return _python_side.program(str(folder / one.source.name), folder), ()
        tools, limits = self.bench.tools, self.bench.spec.limits
        built = _build.build(one.source, one.context, folder, tools, limits, self.architecture, one.alone)
        units = arithmetic(_sources.text(folder / "src"))
        program = Program(str(built.library), (built.library.parent,), folder=f"{folder}/src/", arithmetic=units)
        return program, built.notes

    def _run_on_a_device(self, record: dict[str, Any], program: Program) -> None:
        with self._on_a_device() as grader:
            device = grader.bench.device
            try:
                grader._run(record, program)
            finally:
                if device.gpu:
                    record["device_afterwards"] = {"well": True, "free_bytes": device.check()}

    @contextmanager
    def _on_a_device(self) -> Iterator[Grader]:
        """This grader on a device that it has to itself."""
        if self.free is None:
            yield self
            return
        device = self.free.get()
        try:
            yield replace(self, bench=replace(self.bench, device=device))
        finally:
            self.free.put(device)

    def _run(self, record: dict[str, Any], program: Program) -> None:
        demanded = self.bench.spec.demanding
        results = self._demanded(program) if demanded else self._by_itself(program)
        pointed = pointed_to(program.source)
        verdict, decisive = judge_submission(results, demanded=demanded, pointed=pointed)
        if verdict.status == PASSED and self.timed_images > decisive.images and not (demanded or self.bench.spec.quick):
            results.append(self._net(program, decisive.net, self.timed_images, plan=TIMES))
            decisive.timed = results[-1].status != PASSED
            verdict, decisive = judge_submission(results, demanded=demanded, pointed=pointed)
        record["pointed"] = [net.name for net in pointed]
        record.update(asdict(verdict))
        record["networks"] = [one.as_data() for one in results]
        record["images"] = sorted({one.images for one in results})
        record["printed"] = next((one.printed for one in results if one.printed), "")
        record["containment"] = {"had": sorted(results[0].had), "lacks": sorted(results[0].lacks)}
        if verdict.status == PASSED:
            passed = [one for one in results if one.status == PASSED]
            record["seconds"] = {one.net.name: one.as_data().get("seconds") for one in passed}
        runs = [run for layer in decisive.layers for run in layer.runs]
        record["worst"] = worst(runs).as_data() if runs else None

    def _demanded(self, program: Program) -> list[NetworkResult]:
        """Every network with every number of images that the grader's file names."""
        spec = self.bench.spec
        return [
            self._net(program, net, images) for net in spec.nets or NETS for images in (spec.images or (self.images,))
        ]

    def _by_itself(self, program: Program) -> list[NetworkResult]:
        """The networks that the file's constants point to, then the others, then batch sizes that it may be tied to."""
        pointed = pointed_to(program.source)
        if self.bench.spec.quick:
            net = (pointed or NETS)[0]
            return [self._net(program, net, _CPU_IMAGES, plan=BRIEF)]
        order = pointed + [net for net in KNOWN if net not in pointed]
        results: list[NetworkResult] = []
        seconds = self.bench.spec.limits.run_seconds
        for net in order:
            right = any(one.status == PASSED for one in results)
            if right and net in LATER and net not in pointed:
                continue
            done = bool(pointed) and right
            results.append(self._net(program, net, self.images, seconds, BRIEF if done else FULL))
            if is_final(results[-1], pointed):
                return results
            if results[-1].status == "timed_out":
                seconds = min(seconds, _SHORT_SECONDS)
        # It can do none with the images that it was given: does it hold a batch size of its own?
        for images in [one for one in batches_in(program.source) if one != self.images]:
            for net in order:
                memory = sum(problem.bytes for problem in net.problems(images))
                too_large = self.context == "cpu" and memory > _MOST_BYTES
                if too_large or any(one.status == PASSED for one in results):
                    continue
                large = self.context == "cpu" and images > self.timed_images
                results.append(self._net(program, net, images, seconds, BRIEF if large else FULL))
                if large and results[-1].status == "wrong":  # to find that out of another network takes minutes
                    return results
        return results

    def _net(
        self, program: Program, net: Net, images: int, seconds: float = math.inf, plan: Sequence[str] = FULL
    ) -> NetworkResult:
        seconds = min(seconds, self.bench.spec.limits.run_seconds)
        course_nets = trained(net, images) if plan == FULL and self.bench.spec.accuracy else ()
        return try_network(self.bench, program, net, images, seconds, plan, course_nets)


def for_cpu(tools: Tools, rules: Spec, in_parallel: bool = False) -> Grader:
    """The grader for this machine's processor.

    Calls are timed one at a time. ``in_parallel`` they are not, and repeating a disturbed one does not help.
    """
    bench = Bench(tools, rules)
    bench = replace(bench, repeats=0) if in_parallel else replace(bench, turns=Turns())
    return Grader(bench, "cpu", _CPU_IMAGES, _CPU_TIMED_IMAGES)


def for_gpus(tools: Tools, rules: Spec) -> Grader:
    """The grader for this machine's GPUs of the first one's kind; raises DeviceError where there is none."""
    chip = cuda.chip()
    alike = [number for number in range(cuda.device_count()) if cuda.chip(number) == chip]
    free: queue.SimpleQueue[Device] = queue.SimpleQueue()
    for number in alike:
        free.put(Device(number))
    bench = Bench(tools, rules, runs=_GPU_RUNS)
    return Grader(bench, "gpu", _GPU_IMAGES, 0, f"sm_{chip.architecture}", chip.name, free, len(alike))


def fingerprint(source: str) -> str:
    """A digest of the code without comments and white space: equal for copies, empty where there is no code."""
    code = "".join(_sources.without_comments(source).split())
    return hashlib.blake2b(code.encode(), digest_size=16).hexdigest() if code else ""


def arithmetic(code: str) -> str:
    """The arithmetic units that CUDA code names, a key of ``core.roofline.PRODUCTS``."""
    tensor_cores = re.search(r"\bw?g?mma(_sync|\.sync|_async|::|\.mma)|\bcublas(GemmEx|LtMatmul)\b", code)
    return "fp32" if tensor_cores is None else "tf32" if "tf32" in code.lower() else "fp16"


def read(path: Path | None) -> str:
    """A source's text; empty where there is none that can be read."""
    try:
        with open(path, "rb") if path and path.is_file() else io.BytesIO() as file:
            return file.read(_sources.MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def shown(path: Path | str) -> str:
    """A path as text in one line, also where its bytes are none."""
    text = str(path).encode(errors="backslashreplace").decode()
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda one: repr(one[0])[1:-1], text)
