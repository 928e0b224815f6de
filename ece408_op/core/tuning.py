"""The tuning table: measured times, from which the time of each GPU kernel on a layer is predicted.

``tuning.json`` has, for each chip on which ``ece408-bench sweep`` has recorded it, the median time of every kernel on
some layers, and the tile of kernels that have several. For another layer, a kernel's own prediction is scaled by its
ratio of measured to predicted times on the nearest of those.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.errors import DataError
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip

from .kernel import CudaKernel, forget_programs, roofline_milliseconds
from .timer import gpu_clock

TABLE = Path(__file__).with_name("tuning.json")
#: How many of the nearest measured layers predict a time. When each of the H200's layers is left out of the table, the
#: chosen kernel takes 1.053 times as long as the fastest, in geometric mean; 1.083 times by the nearest layer alone,
#: and 1.079 times without the kernels' own predictions.
_NEAREST = 6
#: ``tune`` tries no further tile once its timed calls have taken these seconds.
_TUNING_SECONDS = 0.05
#: The most bytes of the arrays that ``tune_once`` makes.
_TUNED_BYTES = 1 << 30


@dataclass(frozen=True)
class LayerTimes:
    """The measurements of one layer, by kernel name.

    milliseconds: times. estimates: predictions of the kernels that have their own; that of the others is
    ``kernel.roofline_milliseconds``. tiles: the fastest tile of the kernels that have several.
    """

    problem: ConvProblem
    milliseconds: dict[str, float]
    estimates: dict[str, float] = field(default_factory=dict)
    tiles: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def order(self) -> list[str]:
        """Return the kernels' names, the fastest first."""
        return sorted(self.milliseconds, key=lambda name: self.milliseconds[name])


@dataclass(frozen=True)
class ChipTable:
    """The measurements on one chip."""

    chip: str
    capability: tuple[int, ...]
    layers: tuple[LayerTimes, ...]

    @cached_property
    def tiles(self) -> dict[tuple[str, ConvProblem], dict[str, int]]:
        """The recorded tiles, by kernel and layer, with one image; the first one counts."""
        rows = [(row.problem.with_batch(1), row.tiles) for row in reversed(self.layers)]
        return {(name, layer): tile for layer, tiles in rows for name, tile in tiles.items()}


def ranked_by_time(
    problem: ConvProblem, chip: Chip, names: Iterable[str], estimate: Callable[[str], float], path: Path = TABLE
) -> list[str]:
    """Return the measured ones of the names, the fastest first by predicted time; empty without a table.

    A kernel measured on this very layer has its time there; ``estimate`` returns a kernel's own prediction. A chip
    without measurements uses those of a chip of its architecture, or else the first ones of the table, and a warning
    says so once per process. Raises DataError where the table cannot be read.
    """
    tables = read(path)
    if not tables or not any(table.layers for table in tables):
        return []
    near = _nearest_chips(tables, chip)[0]
    if near.chip != chip.name:
        _warn_of_other_chip(chip.name, near.chip)
    rows = sorted(near.layers, key=lambda row: distance(row.problem, problem))
    measured = [name for name in names if any(name in row.milliseconds for row in rows)]
    return sorted(measured, key=lambda name: _expected(name, problem, chip, rows, estimate(name)))


def _nearest_chips(tables: tuple[ChipTable, ...], chip: Chip) -> list[ChipTable]:
    """Return the tables, that of the chip first, then those of its compute capability, then of its major version."""

    def unlike(table: ChipTable) -> tuple[bool, bool, bool]:
        major = table.capability[0] != chip.capability[0]
        return table.chip != chip.name, table.capability != chip.capability, major

    return sorted(tables, key=unlike)


def recorded_tile(name: str, problem: ConvProblem, chip: Chip, path: Path = TABLE) -> Mapping[str, int]:
    """Return the tile with which a kernel was fastest on a layer, of any batch; empty where none is recorded.

    A tile has the values, by name, in which the kernel's candidates differ. A tile of ``use_tile`` comes first.
    """
    layer = problem.with_batch(1)
    used = _tuned_tiles.get((name, layer, chip.name))
    if used is not None:
        return used
    return next((t.tiles[name, layer] for t in _nearest_chips(read(path), chip) if (name, layer) in t.tiles), {})


#: Tiles that were measured in this process.
_tuned_tiles: dict[tuple[str, ConvProblem, str], Mapping[str, int]] = {}


def use_tile(name: str, problem: ConvProblem, chip: Chip, tile: Mapping[str, int]) -> None:
    """Have a kernel take this tile for a layer, any batch, in this process."""
    _tuned_tiles[name, problem.with_batch(1), chip.name] = tile
    forget_programs()


def tune(kernel: CudaKernel, problem: ConvProblem, x: Any, w: Any, out: Any) -> Mapping[str, int]:
    """Time each of the kernel's tiles; the process takes the fastest for this layer from now on. Fills out.

    The arrays are those of ``kernel.run``. Each tile has a call that compiles and two timed ones; after 50 ms of timed
    calls no further tile is tried. Returns the tile, empty for kernels without a choice.
    """
    chip, clock = cuda.chip(x.device.id), gpu_clock(kernel.name)
    aligned = cuda.alignment(*(array.data.ptr for array in (x, w, out)))
    best: Mapping[str, int] = {}
    spent, fastest = 0.0, math.inf
    before = recorded_tile(kernel.name, problem, chip)
    try:
        for tile in kernel.tiles(problem, chip, aligned):
            use_tile(kernel.name, problem, chip, tile)
            kernel.run(problem, x, w, out)
            seconds = [clock(lambda: kernel.run(problem, x, w, out))[0] for _ in range(2)]
            if min(seconds) < fastest:
                best, fastest = tile, min(seconds)
            spent += sum(seconds)
            if spent > _TUNING_SECONDS:
                break
    finally:
        # Not a tile that failed.
        use_tile(kernel.name, problem, chip, best or before)
    return best


@lru_cache(maxsize=1024)
def tune_once(kernel: CudaKernel, problem: ConvProblem, device: int) -> None:
    """Call ``tune`` with random arrays on that GPU, for as many of the problem's images as _TUNED_BYTES holds."""
    images = max(1, _TUNED_BYTES // max(1, problem.with_batch(1).bytes))
    problem = problem.with_batch(min(problem.batch, images))
    if kernel.tiles(problem, cuda.chip(device), 4):
        with cuda.on(device), cuda.reported(kernel.name):
            cupy = cuda.cupy()
            x, w = (cupy.random.random(shape, dtype=np.float32) for shape in problem.shapes[:2])
            tune(kernel, problem, x, w, cupy.empty(problem.shapes[2], np.float32))


@cache
def _warn_of_other_chip(name: str, other: str) -> None:
    warnings.warn(
        f"impl='auto': there is no tuning table of the {name}; the kernel is chosen by times of the {other}. "
        "Run ece408-bench sweep --random 24 --record",
        stacklevel=2,
    )


def _expected(name: str, problem: ConvProblem, chip: Chip, rows: list[LayerTimes], estimate: float) -> float:
    """Return a kernel's predicted milliseconds, from rows with the nearest first."""
    near = [row for row in rows if name in row.milliseconds][:_NEAREST]
    if near[0].problem == problem:
        return near[0].milliseconds[name]
    # The geometric mean of the ratios of measured to predicted times, weighted by 1 / distance^2.
    weights = [1 / max(distance(row.problem, problem), 1e-3) ** 2 for row in near]
    predicted = [row.estimates.get(name, roofline_milliseconds(row.problem, chip)) for row in near]
    logarithms = [math.log(row.milliseconds[name] / one) for row, one in zip(near, predicted)]
    return estimate * math.exp(sum(weight * one for weight, one in zip(weights, logarithms)) / sum(weights))


def distance(a: ConvProblem, b: ConvProblem) -> float:
    """Return how different two layers are to a kernel: a distance of the logarithms of the sizes that matter."""
    return math.dist(_figures(a), _figures(b))


def _figures(problem: ConvProblem) -> list[float]:
    pixels = problem.batch * problem.output_height * problem.output_width
    sizes = (problem.channels, problem.kernel, problem.filters, problem.output_width, pixels)
    # Halving or doubling a weight changes the figure at _NEAREST by at most 1 %. Batches count least: the kernel that
    # is best for 1,000 images mostly is the best for 10,000 too.
    weights = (1.0, 2.0, 1.0, 0.5, 0.25)
    return [weight * math.log2(max(1, size)) for weight, size in zip(weights, sizes)]


@lru_cache(maxsize=8)
def read(path: Path) -> tuple[ChipTable, ...]:
    """Return the tables of a file, none where there is no file; raises DataError where it is not such a table."""
    try:
        chips = json.loads(path.read_text(encoding="utf-8"))["chips"]
        return tuple(
            ChipTable(chip["name"], tuple(map(int, chip["capability"])), tuple(map(_measured, chip["layers"])))
            for chip in chips
        )
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: expected a table written by ece408-bench sweep, got {error!r}") from error


def _measured(row: dict[str, Any]) -> LayerTimes:
    times, estimates = row["milliseconds"], row.get("estimates", {})
    if not all(0 < ms < math.inf for ms in (*times.values(), *estimates.values())):
        raise ValueError(f"milliseconds: expected finite numbers above 0, got {times} and {estimates}")
    return LayerTimes(ConvProblem(*row["layer"]), times, estimates, row.get("tiles", {}))


def merged(tables: tuple[ChipTable, ...], new: ChipTable) -> str:
    """Return the file's text for the tables with the new one's times; times of other kernels are kept."""
    layers = {row.problem: row for row in new.layers}
    for row in (row for table in tables if table.chip == new.chip for row in table.layers):
        newer = layers.get(row.problem, row)
        times, estimates = {**row.milliseconds, **newer.milliseconds}, {**row.estimates, **newer.estimates}
        layers[row.problem] = LayerTimes(row.problem, times, estimates, {**row.tiles, **newer.tiles})
    chips = [replace(new, layers=tuple(layers.values())), *(table for table in tables if table.chip != new.chip)]

    def rounded(row: LayerTimes, times: dict[str, float]) -> dict[str, float]:
        return {name: round(times[name], 4) for name in row.order if name in times}

    data = [
        {
            "name": table.chip,
            "capability": list(table.capability),
            "layers": [
                {
                    "layer": list(row.problem.sizes.values()),
                    "milliseconds": rounded(row, row.milliseconds),
                    "estimates": rounded(row, row.estimates),
                    "tiles": {name: row.tiles[name] for name in row.order if name in row.tiles},
                }
                for row in table.layers
            ],
        }
        for table in chips
    ]
    # One layer per line: people read the file too.
    text = json.dumps({"chips": data})
    return text.replace('{"name"', '\n{"name"').replace('{"layer"', '\n  {"layer"') + "\n"
