"""The check of one file: compiled, run on some layers, its outputs compared with float64 and explained.

The result is data that JSON takes; ``_screen`` and ``_page`` show it. Its status is "right", "wrong", or why the file
did not run: "compile_error", "crashed", "timed_out", "out_of_bounds" or "unsupported".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op import emulator
from ece408_op.core.explain import ACCUMULATED, LOOPS, NOTHING_WRITTEN, ROUNDED, Explanation, explain
from ece408_op.core.source_lines import line_of
from ece408_op.errors import DeviceError
from ece408_op.problem import NETS, TERMS, ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.source_text import without_comments
from ece408_op.submission import EndedError, runner, sources
from ece408_op.submission.sources import batches_in, pointed_to

RIGHT, WRONG, TIMED_OUT = "right", "wrong", "timed_out"
#: Images of the first check, and of one in the emulator, which takes seconds per image of a layer.
IMAGES, EMULATED_IMAGES = 4, 1
#: More would take the emulator minutes.
_MOST_EMULATED = 10
#: Seconds in which the emulator computes a layer.
_SECONDS = 60.0
#: The content of y before a call: no sum of the lab's inputs.
FILL = 4096.5
#: Why a file's later call may be wrong.
KEPT = "it keeps something from call to call, such as a static variable, or reads memory that it has not set"
_UNSET = "__constant__ memory is 0 until cudaMemcpyToSymbol copies to it, in front of the launch"
_STREAMS = "streams have no order: does each copy and launch wait for what it uses of another stream?"
#: The interface that a file implements in the course since 2020.
_LATER_COURSE = re.compile(r"\bGPUInterface *:: *\w+")
_DYNAMIC_SHARED = re.compile(r"\bextern\s+(?:volatile\s+)?__shared__[^;\[]*?(\w+)\s*\[\s*\]\s*;")


@dataclass(frozen=True)
class Request:
    """The command: the file, layers for one image (empty: those of its constants), images (0: few, then more)."""

    path: Path
    layers: tuple[ConvProblem, ...] = ()
    images: int = 0
    emulate: bool = False


@dataclass(frozen=True)
class Checked:
    """The layers for one image, the result as data; the compiled file, or the emulated one."""

    problems: list[ConvProblem]
    result: dict[str, Any]
    file: runner.File | None = None
    emulated: emulator.Program | None = None

    @property
    def right(self) -> bool:
        """Was every output right?"""
        return bool(self.result["status"] == RIGHT)


def check(request: Request) -> Checked:
    """Compile the file and compare its outputs for a few images; raises DeviceError where this machine cannot."""
    device, text = sources.device_of(request.path), request.path.read_text(encoding="utf-8", errors="replace")
    emulated = device == "gpu" and (request.emulate or cuda.driver_version() is None)
    # By default the network of spring 2018, whose second layer has several channels.
    net = (pointed_to(text) or [net for net in NETS if net.name == "2018sp"])[0]
    term, layers = ("", list(request.layers)) if request.layers else (TERMS[net.name], net.problems(1))
    images = request.images or (EMULATED_IMAGES if emulated else IMAGES)
    result: dict[str, Any] = {"version": 1, "path": str(request.path), "file": request.path.name, "source": text}
    result.update(device="emulator" if emulated else device, term=term, images=images, status=RIGHT, reason="")
    result.update(layers=[], compiler=[], printed="", hint="", ncu="")
    problems = [layer.with_batch(images) for layer in layers]
    file = program = None
    run: Callable[[Sequence[ConvProblem], dict[str, Any]], None]
    try:
        later = _LATER_COURSE.search(text)
        if later:
            words = "expected the course's forward(y, x, w) of 2017 to 2019, as in the file that ece408-lab new writes"
            where = f"line {text.count(chr(10), 0, later.start()) + 1}"
            raise EndedError("unsupported", f"{where}: {words}, got {later[0]}")
        if emulated:
            if request.path.suffix.lower() == ".py":
                raise DeviceError(
                    f"{request.path}: a CudaKernel in Python is not emulated: expected a .cu or .cuh file, or a GPU "
                    "and no --emulate"
                )
            sources.check_text(request.path.name, request.path.read_bytes())
            program = emulator.compile(request.path)
            run = partial(_emulate, program)
        else:
            file = runner.compile_file(request.path)
            run = partial(_run, file)
        run(problems, result)
        _note_kept(run, problems, result)
    except EndedError as error:
        line = line_of(LOOPS, result["source"]) if error.status == "out_of_bounds" else None
        result.update(status=error.status, reason=f"{error.reason} (see line {line})" if line else error.reason)
    except emulator.CompileError as error:
        status = "unsupported" if isinstance(error, emulator.UnsupportedCodeError) else "compile_error"
        lacks = "the emulator does not have" in str(error)
        hint = "write the file without it, or check it on a machine with a GPU" if lacks else ""
        result.update(status=status, reason=str(error), hint=hint)
    if result["status"] in (WRONG, "crashed", "out_of_bounds"):
        explained = any(map(_is_explained, result["layers"]))
        tied = "" if explained else _batch_hint(text, images, _MOST_EMULATED if emulated else None)
        zeros = any((entry["explanation"] or {}).get("mistake") == "zeros" for entry in result["layers"])
        unset = _UNSET if zeros and "__constant__" in text and "ToSymbol" not in text else ""
        result["hint"] = _shared_hint(text) or unset or tied or stream_hint(result)
    return Checked(layers, result, file, program)


def _shared_hint(text: str) -> str:
    """Return what is wrong if a kernel declares two arrays of dynamic shared memory."""
    for kernel in re.split(r"\b__global__\b", without_comments(text))[1:]:
        names = list(dict.fromkeys(_DYNAMIC_SHARED.findall(kernel)))
        if len(names) > 1:
            return f"{names[0]} and {names[1]} begin at one address: a block has one array of dynamic shared memory"
    return ""


def stream_hint(result: dict[str, Any]) -> str:
    """Return what to look at in a wrong file with streams, if nothing else explains its output."""
    said = any((entry["explanation"] or {}).get("sentence") for entry in result["layers"])
    said = said or any(one["kind"] != "uninitialised" for entry in result["layers"] for one in entry["findings"])
    return "" if said or result["status"] == RIGHT or "cudaStreamCreate" not in result["source"] else _STREAMS


def _batch_hint(text: str, images: int, most: int | None) -> str:
    """Return what to try if a file fails for that number of images, and its text may be tied to another number.

    most: images that can be computed in a short time, if there is a limit.
    """
    others = [one for one in batches_in(text) if one != images]
    if not others:
        return ""
    tried = f"try --images {others[-1]}" if most is None or others[-1] <= most else "use x.shape_[0] instead"
    return f"it may be tied to {' or '.join(map(str, others))} images: {tried}"


def inputs(problem: ConvProblem) -> tuple[np.ndarray, np.ndarray]:
    """Return random x (B, C, H, W) and w (M, C, K, K), float32; the same for each call."""
    rng = np.random.default_rng(408)
    x = rng.random(problem.x_shape, np.float32) * 2 - 1
    return x, rng.standard_normal(problem.w_shape, np.float32)


def layer_entry(
    problem: ConvProblem,
    found: Explanation,
    findings: Iterable[dict[str, Any]] = (),
    cuda_error: str = "",
    ended: bool = False,
) -> dict[str, Any]:
    """Return a layer's entry of the result; ended: the emulator's run ended before all was computed."""
    p, forgiven = problem, found.mistake in (ROUNDED, ACCUMULATED) and not found.rest
    enough = found.wrong == 0 or forgiven
    # Shared memory holds NaN at first: what a right file reads of it unwritten, it does not use.
    findings = [one for one in findings if not (enough and one["kind"] == "uninitialised")]
    entry: dict[str, Any] = {"layer": [p.channels, p.height, p.width, p.filters, p.kernel], "images": p.batch}
    right = enough and not findings
    late = {one["kind"] for one in findings} == {"time"}
    entry.update(status=RIGHT if right else TIMED_OUT if late else WRONG, note="", findings=findings)
    # Outputs that are missing because the run ended say nothing about the code; those that are forgiven are right.
    unsaid = ended or not found.wrong or (forgiven and findings)
    entry.update(text=[] if unsaid else found.lines(), explanation=None if unsaid else found.as_data(), ended=ended)
    entry.update(times=None, counters=None, ncu=None, lines=[], hints=[], launches=[])
    if right and found.wrong:
        notes = {
            ACCUMULATED: "right only while y is 0 before the call, as in the course",
            ROUNDED: "right, less precisely",
        }
        entry["note"] = f"{notes[found.mistake]}. {found.summary}"
    elif enough and not right and not late:
        entry["note"] = "the emulated output is right all the same; a GPU's may be wrong"
    elif not right and cuda_error:
        entry["note"] = f"CUDA reported {cuda_error}, which the file did not look at"
    return entry


def update_verdict(result: dict[str, Any], number: int, entry: dict[str, Any], text: str) -> None:
    """Replace a layer's entry by another call's if the verdicts differ; the text says what differed in the call."""
    if entry["status"] != result["layers"][number]["status"]:
        result["layers"][number] = {**entry, "note": ". ".join(filter(None, (text, entry["note"])))}
        result["status"] = entry["status"]


def for_more(result: dict[str, Any], images: int) -> str:
    """Return what a layer is that is right for the images of the result, and wrong for more."""
    few = f"{result['images']} image{'s' if result['images'] > 1 else ''}"
    return f"right for {few}, and wrong for {images}"


def _run(file: runner.File, problems: Sequence[ConvProblem], result: dict[str, Any]) -> None:
    """Add the layers, each computed in one worker process; raises EndedError where that ends."""
    with runner.Session(file, problems) as session:
        try:
            for number, problem in enumerate(problems):
                x, w = inputs(problem)
                session.call(number, x, w, FILL)
                found = explain(x, w, session.output(number), FILL, result["source"])
                _add(result, layer_entry(problem, found, cuda_error=session.cuda_error))
                if session.wrote_outside(number):
                    text = "it wrote outside its arrays, next to a first or last element"
                    result.update(status="out_of_bounds", reason=f"{text} ({problem})")
        finally:
            result["printed"] = session.printed


def _emulate(program: emulator.Program, problems: Sequence[ConvProblem], result: dict[str, Any]) -> None:
    for entry, _ in emulate(program, problems, result):
        _add(result, entry)


def _note_kept(
    run: Callable[[Sequence[ConvProblem], dict[str, Any]], None],
    problems: Sequence[ConvProblem],
    result: dict[str, Any],
) -> None:
    """Say of the first wrong layer whether it is right where no other layer comes before it."""
    number = next((i for i, entry in enumerate(result["layers"]) if entry["status"] != RIGHT), 0)
    if number and not result["layers"][number]["findings"]:
        alone = {**result, "layers": []}
        with suppress(EndedError):
            run(problems[number : number + 1], alone)
            if alone["layers"][0]["status"] == RIGHT:
                entry = result["layers"][number]
                entry["note"] = ". ".join(filter(None, (entry.get("note"), f"right in a first call: {KEPT}")))


def emulate(
    program: emulator.Program, problems: Sequence[ConvProblem], result: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], emulator.Report]]:
    """Yield each layer's entry with findings, counters per line and hints, and its report, until one ends the run."""
    arrays = [inputs(problem) for problem in problems]
    reports = emulator.run_layers(program, arrays, fill=FILL, seconds=_SECONDS)
    for problem, (x, w), report in zip(problems, arrays, reports):
        found = explain(x, w, report.y, FILL, result["source"])
        entry = layer_entry(problem, found, map(asdict, report.findings), ended=report.ended)
        entry.update(counted(report, result["file"], problem))
        result["printed"] = report.printed
        yield entry, report


def counted(report: emulator.Report, name: str, problem: ConvProblem) -> dict[str, Any]:
    """Return the counters of a report, in all and per line of the file of that name, and the hints, as data."""
    moved = 32 * report.totals.sectors
    totals = {"bytes_per_output": moved / report.y.size, "intensity": problem.flops / max(1, moved)}
    totals.update(_counters(report.totals))
    lines = [_counters(one) for one in report.lines if one.file == name and one.line]
    hints, launches = ([asdict(one) for one in some] for some in (report.hints(name), report.launches))
    return {"counters": totals, "lines": lines, "hints": hints, "launches": launches}


def _counters(one: emulator.LineCounters) -> dict[str, Any]:
    return {**asdict(one), "global_requests": one.global_requests}


def _is_explained(entry: dict[str, Any]) -> bool:
    """Return whether the entry says why the layer is wrong, other than by what another number of images would mend.

    A file that computes more images than there are goes far beyond an array, which ends the run.
    """
    found = entry["explanation"] or {"mistake": "", "sentence": ""}
    beyond = entry["ended"] and any(one["kind"] == "out of bounds" for one in entry["findings"])
    return bool((entry["findings"] and not beyond) or (found["sentence"] and found["mistake"] != NOTHING_WRITTEN))


def _add(result: dict[str, Any], entry: dict[str, Any]) -> None:
    result["layers"].append(entry)
    if entry["status"] != RIGHT and result["status"] != WRONG:
        result["status"] = entry["status"]
