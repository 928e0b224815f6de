"""m4.py --impl all: every GPU kernel on a network's own layers and images."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from tqdm import tqdm

from ece408_op.bench import layers
from ece408_op.bench.results import KERNEL, Case
from ece408_op.core import dispatch, roofline
from ece408_op.models import inference
from ece408_op.plugin import bridge
from ece408_op.runtime import cuda

#: The kernel that speed-ups refer to.
BASELINE = "naive"

_REPEATS = 5


def measure(network: inference.Loaded, images: np.ndarray) -> list[Case]:
    """Time and check every GPU kernel on every ``New`` of the network, on copies of its arrays on the GPU."""
    ceilings = roofline.measure()
    cases = []
    for layer in inference.layers(network.symbol):
        given = inference.run(mx.sym.Group(layer.inputs[:2]), network, images)
        problem = layer.attributes.problem(given[0].shape, given[1].shape)
        x, w = (_on_gpu(array) for array in given)
        names = tqdm(dispatch.names("gpu"), desc=layer.name, unit="kernel", disable=None, leave=False)
        rows = layers.gpu_rows(problem, x, w, layers.Settings(names, _REPEATS, peers=False))
        cases.append(layers.case_of(layer.name, problem, rows, ceilings))
    return cases


def _on_gpu(array: Any) -> Any:
    array.wait_to_read()
    return cuda.cupy().asarray(bridge.cpu_view(array))


def as_text(cases: list[Case]) -> str:
    """A table for people; a wrong or unsupported kernel has the reason instead of figures."""
    head = f"{'layer':8} {'kernel':24} {'precision':9} {'Op Time':>10}"
    lines = [f"{head} {'over naive':>10} {'of roofline':>11} {'error':>9}"]
    for case in cases:
        naive = case.row(BASELINE, KERNEL)
        for row in case.rows:
            figures = row.reason
            if row.median and row.roofline_seconds:
                speedup = f"{naive.median / row.median:.2f} x" if naive and naive.median else ""
                share = f"{100 * row.roofline_seconds / row.median:.1f} %"
                figures = f"{row.median:10.6f} {speedup:>10} {share:>11} {row.error:9.2g}"
            precision = dispatch.find(row.impl).precision
            lines.append(f"{case.name:8} {row.impl:24} {precision:9} {figures}".rstrip())
    return "\n".join(lines)
