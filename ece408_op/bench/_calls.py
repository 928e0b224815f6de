"""Single calls of the operator: one image on either device, and the copies of a large batch to and from a GPU."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ece408_op.core import timer
from ece408_op.core.dispatch import AUTO
from ece408_op.errors import Ece408Error
from ece408_op.problem import COURSE_LAYERS
from ece408_op.runtime import cuda, memory

from .results import FIRST, FRESH, REUSED, Case, Row

#: The peers: a Custom operator that does nothing, and a copy of the output from the GPU without a computation.
NOTHING, BARE_COPY = "empty Custom operator", "bare copy of the output"

#: The layer of both subcommands, by its name in the tables.
_NAME = "2017"

#: The contestants alternate in this many turns, so that a change of the clock rate affects all of them.
_TURNS = 20

#: Fresh processes, each of which times its first call.
PROCESSES = 3

_IDLE = "ece408_bench_nothing"

_FIRST_CALL = """
import sys, time
import ece408_op
import mxnet as mx
context = mx.gpu() if sys.argv[1] == "gpu" else mx.cpu()
x, w = mx.nd.array([[[[1.0] * 28] * 28]], context), mx.nd.array([[[[1.0] * 5] * 5]] * 50, context)
mx.nd.waitall()
start = time.perf_counter()
y = ece408_op.New(x, w, kernel=(5, 5), num_filter=50)
y.wait_to_read()
print(time.perf_counter() - start)
assert (y.asnumpy() == 25).all()
"""


def one_image(device: str, calls: int) -> Case:
    """Return the times of nd.Custom on one image on "cpu" or "gpu", and of a fresh process's first call.

    Each call is waited for. The difference between ``New`` and the Custom operator that does nothing is the operator's
    own cost, including the computation. Raises Ece408Error if a fresh process fails.
    """
    import mxnet as mx

    problem = COURSE_LAYERS[_NAME].with_batch(1)
    _register_nothing(mx, problem.y_shape)
    context = mx.gpu() if device == "gpu" else mx.cpu()
    x, w = (mx.nd.random.uniform(shape=shape).as_in_context(context) for shape in (problem.x_shape, problem.w_shape))
    mx.nd.waitall()
    options = {"op_type": "New", "kernel": (problem.kernel,) * 2, "num_filter": problem.filters}
    both = {"New": partial(_waited, x, w, **options), NOTHING: partial(_waited, x, w, op_type=_IDLE)}
    taken = _in_turns(both, max(1, calls // _TURNS), _TURNS)
    extra = statistics.median(taken["New"]) - statistics.median(taken[NOTHING])
    first = []
    for _ in range(PROCESSES):
        done = subprocess.run([sys.executable, "-c", _FIRST_CALL, device], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Ece408Error(f"expected a fresh process to call the operator, got: {done.stderr.strip()}")
        first.append(float(done.stdout))
    rows = (
        Row("New", FRESH, taken["New"], impl=AUTO, details={"longer_by_ms": 1e3 * extra}),
        Row(NOTHING, FRESH, taken[NOTHING]),
        Row("New", FIRST, tuple(first), impl=AUTO),
    )
    return Case(_NAME, 1, rows, problem)


def _waited(*operands: Any, **options: Any) -> Any:
    """Call nd.Custom and wait; return the output, so that the caller frees it outside the timed call."""
    import mxnet as mx

    output = mx.nd.Custom(*operands, **options)
    output.wait_to_read()
    return output


def _in_turns(calls: Mapping[str, Callable[[], Any]], repeats: int, turns: int) -> dict[str, tuple[float, ...]]:
    taken: dict[str, tuple[float, ...]] = dict.fromkeys(calls, ())
    for _ in range(turns):
        for name, call in calls.items():
            taken[name] += timer.measure(call, timer.cpu_clock, repeats=repeats).seconds
    return taken


def _register_nothing(mx: Any, shape: tuple[int, ...]) -> None:
    class Nothing(mx.operator.CustomOp):  # type: ignore[misc]
        def forward(self, is_train: Any, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
            """Leave the output as it is."""

    class NothingProp(mx.operator.CustomOpProp):  # type: ignore[misc]
        def list_arguments(self) -> list[str]:
            return ["data", "weight"]

        def infer_shape(self, in_shape: Any) -> Any:
            return in_shape, [list(shape)], []

        def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Any:
            return Nothing()

    mx.operator.register(_IDLE)(NothingProp)


def transfers(impl: str, images: int, repeats: int) -> Case:
    """Return the times of the operator on mx.cpu() arrays with device="gpu", and of a bare copy of its output.

    The copy uses the same staging buffers. Both write into memory that was never touched (FRESH), and into memory that
    was written before (REUSED).
    """
    import mxnet as mx

    from ece408_op.plugin import host_context, op_times

    problem = COURSE_LAYERS[_NAME].with_batch(images)
    rng = np.random.default_rng(0)
    x, w = (mx.nd.array(rng.standard_normal(shape, np.float32)) for shape in (problem.x_shape, problem.w_shape))
    source, gpu = cuda.cupy().zeros(problem.y_shape, np.float32), host_context.gpu()
    options = {"op_type": "New", "kernel": (problem.kernel,) * 2, "num_filter": problem.filters}
    new = partial(_waited, x, w, **options, impl=impl, device="gpu")
    kept, out = np.ones(problem.y_shape, np.float32), mx.nd.ones(problem.y_shape)
    out.wait_to_read()

    def copy(target: np.ndarray) -> np.ndarray:
        memory.advise_huge_pages(target)
        with gpu.lock:
            gpu.copy_out(source.data.ptr, target)
        return target

    calls: dict[str, dict[str, Callable[[], Any]]] = {
        FRESH: {BARE_COPY: lambda: copy(np.empty(problem.y_shape, np.float32)), "New": new},
        REUSED: {BARE_COPY: lambda: copy(kept), "New": partial(new, out=out)},
    }
    rows = []
    for kind, both in calls.items():
        op_times.clear_op_times()
        taken = _in_turns(both, repeats, turns=3)
        op_time = statistics.median(call.seconds for call in op_times.op_times())
        rows.append(Row("New", kind, taken["New"], impl=impl, details={"op_time_ms": 1e3 * op_time}))
        rows.append(Row(BARE_COPY, kind, taken[BARE_COPY]))
    return Case(_NAME, images, tuple(rows), problem)
