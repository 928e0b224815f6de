"""Calls of fewer images than threads: the threads share the output channels of each image, or the filters of w."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ece408_op.core.kernel import RunCpu
from ece408_op.problem import ConvProblem, DataGradient, WeightGradient
from ece408_op.runtime.thread_pool import parallel_for, thread_count

#: The fewest output channels of a part: fewer would not fill a register tile, and each part copies the image's pixels.
LEAST_CHANNELS = 16


def _cut(problem: ConvProblem, threads: int) -> tuple[ConvProblem, int]:
    """Return the problem of a part, and the number of parts per image; a weight gradient is cut only for one image."""
    whole = problem.batch > 1 if isinstance(problem, WeightGradient) else problem.batch >= threads
    names, least = ["channels" if isinstance(problem, DataGradient) else "filters"], LEAST_CHANNELS
    if problem.groups > 1:
        names, least = ["groups", "channels", "filters"], max(1, LEAST_CHANNELS * problem.groups // problem.filters)
    outputs = getattr(problem, names[0])
    most = 1 if whole else min(threads // problem.batch, outputs // least)
    parts = max((n for n in range(2, most + 1) if outputs % n == 0), default=1)
    sizes = {name: getattr(problem, name) // parts for name in names}
    return replace(problem, **sizes, batch=1) if parts > 1 else problem, parts


def _operands(piece: ConvProblem, arrays: tuple[np.ndarray, ...], image: int, part: int) -> list[np.ndarray]:
    """Return the operands of a part of an image: the channels and filters of that part."""
    found = []
    for name, shape, array in zip(piece.operands, piece.shapes, arrays):
        some = array if name == "w" else array[image : image + 1]
        for axis in range(2):
            if shape[axis] < some.shape[axis]:
                some = some[(slice(None),) * axis + (slice(part * shape[axis], (part + 1) * shape[axis]),)]
        found.append(some)
    return [np.ascontiguousarray(found[0]), np.ascontiguousarray(found[1]), found[2]]


def sharing(
    run: RunCpu, prepare: Callable[[ConvProblem, Any], Any]
) -> tuple[RunCpu, Callable[[ConvProblem, Any], None]]:
    """Return ``run`` and ``prepare`` that also use all threads if there are fewer images than threads.

    The kernel's own ``run`` and ``prepare`` share whole images among threads.
    """

    def run_parts(problem: ConvProblem, a: Any, b: Any, out: Any, threads: int) -> None:
        piece, parts = _cut(problem, threads)
        if parts == 1:
            run(problem, a, b, out, threads)
            return

        def work(number: int) -> None:
            first, second, filled = _operands(piece, (a, b, out), *divmod(number, parts))
            run(piece, first, second, filled, 1)

        parallel_for(work, problem.batch * parts, threads)

    def prepare_parts(problem: ConvProblem, out: Any) -> None:
        piece, parts = _cut(problem, thread_count(problem.flops))
        prepare(piece, out[tuple(map(slice, piece.shapes[2]))] if parts > 1 else out)

    return run_parts, prepare_parts
