"""After the verdict: what the emulator finds and counts for the same file, and what the compiler reports on it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from ece408_op import emulator
from ece408_op.problem import ConvProblem
from ece408_op.runtime import ptxas
from ece408_op.runtime.occupancy import WARP, LaunchShape, device_limits

from ._check import KEPT, RIGHT, Checked, Request, emulate, for_more, stream_hint, update_verdict

#: Images of the smallest layer in the emulator, behind the first verdict, and of the smallest with several channels.
_IMAGES, _FEWER_IMAGES = 4, 2
#: Outputs in a row and a column of a cut layer.
_CUT = 9
#: Images in the course, and the most blocks in y and z; blocks that are fewer than a large GPU's multiprocessors.
_COURSE_IMAGES, _MOST_GRID, _FEW_BLOCKS = 10_000, 65_535, 64
#: Ends of a file on a GPU whose place the emulator may find.
_RAN = ("right", "wrong", "crashed", "out_of_bounds", "timed_out")


def add(request: Request, checked: Checked) -> None:
    """Emulate the file once more: with more images, or, where a GPU computed it, for the lines of what is wrong."""
    if checked.result["device"] == "gpu" and checked.result["status"] in _RAN:
        _emulate_gpu_file(request.path, checked)
    elif checked.emulated and checked.right and not request.images:
        smallest = min(checked.problems, key=lambda one: one.flops)
        _try_images(checked.emulated, smallest, _IMAGES, checked)
        deep = [one for one in checked.problems if one.channels > 1]
        if not checked.right or not deep or smallest.channels > 1:
            return
        # A layer of one channel does not show an image's size without C. Most files take smaller maps, which take less
        # time; where they seem wrong, the layer itself decides.
        first = min(deep, key=lambda one: one.flops)
        cut = [_cut(one) for one in checked.problems[: checked.problems.index(first) + 1]]
        cut[-1] = cut[-1].with_batch(_FEWER_IMAGES)
        if any(entry["status"] != RIGHT for entry, _ in emulate(checked.emulated, cut, dict(checked.result))):
            _try_images(checked.emulated, first, _FEWER_IMAGES, checked)


def _cut(problem: ConvProblem) -> ConvProblem:
    most = problem.kernel + _CUT - 1
    return replace(problem, height=min(problem.height, most), width=min(problem.width, most + 1))


def _try_images(program: emulator.Program, problem: ConvProblem, images: int, checked: Checked) -> None:
    """Emulate one of the layers for more images; where it is wrong, that is the verdict."""
    number = checked.problems.index(problem)
    more, text = problem.with_batch(images), for_more(checked.result, images)
    # The layers before it too: a file may count its calls. The second call of a single one has other numbers.
    before = checked.problems[:number] if len(checked.problems) > 1 else checked.problems
    *_, (entry, _) = emulate(program, [*before, more], dict(checked.result))
    if any(one["kind"] == "time" for one in entry["findings"]):
        return
    if entry["status"] != RIGHT and len(checked.problems) == 1:
        *_, (alone, _) = emulate(program, [more], dict(checked.result))
        text = f"right in its first call, and wrong in a later one: {KEPT}" if alone["status"] == RIGHT else text
    update_verdict(checked.result, number, entry, text)
    checked.result["hint"] = stream_hint(checked.result)
    if checked.right:
        few, many = checked.result["layers"][number]["launches"], entry["launches"]
        source = checked.result["source"]
        concurrent = "cudaStreamCreate" in source  # the course's skeleton has one stream
        hints = [*_on_launches(few, many, more, concurrent)]
        if "cudaMalloc" in source and not re.search(r"cudaFree|\bstatic\b|~", source):  # a buffer may be kept
            hints.append("cudaMalloc without cudaFree: each call may take more of the GPU's memory")
        checked.result["hint"] = ". ".join(hints)


def _on_launches(
    few: Sequence[Mapping[str, Any]], many: Sequence[Mapping[str, Any]], problem: ConvProblem, concurrent: bool
) -> Iterator[str]:
    """Yield what is slow or fails about a layer's launches: for one image, and for those of the problem.

    concurrent: whether launches may run at the same time, on streams.
    """
    images = problem.batch
    for one, more in zip(few, many):
        name, threads = one["name"], prod(one["block"])
        idle = -threads % WARP
        if idle > threads / 3 and prod(more["grid"]) > 1:  # one block may be a helper's
            yield f"{name}: blocks of {threads} threads leave {idle} of {threads + idle} lanes idle"
        for axis in (1, 2):
            size = one["grid"][axis] + (more["grid"][axis] - one["grid"][axis]) // (images - 1) * (_COURSE_IMAGES - 1)
            if size > _MOST_GRID:
                said = f"{name}: for {_COURSE_IMAGES} images, gridDim.{'xyz'[axis]} would grow to {size}"
                yield f"{said}; at most {_MOST_GRID} are allowed"
    most, then = (
        max(((prod(one["grid"]), prod(one["block"]), one["name"]) for one in some), default=(0, 0, ""))
        for some in (few, many)
    )
    # With a thread per output, few blocks may be enough for all images.
    few_threads = most[0] * most[1] < prod(problem.y_shape)
    if most == then and 0 < most[0] < _FEW_BLOCKS and few_threads and not concurrent:
        said = f"{most[2]}: the number of blocks is {most[0]} for 1 image and for {images}"
        yield f"{said}; if it does not grow, most of a GPU's multiprocessors are idle"


def _emulate_gpu_file(path: Path, checked: Checked) -> None:
    """Add the emulator's findings and counters for one image per layer, where it can run the file.

    A layer that the file did not come to on the GPU becomes that of the emulator.
    """
    result = checked.result
    shapes: list[LaunchShape] = []
    try:
        cuda_source = emulator.can_emulate() and path.suffix.lower() != ".py"
        emulated = emulate(emulator.compile(path), checked.problems, dict(result)) if cuda_source else ()
        for number, (entry, report) in enumerate(emulated):
            if result["status"] != "timed_out":  # the emulator's own limits say nothing about the file
                entry["findings"] = [one for one in entry["findings"] if one["kind"] not in ("time", "unsupported")]
            if number == len(result["layers"]):
                result["layers"].append({**entry, "note": "as emulated on the CPU"})
            result["layers"][number].update((key, entry[key]) for key in ("findings", "counters", "lines", "hints"))
            shapes += report.launches
    except emulator.CompileError as error:
        for entry in result["layers"]:
            entry["note"] = entry["note"] or f"without counters, since the emulator cannot run it: {error}"
    if checked.right and checked.file:
        result["compiler"] = list(dict.fromkeys(ptxas.lines(checked.file.program.notes, shapes, device_limits())))
