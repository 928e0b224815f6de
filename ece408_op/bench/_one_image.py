"""One image through the operator, beside a Custom operator that does nothing, and a fresh process's first call.

What lies between both is the operator's own cost, the computation included: the rest is MXNet's way of calling Python.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from ece408_op.problem import ConvProblem
from ece408_op.runtime.timing import Times, summary

#: The course's first network, one image.
LAYER = ConvProblem(1, 1, 28, 28, 50, 5)

_IDLE = "ece408_bench_nothing"
_WARMING, _TURNS = 50, 20

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


@dataclass(frozen=True)
class OneImage:
    """Microseconds of a call of the operator and of one that does nothing; seconds of first calls."""

    operator: Times
    nothing: Times
    first_calls: list[float]

    @property
    def extra(self) -> float:
        """Microseconds between the medians."""
        return self.operator.median - self.nothing.median


def measure(context: str, calls: int, processes: int) -> OneImage:
    """Calls of both in turns, by nd.Custom on arrays of the "cpu" or the "gpu", each waited for; then first calls.

    Raises RuntimeError where a fresh process fails.
    """
    import mxnet as mx

    _register_nothing(mx)
    place = mx.gpu() if context == "gpu" else mx.cpu()
    x = mx.nd.random.uniform(shape=LAYER.x_shape).as_in_context(place)
    w = mx.nd.random.uniform(shape=LAYER.w_shape).as_in_context(place)
    mx.nd.waitall()
    ways: dict[str, dict[str, Any]] = {
        "operator": {"op_type": "New", "kernel": (5, 5), "num_filter": LAYER.filters},
        "nothing": {"op_type": _IDLE},
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(_TURNS + 1):
        for name, attributes in ways.items():
            taken = []
            for _ in range(_WARMING if turn == 0 else max(1, calls // _TURNS)):
                start = time.perf_counter()
                mx.nd.Custom(x, w, **attributes).wait_to_read()
                taken.append(1e6 * (time.perf_counter() - start))
            if turn:
                times[name] += taken
    first = [_first_call(context) for _ in range(processes)]
    return OneImage(summary(times["operator"]), summary(times["nothing"]), first)


def _register_nothing(mx: Any) -> None:
    class Nothing(mx.operator.CustomOp):  # type: ignore[misc]
        def forward(self, is_train: Any, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
            """Leave the output as it is."""

    class NothingProp(mx.operator.CustomOpProp):  # type: ignore[misc]
        def list_arguments(self) -> list[str]:
            return ["data", "weight"]

        def infer_shape(self, in_shape: Any) -> Any:
            return in_shape, [list(LAYER.y_shape)], []

        def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Any:
            return Nothing()

    mx.operator.register(_IDLE)(NothingProp)


def _first_call(context: str) -> float:
    done = subprocess.run([sys.executable, "-c", _FIRST_CALL, context], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"expected a fresh process to call the operator, got: {done.stderr.strip()}")
    return float(done.stdout)


def table(result: OneImage, context: str) -> str:
    """Markdown."""
    rows = [["one image of the 2017 layer by nd.Custom", "median, us", "95 % interval, us", "fastest, us"], ["---"] * 4]
    for name, times in ((f"New on the {context}", result.operator), ("a Custom that does nothing", result.nothing)):
        interval = f"{times.low:.0f} to {times.high:.0f}"
        rows.append([name, f"{times.median:.0f}", interval, f"{times.fastest:.0f}"])
    rows.append(["difference", f"{result.extra:.0f}", "", f"{result.operator.fastest - result.nothing.fastest:.0f}"])
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    first = ", ".join(f"{seconds:.3f}" for seconds in result.first_calls)
    return f"{text}\n\nThe first call of a fresh process, imports and arrays done: {first} s."
