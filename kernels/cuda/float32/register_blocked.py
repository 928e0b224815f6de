"""register_blocked: direct convolution along rows, the fastest plain float32 kernel for several channels.

``register_blocked_uniform`` is the same kernel with its weights in constant memory.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import partial

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import (
    CONSTANT_BYTES,
    Chip,
    CopyToConstant,
    Launch,
    Plan,
    Step,
    ceil_div,
    images_per_launch,
    layer_defines,
)

from ..sources import sources
from . import _register_blocked_tiles as tiles
from ._register_blocked_tiles import RegisterBlockedTile, best_tile

#: The FLOP per call, 0.2 ms on an H200, from which copying the weights to constant memory is profitable; the FLOP per
#: byte from which the float32 lanes limit the kernel, not memory.
_WORTH_COPYING, _RIDGE = 10**10, 15
#: Multiprocessors are not equally fast: some store a third more in the same time. So a grid has _SHARES times as many
#: blocks as the chip holds, or _SHARES_UNIFORM times as many if blocks load no weights, and the fast multiprocessors
#: take more of them. With fewer than _MANY_ITEMS items per resident block, the chip holds the whole grid.
_SHARES, _SHARES_UNIFORM, _MANY_ITEMS = 4, 8, 8


def plan_of(tile: RegisterBlockedTile, problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    """Return the plan for one tile."""
    strips_in_image = problem.output_height * tile.strips_in_row(problem)
    filter_blocks = ceil_div(problem.filters, tile.filters * tile.filter_groups * tile.passes)
    resident_blocks = max(1, chip.multiprocessors * tile.blocks // filter_blocks)

    def steps(images: int) -> tuple[Launch, ...]:
        items = ceil_div(images * strips_in_image, tile.strips)
        shares = 1 if items < _MANY_ITEMS * resident_blocks else _SHARES_UNIFORM if tile.uniform else _SHARES
        grid = (min(items, shares * resident_blocks) * filter_blocks, 1, 1)
        arguments, shared = ("x", "w", "y", "first", "images"), tile.shared_bytes(problem)
        return (Launch("register_blocked", grid, (tile.threads, 1, 1), arguments, shared),)

    setup: tuple[Step, ...] = ()
    scratch = {}
    if tile.uniform:
        scratch["weights"] = size = tile.constant_bytes(problem)
        grid = (ceil_div(size // ITEM_BYTES, 256), 1, 1)
        setup = (
            Launch("register_blocked_weights", grid, (256, 1, 1), ("w", "weights")),
            CopyToConstant("uniform_weights", "weights", size),
        )
    images_per_block = ceil_div(tile.strips, strips_in_image) + 1
    defines = {**layer_defines(problem, images_per_block), "UNIFORM": int(tile.uniform)}
    config = {name: value for name, value in asdict(tile).items() if name != "uniform"}
    whole_vectors = problem.output_height * problem.output_width % 4 == 0 and aligned == 16
    config |= {
        "input_slack": tile.input_slack(problem),
        "store_vector": 4 if tile.exact(problem) and whole_vectors else 1,
    }
    images = images_per_launch(problem.batch, strips_in_image)
    return Plan(defines, images, steps, setup, scratch=scratch, config=config)


def _plan(uniform: bool, problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    # A tile for wide copies may have longer rows, and not fit although the tile for single floats does.
    one = problem.with_batch(1)
    tile = best_tile(one, chip, aligned, uniform) or best_tile(one, chip, 4, uniform)
    assert tile is not None, "_limits refuses a problem without a tile"
    return plan_of(tile, problem, chip, aligned)


def _limits(uniform: bool, problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    one, known = problem.with_batch(1), chip or Chip("any", (5, 0), 1)
    if best_tile(one, known, 4, uniform) is not None:
        return []
    if uniform and best_tile(one, known, 4) is not None:
        return [
            f"weights: expected at most {CONSTANT_BYTES - tiles.RESERVED_BYTES} bytes, and rows of at least "
            f"{tiles.LONG_STRIP} outputs for more than {tiles.CACHED_BYTES} bytes, {tiles.SHORT_STRIP} for fewer; got "
            f"{ITEM_BYTES * math.prod(problem.w_shape)} bytes before padding, rows of {problem.output_width}"
        ]
    return [
        f"shared memory of a block: {known.shared_bytes} bytes do not fit rows of "
        f"{problem.output_width} outputs of K = {problem.kernel}"
    ]


def _copying_pays(problem: ConvProblem, chip: Chip) -> bool:
    """Return whether copying the weights first is profitable: for large layers that memory does not limit, on sm_90."""
    return chip.capability == tiles.UNIFORM_CAPABILITY and problem.flops >= max(_WORTH_COPYING, _RIDGE * problem.bytes)


_SOURCES = sources("vectors.cuh", "float32/register_blocked.cu")
KERNEL = CudaKernel(
    "register_blocked",
    "register-blocked direct convolution along rows: a strip of a row for several filters per thread",
    _SOURCES,
    partial(_plan, False),
    partial(_limits, False),
)
UNIFORM = CudaKernel(
    "register_blocked_uniform",
    "register_blocked with its weights from constant memory in uniform registers",
    _SOURCES,
    partial(_plan, True),
    partial(_limits, True),
    recommended=_copying_pays,
)
