"""The second launch of a weight gradient: ``partial_sums.cuh`` adds the sums of the first launch's blocks."""

from __future__ import annotations

import math

import numpy as np

from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import SCRATCH_BYTES, Launch, ceil_div

_THREADS, _WEIGHTS_OF_BLOCK = 512, 32


def most_partials(problem: ConvProblem) -> int:
    """Return how many arrays of the weights' size fit the scratch memory, at least 1."""
    return max(1, SCRATCH_BYTES // (ITEM_BYTES * math.prod(problem.w_shape)))


def target(count: int) -> str:
    """Return the buffer that the first launch fills: a single sum needs no second launch."""
    return "w" if count == 1 else "partials"


def scratch(problem: ConvProblem, count: int) -> dict[str, int]:
    """Return the scratch memory for ``count`` sums per weight."""
    return {} if count == 1 else {"partials": ITEM_BYTES * count * math.prod(problem.w_shape)}


def launches(problem: ConvProblem, count: int) -> tuple[Launch, ...]:
    """Return the launch that adds ``count`` sums per weight; none for a single sum."""
    if count == 1:
        return ()
    grid = (ceil_div(math.prod(problem.w_shape), _WEIGHTS_OF_BLOCK), 1, 1)
    return (Launch("sum_partials", grid, (_THREADS, 1, 1), ("partials", "w", np.int32(count))),)
