"""Which GPU kernel is fastest for a layer: a small table of measured times, read from data.

``choices.json`` has, for each chip that ``python -m ece408_op.sweep`` was run on, the median time of every kernel on
some layers. A layer that was not measured is taken to be like the nearest that was.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from .errors import DataError
from .launch import Chip
from .problem import ConvProblem

TABLE = Path(__file__).with_name("choices.json")
SIZES = ("batch", "channels", "height", "width", "filters", "kernel")


@dataclass(frozen=True)
class Measured:
    """The times of kernels on one layer, in milliseconds, by kernel name."""

    problem: ConvProblem
    milliseconds: dict[str, float]

    @property
    def order(self) -> list[str]:
        """The kernels' names, the fastest first."""
        return sorted(self.milliseconds, key=lambda name: self.milliseconds[name])


@dataclass(frozen=True)
class ChipTable:
    """What was measured on one chip."""

    chip: str
    capability: tuple[int, int]
    layers: tuple[Measured, ...]


def preference(problem: ConvProblem, chip: Chip, path: Path = TABLE) -> list[str]:
    """The names of the measured kernels, the fastest on the nearest measured layer first; empty with no table.

    Behind them stand those that were measured on the next nearest layer alone, and so on.
    A chip that was not measured is taken to be like one of its own architecture, and else like the first of the table.
    Raises DataError where the table cannot be read.
    """
    tables = read(path)
    if not tables or not any(table.layers for table in tables):
        return []
    near = (
        [table for table in tables if table.chip == chip.name]
        or [table for table in tables if table.capability == chip.capability]
        or [table for table in tables if table.capability[0] == chip.capability[0]]
        or list(tables)
    )
    rows = sorted(near[0].layers, key=lambda row: distance(row.problem, problem))
    return list(dict.fromkeys(name for row in rows for name in row.order))


def distance(a: ConvProblem, b: ConvProblem) -> float:
    """How different two layers are to a kernel: ratios of what decides between kernels, as logarithms."""
    return math.dist(_figures(a), _figures(b))


def _figures(problem: ConvProblem) -> list[float]:
    pixels = problem.output_height * problem.output_width
    sizes = (problem.channels, problem.kernel, problem.filters, problem.output_width, problem.batch * pixels)
    # Batches count least: a kernel that is best for 1,000 images mostly is for 10,000.
    weights = (1.0, 2.0, 1.0, 0.5, 0.25)
    return [weight * math.log2(max(1, size)) for weight, size in zip(weights, sizes)]


@lru_cache(maxsize=8)
def read(path: Path) -> tuple[ChipTable, ...]:
    """The tables of a file, none where there is no file; raises DataError where it is not such a table."""
    try:
        chips = json.loads(path.read_text(encoding="utf-8"))["chips"]
        return tuple(
            ChipTable(
                chip["name"],
                (int(chip["capability"][0]), int(chip["capability"][1])),
                tuple(
                    Measured(ConvProblem(*row["layer"]), {name: float(ms) for name, ms in row["milliseconds"].items()})
                    for row in chip["layers"]
                ),
            )
            for chip in chips
        )
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: expected a table written by python -m ece408_op.sweep, got {error!r}") from error


def merged(tables: tuple[ChipTable, ...], new: ChipTable) -> str:
    """The tables as the file's text, the new one's layers in the place of the same chip's."""
    timed = {row.problem for row in new.layers}
    old = [row for table in tables if table.chip == new.chip for row in table.layers if row.problem not in timed]
    new = replace(new, layers=(*new.layers, *old))
    kept = [table for table in tables if table.chip != new.chip]
    chips = [
        {
            "name": table.chip,
            "capability": list(table.capability),
            "layers": [
                {
                    "layer": [getattr(row.problem, size) for size in SIZES],
                    "milliseconds": {name: round(row.milliseconds[name], 4) for name in row.order},
                }
                for row in table.layers
            ],
        }
        for table in [new, *kept]
    ]
    # One layer a line: the file is read by people too.
    text = json.dumps({"chips": chips})
    return text.replace('{"name"', '\n{"name"').replace('{"layer"', '\n  {"layer"') + "\n"
