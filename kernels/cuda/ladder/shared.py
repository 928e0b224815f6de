"""Tiles in shared memory, then weights in constant memory, then unrolled loops: three rungs of the course."""

from __future__ import annotations

from pathlib import Path

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import (
    Chip,
    CopyToConstant,
    Launch,
    Plan,
    Tile,
    ceil_div,
    constant_reasons,
    grid_reasons,
    images_per_launch,
    input_tile,
    layer_defines,
)

_FOLDER = Path(__file__).parent
_THREADS = 256
#: Output pixels of a tile: four for each thread.
_PIXELS = 4 * _THREADS
#: Shared memory for the filter of `shared`, in bytes, where it does not fit as a whole.
_FILTER_BYTES = 8192


def _filter_channels(problem: ConvProblem) -> int:
    return max(1, min(problem.channels, _FILTER_BYTES // (ITEM_BYTES * problem.kernel**2)))


def _kernel(name: str, summary: str, entry: str, weights_in_constant: bool) -> CudaKernel:
    def tile_of(problem: ConvProblem) -> Tile | None:
        filter_bytes = 0 if weights_in_constant else ITEM_BYTES * _filter_channels(problem) * problem.kernel**2
        return input_tile(problem, _PIXELS, filter_bytes)

    def blocks(problem: ConvProblem, tile: Tile) -> int:
        return ceil_div(problem.output_height, tile.rows) * ceil_div(problem.output_width, tile.columns)

    def reasons(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
        found = constant_reasons(problem) if weights_in_constant else []
        tile = tile_of(problem)
        if tile is None:
            window = ITEM_BYTES * problem.products
            return [*found, f"one window of all channels: at most the 48 KB of shared memory, got {window} bytes"]
        return found + grid_reasons(blocks(problem, tile))

    def plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
        tile = tile_of(problem)
        assert tile is not None, "a problem without a tile is not supported"
        defines = {**layer_defines(problem), "THREADS": _THREADS, "TILE_H": tile.rows, "TILE_W": tile.columns}
        arguments: tuple[str, ...] = ("x", "w", "y", "first")
        before: tuple[CopyToConstant, ...] = ()
        if weights_in_constant:
            arguments = ("x", "y", "first")
            before = (CopyToConstant("weights", "w", ITEM_BYTES * problem.filters * problem.products),)
        else:
            defines["FILTER_C"] = _filter_channels(problem)

        def steps(images: int) -> tuple[Launch, ...]:
            return (Launch(entry, (blocks(problem, tile) * images, 1, 1), (_THREADS, 1, 1), arguments),)

        return Plan(defines, images_per_launch(problem.batch, blocks(problem, tile)), steps, before)

    sources = tuple(_FOLDER / file for file in ("../layer.cuh", "tile.cuh", f"{name}.cu"))
    return CudaKernel(name, summary, sources, plan, reasons)


SHARED = _kernel("shared", "the image's tile and one filter at a time in shared memory", "shared_tile", False)
CONSTANT = _kernel("constant", "the tile in shared memory, the filters in constant memory", "constant_weights", True)
UNROLLED = _kernel("unrolled", "constant with its inner loops unrolled", "unrolled", True)
