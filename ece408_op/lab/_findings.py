"""After the verdict: what the emulator finds and counts for the same file, and what the compiler reports on it."""

from __future__ import annotations

from ece408_op import emulator
from ece408_op.runtime import ptxas
from ece408_op.runtime.occupancy import LaunchShape, device_limits

from ._check import Checked, Request, emulate, for_more, update_verdict

#: Images of the smallest layer in the emulator, behind the first verdict.
_IMAGES = 4
#: Ends of a file on a GPU whose place the emulator may find.
_RAN = ("right", "wrong", "crashed", "out_of_bounds", "timed_out")


def add(request: Request, checked: Checked) -> None:
    """Emulate the file once more: with more images, or, where a GPU computed it, for the lines of what is wrong."""
    if checked.result["device"] == "gpu" and checked.result["status"] in _RAN:
        _emulate_gpu_file(checked)
    elif checked.emulated and checked.right and not request.images:
        # The layers before it too: a file may count its calls.
        number = checked.problems.index(min(checked.problems, key=lambda one: one.flops))
        some = [*checked.problems[:number], checked.problems[number].with_batch(_IMAGES)]
        *_, (entry, _) = emulate(checked.emulated, some, dict(checked.result))
        if not any(one["kind"] == "time" for one in entry["findings"]):
            update_verdict(checked.result, len(some) - 1, entry, for_more(checked.result, _IMAGES))


def _emulate_gpu_file(checked: Checked) -> None:
    """Add the emulator's findings and counters for one image per layer, where it can run the file.

    A layer that the file did not come to on the GPU becomes that of the emulator.
    """
    result = checked.result
    shapes: list[LaunchShape] = []
    try:
        cuda_source = emulator.can_emulate() and checked.path.suffix.lower() != ".py"
        emulated = emulate(emulator.compile(checked.path), checked.problems, dict(result)) if cuda_source else ()
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
