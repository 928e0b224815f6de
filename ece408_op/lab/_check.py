"""The check of one file: compiled, run on some layers, its outputs compared with float64 and explained.

The result is data that JSON takes; ``_screen`` and ``_page`` show it. Its status is "right", "wrong", or why the file
did not run: "compile_error", "crashed", "timed_out", "out_of_bounds" or "unsupported".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op import emulator
from ece408_op.core.explain import ACCUMULATED, LOOPS, ROUNDED, Explanation, explain, line_of
from ece408_op.errors import DeviceError
from ece408_op.grade import runner
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

RIGHT, WRONG = "right", "wrong"
#: Images of the first check, and of one in the emulator, which takes seconds per image of a layer.
IMAGES, EMULATED_IMAGES = 4, 1
#: What y holds before a call: no sum of these inputs.
_FILL = 4096.5
_EMULATED_SECONDS = 60.0


@dataclass(frozen=True)
class Asked:
    """The command: the file, layers for one image (empty: those of its constants), images (0: few, then more)."""

    path: Path
    layers: tuple[ConvProblem, ...] = ()
    images: int = 0
    emulate: bool = False


@dataclass(frozen=True)
class Checked:
    """The result as data, and the compiled file where one ran outside of the emulator."""

    result: dict[str, Any]
    file: runner.File | None = None

    @property
    def right(self) -> bool:
        """Was every output right?"""
        return bool(self.result["status"] == RIGHT)


def check(asked: Asked) -> Checked:
    """Compile the file and compare its outputs for a few images; raises DeviceError where this machine cannot."""
    device, text = runner.device_of(asked.path), asked.path.read_text(encoding="utf-8", errors="replace")
    emulated = device == "gpu" and (asked.emulate or cuda.driver_version() is None)
    if emulated and asked.path.suffix.lower() == ".py":
        raise DeviceError(f"{asked.path}: expected a GPU for a kernel in Python; the emulator takes .cu and .cuh files")
    term, layers = ("", list(asked.layers)) if asked.layers else runner.layers_of(text)
    images = asked.images or (EMULATED_IMAGES if emulated else IMAGES)
    result: dict[str, Any] = {"version": 1, "path": str(asked.path), "file": asked.path.name, "source": text}
    result.update(device="emulator" if emulated else device, term=term, images=images, status=RIGHT, reason="")
    result.update(layers=[], compiler=[], printed="", hint="")
    problems = [layer.with_batch(images) for layer in layers]
    file = None
    try:
        if emulated:
            _emulate(asked.path, problems, result)
        else:
            file = runner.compile_file(asked.path)
            result["compiler"] = file.compiler_lines
            _run(file, problems, result)
    except runner.FileError as error:
        line = line_of(LOOPS, text) if error.status == "out_of_bounds" else None
        result.update(status=error.status, reason=f"{error.reason}; see line {line}" if line else error.reason)
    except emulator.CompileError as error:
        status = "unsupported" if isinstance(error, emulator.UnsupportedCodeError) else "compile_error"
        result.update(status=status, reason=str(error))
    if result["status"] in (WRONG, "crashed", "out_of_bounds"):
        result["hint"] = runner.batch_hint(text, images)
    return Checked(result, file)


def inputs(problem: ConvProblem) -> tuple[np.ndarray, np.ndarray]:
    """Return random x (B, C, H, W) and w (M, C, K, K), float32; the same for each call."""
    rng = np.random.default_rng(408)
    x = rng.random(problem.x_shape, np.float32) * 2 - 1
    return x, rng.standard_normal(problem.w_shape, np.float32)


def judged(problem: ConvProblem, found: Explanation, findings: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return a layer's entry of the result."""
    p, findings = problem, list(findings)
    entry: dict[str, Any] = {"layer": [p.channels, p.height, p.width, p.filters, p.kernel], "images": p.batch}
    right = not findings and (found.wrong == 0 or found.mistake in (ROUNDED, ACCUMULATED))
    entry.update(status=RIGHT if right else WRONG, note="", text=found.lines(), findings=findings)
    entry.update(times=None, counters=None, lines=[], hints=[])
    entry["explanation"] = found.as_data() if found.wrong else None
    if right and found.wrong:
        forgiven = {
            ACCUMULATED: "right only while y is 0 before the call, as in the course",
            ROUNDED: "right, less precisely",
        }
        entry["note"] = f"{forgiven[found.mistake]}. {found.summary}"
    return entry


def _run(file: runner.File, problems: Sequence[ConvProblem], result: dict[str, Any]) -> None:
    """Add the layers, each computed in one worker process; raises FileError where that ends."""
    with runner.Session(file, problems) as session:
        try:
            for number, problem in enumerate(problems):
                x, w = inputs(problem)
                session.call(number, x, w, _FILL)
                found = explain(x, w, session.output(number), _FILL, file.text)
                _add(result, judged(problem, found))
                if session.wrote_outside(number):
                    text = "it wrote outside its arrays, next to a first or last element"
                    result.update(status="out_of_bounds", reason=f"{text} ({problem})")
        finally:
            result["printed"] = session.printed


def _emulate(path: Path, problems: Sequence[ConvProblem], result: dict[str, Any]) -> None:
    """Add the layers with findings, counters per line and hints; raises CompileError."""
    program = emulator.compile(path)
    for problem in problems:
        x, w = inputs(problem)
        report = emulator.run(program, x, w, fill=_FILL, seconds=_EMULATED_SECONDS)
        found = explain(x, w, report.y, _FILL, result["source"])
        entry = judged(problem, found, map(asdict, report.findings))
        entry.update(counted(report, path.name))
        result["printed"] += report.printed
        _add(result, entry)


def counted(report: emulator.Report, name: str) -> dict[str, Any]:
    """Return the counters of a report, in all and per line of the file of that name, and the hints, as data."""
    totals = {"bytes_per_output": report.bytes_per_output, "intensity": report.intensity, **_counters(report.totals)}
    lines = [_counters(one) for one in report.lines if one.file == name and one.line]
    return {"counters": totals, "lines": lines, "hints": [asdict(hint) for hint in report.hints]}


def _counters(one: emulator.LineCounters) -> dict[str, Any]:
    sums = {name: getattr(one, name) for name in ("global_requests", "sectors", "shared_requests", "wavefronts")}
    return {**asdict(one), **sums}


def _add(result: dict[str, Any], entry: dict[str, Any]) -> None:
    result["layers"].append(entry)
    if entry["status"] == WRONG:
        result["status"] = WRONG
