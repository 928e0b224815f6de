"""Compile and run a course submission, ``new-forward.cuh`` or a ``.cu`` file, on the CPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import numpy as np

from ece408_op.problem import ConvProblem
from ece408_op.runtime.source_text import INCLUDE, mask

from . import _build, _indices, _report, _rewrite, _run, _sides
from ._build import Program
from ._errors import CompileError, UnsupportedCodeError
from ._report import Finding, Report

#: Options for the files that need them, by what the compiler says without, as in the grader: names next to MXNet's
#: operators, or a forward that is declared otherwise than the course's.
_OTHER_OPTIONS = (
    ("CUDA_KERNEL_LOOP|cuda_get_num_blocks|CUDA_CALL", "-DECE408_GRADE_OPERATORS"),
    ("forward.*ambiguous|ambiguous.*forward|undefined reference to .*op::forward", "-DECE408_GRADE_OWN_FORWARD"),
)
#: The compiler's message on the course's part if the file has no forward.
_NO_FORWARD = re.compile(r"after\.h:\d+.*\Wforward\W was not declared")
#: Outputs beyond it come from a variable without a value.
_UNSET = 1e38
#: g++'s messages on an array without a constant length, and on a variable without a value, or an element of an array.
_VARIABLE_LENGTH = re.compile(r"^(.*?):(\d+):\d+: warning: .*variable length array \W(\w+)", re.MULTILINE)
_UNSET_VARIABLE = re.compile(r"warning: \W(\w+)\S* (?:may be|is) used uninitialized")
#: A local variable that is declared without a value, and a sum of wmma.
_DECLARED = re.compile(
    r"(?:^|[;{}])\s*(?:(?:float|int)[234]?|double|(?:__)?half2?)\s+(\w+)(?:\s*\[[^\]]*\])*\s*(?=[;,])"
    r"|\bfragment\s*<\s*(?:\w+\s*::\s*)*accumulator\b[^;]*>\s*(\w+)(?:\s*\[[^\]]*\])*\s*(?=;)",
    re.MULTILINE,
)


def can_emulate() -> bool:
    """Return whether there is a g++ that knows 16-bit floats (12 or newer)."""
    return _build.compiler_version() is not None


def compile(path: Path, *, folder: Path | None = None) -> Program:
    """Compile a submission; a program that the folder already has is not compiled again.

    Args:
        path: a file with the course's ``forward(y, x, w)`` for ``gpu`` in ``mxnet::op``. It may include files of its
            folder by quotes.
        folder: where compiled programs are kept; by default in ``cached_folders.base``. Beyond 1 GiB, the programs
            that nobody has used for longest are removed, but none used within an hour.

    Raises:
        CompileError: with the source's lines; UnsupportedCodeError where it uses what the emulator lacks.
        DeviceError: there is no g++.
        OSError: the file cannot be read.
    """
    text = f'#line 1 "{path.name}"\n{_source(path)}\n#include <course_after.h>\n'
    checks = ("counters", "indices") if _indices.has_arrays(text) else ("counters",)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(_link, text, path.name, folder, check) for check in checks]
        try:
            program, *more = [one.result() for one in made]
        except KeyboardInterrupt:
            while wait(made, 0.1).not_done:  # the pool would wait for the compilers
                _build.end_compilers()
            raise
    _check_lengths(program, path)
    return replace(program, indices=more[0].executable) if more else program


def _check_lengths(program: Program, path: Path) -> None:
    """Raise CompileError for an array in a kernel or device function whose length is no constant, as nvcc does."""
    for file, line, name in _VARIABLE_LENGTH.findall(_warnings(program)):
        source = path.with_name(Path(file).name)
        if source.is_file() and int(line) in _sides.device_lines(source.read_text(encoding="utf-8", errors="replace")):
            raise CompileError(((int(line), f"expression must have a constant value: the length of {name}"),))


def _warnings(program: Program) -> str:
    return program.executable.with_name("warnings").read_text(encoding="utf-8")


def _link(text: str, name: str, folder: Path | None, checks: str) -> Program:
    """Compile with few headers, then with all; each time again with the option that an error asks for."""
    options: tuple[str, ...] = (_build.FEW_HEADERS,)
    while True:
        try:
            return _build.link(text, name, folder, checks, course=True, options=options)
        except UnsupportedCodeError:
            raise
        except CompileError as error:
            option = next((one for wanted, one in _OTHER_OPTIONS if re.search(wanted, str(error))), None)
            if option and option not in options:
                options = (*options, option)
            elif _NO_FORWARD.search(str(error)):
                said = "it has no forward(y, x, w) for gpu in namespace mxnet::op that can be called"
                raise CompileError(((None, said),)) from None
            elif _build.FEW_HEADERS in options:
                options = ()
            else:
                raise


def run_layers(
    program: Program, layers: Sequence[tuple[np.ndarray, np.ndarray]], *, fill: float = 0.0, seconds: float = 30.0
) -> list[Report]:
    """Run the program's ``forward`` on one layer after another, in one process, since files may count their calls.

    A layer that ends the process is the last one.

    Args:
        layers: x (B, C, H, W) and w (M, C, K, K) of each, float32.
        fill: what every element of y holds before a call.
        seconds: after that time a call ends with a finding of kind "time".

    Raises:
        ProblemError: the shapes are of no convolution.
    """
    calls = []
    for x, w in layers:
        batch, channels, height, width = x.shape
        problem = ConvProblem(batch, channels, height, width, w.shape[0], w.shape[2])
        y = np.full(problem.y_shape, fill, np.float32)
        inputs = (_run.Buffer(name, np.asarray(array, np.float32)) for name, array in (("x", x), ("w", w)))
        calls.append(_run.Call([*inputs, _run.Buffer("y", y, output=True)], [*y.shape, *x.shape, *w.shape]))
    reports = [_report.make(program, outcome) for outcome in _run.execute(program.executable, calls, seconds)]
    if program.indices and not any(one.kind == "time" for report in reports for one in report.findings):
        outcomes = _run.execute(program.indices, calls[: len(reports)], seconds)
        for i, outcome in enumerate(outcomes):
            found = _indices.findings(program, outcome)
            reports[i] = replace(reports[i], findings=(*found, *reports[i].findings))
    return [_with_unset(one, program) for one in reports]


def _with_unset(report: Report, program: Program) -> Report:
    """Add a finding where y holds numbers as large as a variable without a value: ``_build`` gives it -1.7e38."""
    large = report.y[~(np.abs(report.y) <= _UNSET)]
    line, name = _unset_variable(program) if large.size else (0, "")
    nan = bool(np.isnan(large).all())  # which has other causes; and halves that overflow are infinite
    unsure = nan or ("half" in program.text and not np.isfinite(large).any())
    if (unsure and not name) or (nan and report.findings):
        return report
    words = f"y was computed from a variable that has no value at first{f': {name}' if name else ''}"
    finding = Finding("uninitialised", line, 0, words, large.size, program.source if line else "")
    return replace(report, findings=(finding, *report.findings))


def _unset_variable(program: Program) -> tuple[int, str]:
    """Return the line and the name of the source's first variable without a value: that g++ warns of, or that is
    added to first. 0 and "" without one.
    """
    text = _warnings(program)
    for found in _UNSET_VARIABLE.finditer(text):
        declared = re.compile(rf"(\S+?):(\d+):\d+: note: \W{found[1]}\W.* declared here").search(text, found.end())
        if declared and Path(declared[1]).name == program.source:
            return int(declared[2]), found[1]
    masked = mask(program.text)
    for found in _DECLARED.finditer(masked):
        name = found[1] or found[2]
        element, itself = rf"\b{name}\b(?:\s*\[[^\]]*\]|\.\w+)*\s*", rf"[+-]=|=(?=[^;]*\b{name}\b)"
        used = re.compile(rf"(\w*)\s*\(?\s*{element}({itself})?").search(masked, found.end())
        if used and (used[2] or (found[2] and used[1] == "mma_sync")):
            at = found.start(found.lastindex or 0)
            *_, start = re.finditer(r'^#line (\d+) "(.*)"\n', program.text[:at], re.MULTILINE)
            line = int(start[1]) + program.text.count("\n", start.end(), at)
            return (line, name) if start[2] == program.source else (0, name)
    return 0, ""


def _source(path: Path, above: tuple[Path, ...] = ()) -> str:
    """Return the file's text as C++, with the files of its folder that it includes in their places."""
    text = path.read_text(encoding="utf-8-sig", errors="replace").replace("\r\n", "\n")
    text = _rewrite.without_missing_headers(text, (*_build.header_folders(), path.parent))
    _sides.check(text)
    text = _rewrite.rewrite(text)

    def included(found: re.Match[str]) -> str:
        other = path.parent / (found[2] or "")
        if not found[2] or other in (path, *above) or not other.is_file():
            return found[0]
        line = text.count("\n", 0, found.start()) + 1
        return f'\n#line 1 "{other.name}"\n{_source(other, (*above, path))}\n#line {line} "{path.name}"\n'

    return INCLUDE.sub(included, text)
