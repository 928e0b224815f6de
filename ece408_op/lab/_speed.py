"""How fast is a right file? Its time for more images, next to the package's kernels, cuDNN and the rooflines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from ece408_op import emulator
from ece408_op.bench import layers as bench_layers
from ece408_op.bench.launches import launches
from ece408_op.core import dispatch, roofline, timer
from ece408_op.core.explain import explain
from ece408_op.core.kernel import CudaKernel
from ece408_op.grade import runner
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.occupancy import KernelNotes, LaunchShape, device_limits

from ._check import Asked, Checked, counted, emulate, inputs, judged
from ._emulated import compiled

#: Images to time without --images: on a CPU the larger number where the smaller one takes less than the seconds.
_CPU_IMAGES, _GPU_IMAGES, _SHORT_SECONDS = (100, 1000), 10_000, 0.05
#: Images of the smallest layer in the emulator, behind the first verdict.
_EMULATED_IMAGES = 4
#: Timed calls.
_CALLS = 3
#: The slow kernel to compare with, by device.
_NAIVE = {"cpu": "loops", "gpu": "naive"}
YOURS = "yours"


def measure(asked: Asked, checked: Checked) -> None:
    """Add the times to each layer of a right result; a layer that is wrong for more images makes the result wrong.

    Raises FileError where the file's process ends.
    """
    result, file = checked.result, checked.file
    problems = [ConvProblem(1, *entry["layer"]) for entry in result["layers"]]
    if file is None:
        if checked.emulated and not asked.images:
            # The layers before it too: a file may count its calls.
            number = problems.index(min(problems, key=lambda one: one.flops))
            some = [*problems[:number], problems[number].with_batch(_EMULATED_IMAGES)]
            *_, entry = emulate(checked.emulated, some, dict(result))
            if not any(one["kind"] == "time" for one in entry["findings"]):
                _judge_again(result, len(some) - 1, entry, _EMULATED_IMAGES)
        return
    for images in (asked.images,) if asked.images else (_GPU_IMAGES,) if file.device == "gpu" else _CPU_IMAGES:
        large = [problem.with_batch(images) for problem in problems]
        arrays = [inputs(problem) for problem in large]
        seconds = _own_seconds(file, large, arrays, result)
        if not checked.right:
            return
        if sum(seconds) > _SHORT_SECONDS:
            break
    peers = _gpu_peers if file.device == "gpu" else _cpu_peers
    for problem, (x, w), entry, own in zip(large, arrays, result["layers"], seconds):
        entry["times"] = {"images": images, "seconds": {YOURS: own, **peers(problem, x, w)}, "rooflines": {}}
        if file.device == "gpu":
            entry["times"]["rooflines"] = _rooflines(problem)
    if file.device == "gpu":
        _add_counters(checked, problems)


def _own_seconds(
    file: runner.File,
    problems: list[ConvProblem],
    arrays: list[tuple[np.ndarray, np.ndarray]],
    result: dict[str, Any],
) -> list[float]:
    """Return the median seconds of each layer's calls, and check some images of the first one's output."""
    seconds: list[list[float]] = [[] for _ in problems]
    with runner.Session(file, problems) as session:
        # All layers in turn, as in the course: a file may count its calls.
        for turn in range(1 + _CALLS):
            for number, (problem, (x, w)) in enumerate(zip(problems, arrays)):
                seconds[number].append(session.call(number, x, w))
                if turn == 0:
                    some = sorted({0, 1 % problem.batch, problem.batch - 1})
                    part = explain(x[some], w, session.output(number)[some], 0.0, result["source"])
                    entry = judged(problem.with_batch(len(some)), part, cuda_error=session.cuda_error)
                    _judge_again(result, number, entry, problem.batch, f"; images {some} are shown")
    return [statistics.median(one[1:]) for one in seconds]


def _judge_again(result: dict[str, Any], number: int, entry: dict[str, Any], images: int, shown: str = "") -> None:
    """Replace a layer's entry by that for more images, if it is another verdict."""
    if entry["status"] != result["layers"][number]["status"]:
        few = f"{result['images']} image{'s' if result['images'] > 1 else ''}"
        text = f"right for {few}, and wrong for {images}{shown}"
        result["layers"][number] = {**entry, "note": ". ".join(filter(None, (text, entry["note"])))}
        result["status"] = entry["status"]


def _cpu_peers(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> dict[str, float]:
    y, threads, found = np.empty(problem.y_shape, np.float32), dispatch.thread_count(problem), {}
    for name in dict.fromkeys((_NAIVE["cpu"], dispatch.select(problem, "cpu").name)):
        kernel: Any = dispatch.find(name)
        kernel.prepare(problem, y)
        call: Callable[[], Any] = partial(kernel.run, problem, x, w, y, threads)
        found[name] = timer.measure(call, timer.cpu_clock, repeats=_CALLS).median
    return found


def _gpu_peers(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> dict[str, float]:
    cupy = cuda.cupy()
    names = list(dict.fromkeys((_NAIVE["gpu"], dispatch.select(problem, "gpu", chip=cuda.chip()).name)))
    rows = bench_layers.gpu_rows(problem, cupy.asarray(x), cupy.asarray(w), bench_layers.Settings(names, _CALLS))
    return {row.impl or row.contestant: row.median for row in rows if row.median}


def _rooflines(problem: ConvProblem) -> Mapping[str, float]:
    ceilings = roofline.measure()
    return {"memory": ceilings.memory_seconds(problem), "FP32": ceilings.arithmetic_seconds(problem)}


def _add_counters(checked: Checked, problems: list[ConvProblem]) -> None:
    """Add the emulator's counters and findings for one image, where it can run the file, and the compiler's figures."""
    result, file = checked.result, checked.file
    assert file is not None
    shapes: list[LaunchShape] = []
    try:
        run = compiled(file.path, checked.kernel) if emulator.can_emulate() else None
        reports = run(problems, [inputs(problem) for problem in problems]) if run else []
    except emulator.CompileError as error:
        reports = []
        for entry in result["layers"]:
            entry["note"] = entry["note"] or f"without counters, since the emulator cannot run it: {error}"
    for problem, entry, report in zip(problems, result["layers"], reports):
        shapes += report.launches
        entry.update(counted(report, result["lines_of"], problem), findings=list(map(asdict, report.findings)))
    notes = file.notes
    if checked.kernel is not None:
        found = [_of_plan(checked.kernel, problem) for problem in problems]
        notes, shapes = found[0][0], [shape for _, some in found for shape in some]
    result["compiler"] = list(dict.fromkeys(runner.compiler_lines(notes, shapes, device_limits())))


def _of_plan(kernel: CudaKernel, problem: ConvProblem) -> tuple[tuple[KernelNotes, ...], list[LaunchShape]]:
    """Return what the driver reports on the functions of a kernel in Python, and their launches."""
    arrays = (cuda.cupy().empty(shape, "f") for shape in problem.shapes)
    notes: dict[str, KernelNotes] = {}
    shapes = []
    for one in launches(kernel, problem, *arrays):
        name, static = one["entry"], one["static_shared"]
        shapes.append(LaunchShape(name, one["grid"], one["block"], static, one["dynamic_shared"]))
        notes[name] = KernelNotes(name, one["local"], registers=one["registers"], shared_bytes=static)
    return tuple(notes.values()), shapes
