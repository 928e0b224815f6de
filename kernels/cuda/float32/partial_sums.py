"""Weight gradients in two launches: blocks add shares of the images, and ``partial_sums.cuh`` adds their sums."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import SCRATCH_BYTES, Argument, Launch, Plan, ceil_div, layer_defines

_THREADS, _WEIGHTS_OF_BLOCK = 512, 32


def most_partials(problem: ConvProblem) -> int:
    """Return the number of arrays of the weights' size that fit the scratch memory, at least 1."""
    return max(1, SCRATCH_BYTES // (ITEM_BYTES * math.prod(problem.w_shape)))


def plan(
    problem: ConvProblem,
    entry: str,
    blocks: int,
    threads: int,
    numbers: tuple[Argument, ...],
    count: int,
    config: Mapping[str, bool | int | float],
    shared: int = 0,
) -> Plan:
    """Return the plan of a weight gradient, all images in one launch.

    Args:
        entry, blocks, threads, shared: the first launch, which fills ``count`` arrays of partial sums. Its arguments
            are x, y, the arrays and the ``numbers``. If there is one array, it is w itself, and no launch follows.
    """
    arguments = ("x", "y", "w" if count == 1 else "partials", *numbers)
    steps, scratch = [Launch(entry, (blocks, 1, 1), (threads, 1, 1), arguments, shared)], {}
    if count > 1:
        weights = math.prod(problem.w_shape)
        scratch["partials"] = ITEM_BYTES * count * weights
        grid = (ceil_div(weights, _WEIGHTS_OF_BLOCK), 1, 1)
        steps.append(Launch("sum_partials", grid, (_THREADS, 1, 1), ("partials", "w", np.int32(count))))
    images = max(1, problem.batch)
    return Plan(layer_defines(problem), images, lambda images: tuple(steps), scratch=scratch, config=config)
