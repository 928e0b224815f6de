"""A user's own file in place of a kernel: compiled, run in a process, and called by the operator."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from ece408_op.core import dispatch
from ece408_op.core.kernel import EPS16, CpuKernel, float32_bound, reduced_precision_bound
from ece408_op.errors import Ece408Error
from ece408_op.models import shapes
from ece408_op.problem import ConvProblem
from ece408_op.submission import runner


@contextmanager
def own_file(options: argparse.Namespace, network: shapes.NetworkInfo) -> Iterator[str]:
    """Compile the user's file and start processes that run it; gives its name for ``impl``.

    At the end, what the file printed goes to stderr.
    """
    from ece408_op.models.inference import VERIFY_STEP

    layers = [ConvProblem.from_shapes(one.x, one.w) for one in network.convolutions if _is_plain(one)]
    if not layers:
        raise Ece408Error(f"{network.network.name}: expected a convolution that a file can compute, without attributes")
    verified = {min(options.size, VERIFY_STEP), options.size % VERIFY_STEP} if options.verify else set()
    file = runner.compile_file(options.impl)
    with ExitStack() as stack:
        # Here and not at the first call: MXNet's threads must not start processes.
        sessions = {
            batch: stack.enter_context(runner.Session(file, [layer.with_batch(batch) for layer in layers]))
            for batch in {options.size, *verified} - {0}
        }
        try:
            with dispatch.added(_kernel(file, sessions, options.precision)):
                yield file.path.name
        finally:
            print("".join(session.printed for session in sessions.values()), end="", file=sys.stderr)


def _is_plain(layer: shapes.ConvLayer) -> bool:
    """Return whether a convolution is 2-D, with square filters, one group, and no stride, padding or dilation."""
    (_, channels, *image), (_, own_channels, *filters) = layer.x, layer.w
    outputs = tuple(size - filters[0] + 1 for size in image)
    return channels == own_channels and len(filters) == 2 and filters[0] == filters[1] and layer.y[2:] == outputs


def _kernel(file: runner.File, sessions: Mapping[int, runner.Session], precision: str) -> CpuKernel:
    """Return a kernel, called as the file, that computes in these processes, by their number of images.

    Its arrays are NumPy's also where the file computes on a GPU: the process copies them there and back. ``precision``
    is the one that its error bound allows, "float32" or less.
    """

    def run(problem: ConvProblem, x: Any, w: Any, out: Any, threads: int) -> float:
        session = sessions[problem.batch]
        layer = session.problems.index(problem)
        seconds = session.call(layer, x, w)
        out[...] = session.output(layer)
        return seconds

    def limits(problem: ConvProblem) -> list[str]:
        known = problem.batch in sessions and problem in sessions[problem.batch].problems
        return [] if known else ["its process has no arrays for this layer"]

    bound = float32_bound if precision == "float32" else reduced_precision_bound(EPS16, EPS16)
    name, summary = file.path.name, f"the user's own file {file.path}"
    return CpuKernel(name, summary, run, limits=limits, device=file.device, precision=precision, error_bound=bound)
