"""The sweep: time every GPU kernel on many layers, and write the tuning table, which chooses kernels and tiles."""

from __future__ import annotations

from ece408_op.core import dispatch, tuning
from ece408_op.core.kernel import CudaKernel, roofline_milliseconds
from ece408_op.data.atomic import write_text
from ece408_op.problem import COURSE_LAYERS, ConvProblem
from ece408_op.runtime import cuda

from ._layer_names import name_of, random_layers
from .results import Results

#: Divisors of the number of images: the best kernel for many images is not the best for few.
_FEWER = (1, 100, 1000)

#: Random layers come from these ranges in turn: kernels differ most on layers with few channels and filters.
RANGES = (((1, 4), (1, 16), (1, 11)), ((4, 16), (8, 64), (1, 11)), ((16, 64), (16, 256), (1, 11)))


def layers(images: int, count: int, seed: int) -> dict[str, ConvProblem]:
    """Return the course's layers with ``images`` and with fewer images, and ``count`` random layers."""
    batches = dict.fromkeys(max(1, images // times) for times in _FEWER)
    found = {f"{name}, {n} images": layer.with_batch(n) for n in batches for name, layer in COURSE_LAYERS.items()}
    return {**found, **random_layers(count, seed, RANGES, images)}


def recorded() -> dict[str, ConvProblem]:
    """Return this GPU's layers in the tuning table; raises ValueError if there are none."""
    name = cuda.chip().name
    rows = [row.problem for table in tuning.read(tuning.TABLE) if table.chip == name for row in table.layers]
    if not rows:
        raise ValueError(f"--again: expected layers of this GPU, {name}, in {tuning.TABLE}, got none")
    return {f"{name_of(problem)}, {problem.batch} images": problem for problem in rows}


def record(results: Results) -> None:
    """Write the times into the tuning table; kernels without new results keep their times."""
    chip = cuda.chip()
    rows = []
    for case in results.cases:
        times = {row.kernel: 1e3 * row.median for row in case.rows if row.median}
        kernels = [kernel for kernel in map(dispatch.find, times) if isinstance(kernel, CudaKernel)]
        if case.problem is not None and times:
            predicted = {
                kernel.name: kernel.predicted_milliseconds(case.problem, chip)
                for kernel in kernels
                if kernel.predicted_milliseconds is not roofline_milliseconds
            }
            tiles = {row.kernel: row.details["tile"] for row in case.rows if row.details.get("tile")}
            rows.append(tuning.LayerTimes(case.problem, times, predicted, tiles))
    table = tuning.ChipTable(chip.name, chip.capability, tuple(rows))
    write_text(tuning.TABLE, tuning.merged(tuning.read(tuning.TABLE), table))
    tuning.read.cache_clear()
    dispatch.forget_choices()
