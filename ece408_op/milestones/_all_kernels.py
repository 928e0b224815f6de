"""m4.py --impl all: every GPU kernel on a network's own layers and images."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from tqdm import tqdm

from ece408_op.bench import layers
from ece408_op.bench.results import Results, this_machine
from ece408_op.core import dispatch, roofline
from ece408_op.models import inference
from ece408_op.plugin import bridge
from ece408_op.runtime import cuda

_REPEATS = 5


def measure(network: inference.Loaded, images: np.ndarray) -> Results:
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
    return Results("layers", this_machine(gpu=True), cases=tuple(cases))


def _on_gpu(array: Any) -> Any:
    array.wait_to_read()
    return cuda.cupy().asarray(bridge.cpu_view(array))
