"""Grade one submission: build it, try networks and batch sizes, and make one record of it all."""

from __future__ import annotations

import hashlib
import io
import queue
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ece408_op.errors import DeviceError

from . import _build, _hints, _python_side, _sources
from ._case import BRIEF, FULL, PASSED, PROBE, STOPPED, Case, Plan
from ._networks import KNOWN, LATER, NETS, Net, meant_for, numbers, pointed_to
from ._real_images import trained
from ._rounds import Bench, Tried, try_network
from ._submission import Submission
from ._worker import EndedError, Program

#: Operations of one run of a network on the CPU without a grader's file: with all runs and networks, a textbook's
#: seven loops end within 20 seconds.
_CPU_FLOPS = 0.25e9
#: The course's own number of images.
ALL_IMAGES = 10000
#: Batch sizes that the course spoke of, to which a file may be tied.
_BATCHES = frozenset({10, 100, 500, 1000, 2000, 5000, ALL_IMAGES})
#: The largest of them that gets all runs on the CPU.
_SMALL = 1000
#: A further network gets so many seconds a call once one has run out of time.
_SHORT_SECONDS = 5.0
_FINAL = ("tampered", "unstable", "compile_error")


@dataclass
class NetResult:
    """A network tried with so many images."""

    net: Net
    images: int
    tried: Tried

    @property
    def cases(self) -> list[Case]:
        """Its layers."""
        return self.tried.cases

    @property
    def failed(self) -> Case | None:
        """The layer that speaks against it: one that was tampered with, else the first that is not right."""
        bad = [case for case in self.cases if case.status not in (PASSED, STOPPED)]
        return next((case for case in bad if case.status == "tampered"), bad[0] if bad else None)

    @property
    def status(self) -> str:
        """Passed, or the failed layer's status."""
        return PASSED if self.failed is None else self.failed.status

    @property
    def reason(self) -> str:
        """The failed layer's reason."""
        return "" if self.failed is None else self.failed.reason

    def as_data(self) -> dict[str, Any]:
        """For the record."""
        data: dict[str, Any] = {"network": self.net.name, "images": self.images, "status": self.status}
        data["layers"] = layers = [case.as_data() for case in self.cases]
        if self.status == PASSED and all("seconds" in layer for layer in layers):
            data["seconds"] = sum(layer["seconds"]["median"] for layer in layers)
            if all(layer["roofline_seconds"] is not None for layer in layers):
                data["roofline_seconds"] = sum(layer["roofline_seconds"] for layer in layers)
        data["leaks"] = self.tried.leaks
        data["accuracy"] = [labels.as_data() for labels in self.tried.labels]
        return data


@dataclass(frozen=True)
class Grader:
    """Grades submissions of one context on one device."""

    bench: Bench
    context: str
    architecture: str = ""
    #: The device, in words, for the record.
    device: str = "cpu"
    #: The numbers of the GPUs that nobody uses; None on the CPU.
    free: queue.SimpleQueue[int] | None = None
    #: How many GPUs there are.
    devices: int = 0

    def grade(self, submission: Submission) -> dict[str, Any]:
        """The submission's record; raises HarnessError where this machine cannot."""
        started = time.time()
        source = read(submission.source)
        record: dict[str, Any] = {"path": _text(submission.path), "status": "", "reason": "", "precision": None}
        record.update(context=submission.context, device=self.device, source=_text(submission.source or ""))
        record["fingerprint"] = fingerprint(source)
        # Whatever comes of it, a record has every key.
        record.update(worst=None, seconds={}, images=[], can_do={}, networks=[], printed="", compiler=[])
        record.update(containment={"had": [], "lacks": []}, device_afterwards=None)
        try:
            if submission.why:
                raise EndedError("unsupported", submission.why)
            if submission.kernel:
                self._run_on_a_device(record, _python_side.program(submission.kernel), source)
            elif submission.source is None:
                name = {"cpu": "new-forward.h", "gpu": "new-forward.cuh"}[submission.context]
                raise EndedError("unsupported", f"it holds no {name}, which --context {submission.context} asks for")
            else:
                with tempfile.TemporaryDirectory(prefix="ece408-build-") as name:
                    program, notes = self._program(submission, Path(name))
                    record["compiler"] = [asdict(one) for one in _hints.kernels(notes)]
                    self._run_on_a_device(record, program, source)
        except EndedError as ended:
            record["status"], record["reason"] = ended.status, ended.reason
        except (DeviceError, OSError):
            raise
        except Exception as error:  # a fault of the harness's own on one file must not cost a class its night
            record["status"] = "unsupported"
            record["reason"] = f"the harness itself failed, no fault of the file's: {type(error).__name__}: {error}"
        record["started"], record["seconds_in_all"] = started, time.time() - started
        return record

    def _program(self, submission: Submission, folder: Path) -> tuple[Program, str]:
        """What the worker is, made in the folder, and what the compiler said."""
        source, tools, limits = submission.source, self.bench.tools, self.bench.spec.limits
        assert source is not None
        if submission.python:
            folder.chmod(0o755)
            _sources.copy(source, folder)
            return _python_side.program(str(folder / source.name), folder), ""
        built = _build.build(source, submission.context, folder, tools, limits, self.architecture)
        runner = tools.gpu_runner if self.bench.gpu else tools.runner
        seen = (tools.folder, built.library.parent)
        return Program((str(runner), str(built.library)), seen, folder=f"{folder}/src/"), built.notes

    def _run_on_a_device(self, record: dict[str, Any], program: Program, source: str) -> None:
        with self._on_a_device() as grader:
            bench = grader.bench
            try:
                grader._run(record, program, source)
            finally:
                if bench.check is not None:
                    record["device_afterwards"] = {"well": True, "free_bytes": bench.check(bench.device)}

    @contextmanager
    def _on_a_device(self) -> Iterator[Grader]:
        """This grader on a device that it has to itself."""
        if self.free is None:
            yield self
            return
        number = self.free.get()
        try:
            yield replace(self, bench=replace(self.bench, device=number))
        finally:
            self.free.put(number)

    def _run(self, record: dict[str, Any], program: Program, source: str) -> None:
        spec = self.bench.spec
        results = self._demanded(program) if spec.demanding else self._by_itself(program, source)
        passed = [one for one in results if one.status == PASSED]
        record["networks"] = [one.as_data() for one in results]
        record["images"] = sorted({one.images for one in results})
        record["printed"] = next((one.tried.printed for one in results if one.tried.printed), "")
        first = results[0].tried
        record["containment"] = {"had": sorted(set(first.had)), "lacks": sorted(set(first.lacks))}
        pointed = pointed_to(source)
        failed = next((one for one in results if _is_final(one, pointed)), None)
        if spec.demanding or failed is not None:
            failed = failed or next((one for one in results if one.status != PASSED), None)
            good = failed is None
        else:
            meant = meant_for(source)
            good = any(one.net in meant for one in passed) if meant else bool(passed)
            failed = None if good else results[0] if pointed else _typical(results)
        if good:
            record["status"] = "passed"
            record["precision"] = (
                "half" if any(one.precision == "half" for p in passed for one in p.cases) else "float32"
            )
            record["reason"] = _praise(results, passed)
            record["can_do"] = {"networks": [one.net.name for one in passed]}
            record["can_do"]["images"] = self._probe(program, passed)
            record["seconds"] = {one.net.name: one.as_data().get("seconds") for one in passed}
        elif failed is not None:
            record["status"], record["reason"] = failed.status, f"{failed.net.name}: {failed.reason}"
        worst = [case.as_data().get("worst") for case in (passed[0].cases if good else failed.cases if failed else [])]
        record["worst"] = max((one for one in worst if one), key=_error, default=None)

    def _demanded(self, program: Program) -> list[NetResult]:
        """Every network with every number of images that the grader's file names."""
        spec = self.bench.spec
        nets = spec.nets or NETS
        return [
            self._net(program, net, images, spec.limits.run_seconds)
            for net in nets
            for images in (spec.images or (self._images(net),))
        ]

    def _by_itself(self, program: Program, source: str) -> list[NetResult]:
        """The networks that the file's constants point to, then the others, then batch sizes that it may be tied to."""
        pointed = pointed_to(source)
        order = pointed + [net for net in KNOWN if net not in pointed]
        results: list[NetResult] = []
        seconds = self.bench.spec.limits.run_seconds
        for net in order:
            right = any(one.status == PASSED for one in results)
            if right and net in LATER and net not in pointed:
                continue
            done = bool(pointed) and right
            results.append(self._net(program, net, self._images(net), seconds, BRIEF if done else FULL))
            status = results[-1].status
            if _is_final(results[-1], pointed):
                return results
            if status == "timed_out":
                seconds = min(seconds, _SHORT_SECONDS)
        if any(one.status == PASSED for one in results):
            return results
        # It can do none with as many images as it was given: does it hold a number of its own?
        for images in sorted(_BATCHES & numbers(source)):
            for net in order:
                if images == self._images(net) or any(one.status == PASSED for one in results):
                    continue
                large = self.context == "cpu" and images > _SMALL
                results.append(self._net(program, net, images, seconds, BRIEF if large else FULL))
                if large and results[-1].status == "wrong":  # to find that out of another network takes minutes
                    return results
        return results

    def _net(self, program: Program, net: Net, images: int, seconds: float, plan: Plan = FULL) -> NetResult:
        pictures = trained(net, images) if plan == FULL and self.bench.spec.accuracy else ()
        return NetResult(net, images, try_network(self.bench, program, net.problems(images), seconds, plan, pictures))

    def _images(self, net: Net) -> int:
        if self.context == "gpu":
            return ALL_IMAGES
        one = sum(problem.flops for problem in net.problems(1))
        return max(1, min(ALL_IMAGES, int(_CPU_FLOPS / one)))

    def _probe(self, program: Program, passed: Sequence[NetResult]) -> dict[str, list[int]]:
        """The batch sizes that it can do, of each network that it passed."""
        can = {}
        for one in passed:
            can[one.net.name] = {one.images}
            for size in self.bench.spec.probe:
                small = self.context == "gpu" or size <= one.images
                if small and self._net(program, one.net, size, _SHORT_SECONDS, PROBE).status == PASSED:
                    can[one.net.name].add(size)
        return {name: sorted(sizes) for name, sizes in can.items()}


def _is_final(one: NetResult, pointed: Sequence[Net]) -> bool:
    """Does this speak against the file, whatever it does on other networks?

    Chance on a network that it is not for says nothing of those that it is for, where its constants tell which.
    """
    elsewhere = bool(pointed) and one.net not in pointed
    return one.status in _FINAL and not (one.status == "unstable" and elsewhere)


def fingerprint(source: str) -> str:
    """A digest of the code without comments and white space: equal for copies, empty where there is no code."""
    code = re.sub(r"\s+", "", re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL))
    return hashlib.blake2b(code.encode(), digest_size=16).hexdigest() if code else ""


def read(path: Path | None) -> str:
    """A source's text; empty where there is none that can be read."""
    try:
        with open(path, "rb") if path and path.is_file() else io.BytesIO() as file:
            return file.read(_sources.MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _text(path: Path | str) -> str:
    """A path as text: one may hold bytes that are none."""
    return str(path).encode(errors="backslashreplace").decode()


def _typical(results: Sequence[NetResult]) -> NetResult:
    """The first of those whose status is the most frequent."""
    counts = Counter(one.status for one in results)
    most = counts.most_common(1)[0][1]
    return next(one for one in results if counts[one.status] == most)


def _praise(results: Sequence[NetResult], passed: Sequence[NetResult]) -> str:
    text = "right on " + ", ".join(f"{one.net.name} ({one.images} images)" for one in passed)
    other = [f"{one.net.name} ({one.status}: {one.reason})" for one in results if one not in passed]
    if any(one.tried.leaks for one in passed):
        text += "; it does not free the memory that it takes, and was begun anew when there was none left"
    return f"{text}; not on {'; '.join(other)}" if other else text


def _error(worst: dict[str, Any]) -> float:
    return float(worst["error_of_bound"])
