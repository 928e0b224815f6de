"""How fast is a right file? Its time for more images, next to the package's kernels, cuDNN and the rooflines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ece408_op import emulator
from ece408_op.bench import layers as bench_layers
from ece408_op.core import dispatch, roofline, timer
from ece408_op.core.explain import explain
from ece408_op.grade import runner
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

from ._check import Asked, Checked, counted, inputs, judged

#: Images to time without --images: on a CPU the larger number where the smaller one takes less than the seconds.
_CPU_IMAGES, _GPU_IMAGES, _SHORT_SECONDS = (100, 1000), 10_000, 0.05
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
    if file is None:
        return
    problems = [ConvProblem(1, *entry["layer"]) for entry in result["layers"]]
    for images in (asked.images,) if asked.images else (_GPU_IMAGES,) if file.device == "gpu" else _CPU_IMAGES:
        seconds = _own_seconds(file, [problem.with_batch(images) for problem in problems], result)
        if sum(seconds) > _SHORT_SECONDS or not checked.right:
            break
    peers = _gpu_peers if file.device == "gpu" else _cpu_peers
    for problem, entry, own in zip(problems, result["layers"], seconds):
        large = problem.with_batch(images)
        entry["times"] = {"images": images, "seconds": {YOURS: own, **peers(large)}, "rooflines": {}}
        if file.device == "gpu":
            entry["times"]["rooflines"] = _rooflines(large)
            _add_counters(file, problem, entry)


def _own_seconds(file: runner.File, problems: list[ConvProblem], result: dict[str, Any]) -> list[float]:
    """Return the median seconds of each layer's calls, and check some images of the first one's output."""
    found = []
    with runner.Session(file, problems) as session:
        for number, problem in enumerate(problems):
            x, w = inputs(problem)
            session.call(number, x, w)
            some = sorted({0, 1 % problem.batch, problem.batch - 1})
            entry = judged(
                problem.with_batch(len(some)), explain(x[some], w, session.output(number)[some], 0.0, file.text)
            )
            if entry["status"] != result["layers"][number]["status"]:
                text = f"right for {result['images']} images, and wrong for {problem.batch}; images {some} are shown"
                result["layers"][number] = {**entry, "note": text}
                result["status"] = entry["status"]
            found.append(statistics.median(session.call(number, x, w) for _ in range(_CALLS)))
    return found


def _cpu_peers(problem: ConvProblem) -> dict[str, float]:
    x, w = inputs(problem)
    y, threads, found = np.empty(problem.y_shape, np.float32), dispatch.thread_count(problem), {}
    for name in dict.fromkeys((_NAIVE["cpu"], dispatch.select(problem, "cpu").name)):
        kernel: Any = dispatch.find(name)
        kernel.prepare(problem, y)
        call: Callable[[], Any] = partial(kernel.run, problem, x, w, y, threads)
        found[name] = timer.measure(call, timer.cpu_clock, repeats=_CALLS).median
    return found


def _gpu_peers(problem: ConvProblem) -> dict[str, float]:
    cupy = cuda.cupy()
    x, w = (cupy.asarray(array) for array in inputs(problem))
    names = list(dict.fromkeys((_NAIVE["gpu"], dispatch.select(problem, "gpu", chip=cuda.chip()).name)))
    rows = bench_layers.gpu_rows(problem, x, w, bench_layers.Settings(names, _CALLS))
    return {row.impl or row.contestant: row.median for row in rows if row.median}


def _rooflines(problem: ConvProblem) -> Mapping[str, float]:
    ceilings = roofline.measure()
    return {"memory": ceilings.memory_seconds(problem), "FP32": ceilings.arithmetic_seconds(problem)}


def _add_counters(file: runner.File, problem: ConvProblem, entry: dict[str, Any]) -> None:
    """Add the emulator's counters for one image, where it can run the file."""
    if file.path.suffix.lower() == ".py" or not emulator.can_emulate():
        return
    try:
        entry.update(counted(emulator.run(emulator.compile(file.path), *inputs(problem)), file.path.name))
    except emulator.CompileError:
        return
