"""After the verdict: what the emulator finds and counts for the same file, and what the compiler reports on it."""

from __future__ import annotations

from collections.abc import Sequence

from ece408_op import emulator
from ece408_op.bench.launches import launches
from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda, ptxas
from ece408_op.runtime.occupancy import KernelNotes, LaunchShape, device_limits
from ece408_op.submission import EndedError

from ._check import Asked, Checked, emulate, for_more, judge_again
from ._emulated import compiled

#: Images of the smallest layer in the emulator, behind the first verdict.
_IMAGES = 4
#: Ends of a file on a GPU whose place the emulator may find.
_RAN = ("right", "wrong", "crashed", "out_of_bounds", "timed_out")


def add(asked: Asked, checked: Checked) -> None:
    """Emulate the file once more: with more images, or, where a GPU computed it, for the lines of what is wrong."""
    if checked.result["device"] == "gpu" and checked.result["status"] in _RAN:
        _emulate_gpu_file(checked)
    elif checked.emulated and checked.right and not asked.images:
        # The layers before it too: a file may count its calls.
        number = checked.problems.index(min(checked.problems, key=lambda one: one.flops))
        some = [*checked.problems[:number], checked.problems[number].with_batch(_IMAGES)]
        *_, (entry, _) = emulate(checked.emulated, some, dict(checked.result))
        if not any(one["kind"] == "time" for one in entry["findings"]):
            judge_again(checked.result, len(some) - 1, entry, for_more(checked.result, _IMAGES))


def _emulate_gpu_file(checked: Checked) -> None:
    """Add the emulator's findings and counters for one image per layer, where it can run the file.

    A layer that the file did not come to on the GPU becomes that of the emulator.
    """
    result = checked.result
    shapes: list[LaunchShape] = []
    try:
        run = compiled(checked.path, checked.kernel) if emulator.can_emulate() else None
        for number, (entry, report) in enumerate(emulate(run, checked.problems, dict(result)) if run else ()):
            if result["status"] != "timed_out":  # the emulator's own limits say nothing about the file
                entry["findings"] = [one for one in entry["findings"] if one["kind"] not in ("time", "unsupported")]
            if number == len(result["layers"]):
                result["layers"].append({**entry, "note": "as emulated on the CPU"})
            result["layers"][number].update((key, entry[key]) for key in ("findings", "counters", "lines", "hints"))
            shapes += report.launches
    except (emulator.CompileError, EndedError) as error:
        for entry in result["layers"]:
            entry["note"] = entry["note"] or f"without counters, since the emulator cannot run it: {error}"
    if checked.right:
        result["compiler"] = _compiler_lines(checked, shapes)


def _compiler_lines(checked: Checked, shapes: Sequence[LaunchShape]) -> list[str]:
    notes = checked.file.program.notes if checked.file else ()
    if checked.kernel is not None:
        found = [_of_plan(checked.kernel, problem) for problem in checked.problems]
        notes, shapes = found[0][0], [shape for _, some in found for shape in some]
    return list(dict.fromkeys(ptxas.lines(notes, shapes, device_limits())))


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
