"""depthwise: convolutions with one group per channel and their gradients, near the memory roofline.

``depthwise.cu`` says how a thread computes its column.
"""

from __future__ import annotations

import numpy as np

from ece408_op.core.kernel import CudaKernel, float32_bound, sum_bound
from ece408_op.problem import ATTRIBUTES, DATA_GRADIENT, WEIGHT_GRADIENT, ConvProblem, DataGradient, WeightGradient
from ece408_op.runtime.launch import Chip, Plan, ceil_div, one_launch, round_up

from ..sources import sources
from . import partial_sums

_THREADS = 128
#: Rows per thread: more rows reuse each load more often, fewer rows give small images enough threads.
_ROWS = 8
#: The most taps of a filter: a thread has a sum per tap, and its code has a multiply-add per tap and row.
_MOST_TAPS = 49
#: The desired number of blocks of a weight gradient, about eight per multiprocessor of a large GPU; the fewest items of
#: a thread.
_BLOCKS, _FEWEST_ITEMS = 1056, 4
#: The most items of a share, which 32 bits count, with a thread's next item beyond them.
_MOST_ITEMS = 2**31 - 1 - _THREADS


def _rows(problem: ConvProblem) -> int:
    """Return the rows per thread; for a data gradient, a multiple of the stride."""
    if isinstance(problem, DataGradient):
        return round_up(min(_ROWS, problem.height), problem.stride[0])
    return min(_ROWS, problem.output_height)


def _shares(problem: ConvProblem) -> tuple[int, int, int]:
    """Return a weight gradient's work items per map, for all images; its number of shares; the items per share."""
    items = problem.batch * ceil_div(problem.output_height, _rows(problem)) * problem.output_width
    shares = min(ceil_div(_BLOCKS, problem.filters), partial_sums.most_partials(problem))
    length = max(ceil_div(items, shares), _FEWEST_ITEMS * _THREADS)
    return items, max(1, ceil_div(items, length)), length


def _bound(problem: ConvProblem) -> float:
    """Return the error bound; a weight gradient's sums have four levels: thread, warp, block and shares."""
    if not isinstance(problem, WeightGradient):
        return float32_bound(problem)
    _, shares, length = _shares(problem)
    return sum_bound(ceil_div(length, _THREADS) * _rows(problem) + 5 + _THREADS // 32 + shares)


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    reasons = []
    if problem.groups != problem.channels:
        reasons.append(f"groups: expected one per channel, {problem.channels}, got {problem.groups}")
    if problem.kernel * problem.kernel_width > _MOST_TAPS or problem.stride[0] > _ROWS:
        size = f"{problem.kernel} x {problem.kernel_width}, stride {problem.stride[0]}"
        reasons.append(f"kernel: at most {_MOST_TAPS} taps and stride {_ROWS}, got {size}")
    elif isinstance(problem, WeightGradient) and _shares(problem)[2] > _MOST_ITEMS:
        reasons.append(f"images: at most {_MOST_ITEMS} work items of a share, got {_shares(problem)[2]}")
    return reasons


def _plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    rows = _rows(problem)
    config = {"rows": rows, "threads": _THREADS, "data_gradient": isinstance(problem, DataGradient)}
    if isinstance(problem, WeightGradient):
        items, shares, length = _shares(problem)
        numbers, blocks = (np.int64(items), np.int32(length)), shares * problem.filters
        return partial_sums.plan(problem, "depthwise_weights", blocks, _THREADS, numbers, shares, config)

    maps, (height, width) = problem.shapes[2][1], problem.shapes[2][2:]
    items = maps * ceil_div(height, rows) * width
    arguments = (problem.operands[0], "w", problem.operands[2], "first", "images")
    return one_launch(problem, "depthwise", lambda n: ceil_div(n * items, _THREADS), _THREADS, config, arguments)


KERNEL = CudaKernel(
    "depthwise",
    "one group per channel, forward and both gradients: a thread per column, near the memory roofline",
    sources("float32/partial_sums.cuh", "float32/depthwise.cu"),
    _plan,
    _limits,
    features=ATTRIBUTES | {DATA_GRADIENT, WEIGHT_GRADIENT},
    error_bound=_bound,
)
