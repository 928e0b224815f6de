"""Every GPU kernel on a network's own layers and images: times, speed-ups over naive, errors, shares of the floor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np
from tqdm import tqdm

from ece408_op.core import dispatch, roofline
from ece408_op.core.check import compare
from ece408_op.core.kernel import CudaKernel
from ece408_op.errors import UnsupportedError
from ece408_op.models import inference
from ece408_op.plugin import bridge, op_times
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda, timing

#: Timed calls of each kernel, after one that compiles it.
REPEATS = 5

BASELINE = "naive"


@dataclass(frozen=True)
class Row:
    """One kernel on one layer.

    seconds: the median Op Time; speedup: over ``naive``; roofline_share: the layer's floor over seconds;
    error: the largest |y - float64| as a share of sum |x||w|; reason: why the kernel was not run, the
    figures then are None.
    """

    layer: str
    kernel: str
    precision: str
    right: bool
    seconds: float | None = None
    speedup: float | None = None
    roofline_share: float | None = None
    error: float | None = None
    reason: str = ""


def measure(network: inference.Loaded, images: np.ndarray, context: Any) -> list[Row]:
    """Run every GPU kernel on every ``New`` of the network, in an MXNet context; rows in the order of the layers."""
    ceilings = roofline.measure()
    rows = []
    for layer in inference.layers(network.symbol):
        x, w = inference.run(mx.sym.Group([layer.data, layer.weight]), network, images)
        problem = ConvProblem.from_shapes(x.shape, w.shape)
        kernels = [kernel for name in dispatch.names("gpu") for kernel in [dispatch.find(name)]]
        found = [
            _row(layer, kernel, problem, (x.as_in_context(context), w.as_in_context(context)), ceilings)
            for kernel in tqdm(kernels, desc=layer.name, unit="kernel", disable=None, leave=False)
            if isinstance(kernel, CudaKernel)
        ]
        rows += _with_speedups(found)
    return rows


def _row(layer: inference.Layer, kernel: CudaKernel, problem: ConvProblem, arrays: Any, ceilings: Any) -> Row:
    try:
        dispatch.select(problem, "gpu", kernel.name, chip=cuda.chip(0))
    except UnsupportedError as error:
        return Row(layer.name, kernel.name, kernel.precision, right=True, reason=str(error))
    x, w = arrays
    seconds = []
    for _ in range(1 + REPEATS):
        op_times.clear_op_times()
        y = mx.nd.full(problem.y_shape, np.nan, ctx=mx.cpu()).as_in_context(x.context)
        attributes = {"kernel": layer.attributes["kernel"], "num_filter": layer.attributes["num_filter"]}
        mx.nd.Custom(x, w, op_type="New", impl=kernel.name, device="gpu", out=y, **attributes)
        y.wait_to_read()
        seconds.append(op_times.op_times()[-1].seconds)
    output, data, weight = (bridge.cpu_view(array.as_in_context(mx.cpu())) for array in (y, x, w))
    found = compare(output, data, weight, kernel, images=inference.COMPARED)
    time = timing.summary(seconds[1:]).median
    return Row(
        layer.name,
        kernel.name,
        kernel.precision,
        right=found.passed,
        seconds=time,
        roofline_share=ceilings.roofline_seconds(problem) / time,
        error=found.scaled,
        reason="" if found.passed else str(found),
    )


def _with_speedups(rows: list[Row]) -> list[Row]:
    base = next((row.seconds for row in rows if row.kernel == BASELINE and row.right), None)
    return [
        Row(**{**vars(row), "speedup": base / row.seconds if base and row.seconds and row.right else None})
        for row in rows
    ]


def as_text(rows: list[Row]) -> str:
    """A table for people; no time stands beside a wrong result."""
    head = f"{'layer':8} {'kernel':20} {'precision':9} {'Op Time':>10}"
    lines = [f"{head} {'over naive':>10} {'of floor':>9} {'error':>9}"]
    for row in rows:
        if row.seconds is None or not row.right:
            figures = row.reason
        else:
            speedup = "" if row.speedup is None else f"{row.speedup:.2f} x"
            figures = f"{row.seconds:10.6f} {speedup:>10} {100 * (row.roofline_share or 0):7.1f} % {row.error:9.2g}"
        lines.append(f"{row.layer:8} {row.kernel:20} {row.precision:9} {figures}".rstrip())
    return "\n".join(lines)
