"""Nsight Compute's counters for a file on a GPU.

ncu runs this module: it loads the compiled file and calls it once per layer, without the worker's process around it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

from ece408_op.errors import DataError, DeviceError
from ece408_op.problem import ConvProblem
from ece408_op.profile import counters
from ece408_op.runtime import cuda
from ece408_op.submission.python_worker import Call

from ._check import Checked, Request, inputs

#: Images of a call: enough to fill a GPU, few enough for ncu, which repeats each launch and restores memory between.
IMAGES = 1000
SECONDS = 120.0
_OPERATIONS = ("ld", "st")
#: By the result's name: metrics to sum over the launches, and shares of the peak, in percent, to weight by their time.
SUMS = {
    "sectors": [f"l1tex__t_sectors_pipe_lsu_mem_global_op_{one}.sum" for one in _OPERATIONS],
    "requests": [f"l1tex__t_requests_pipe_lsu_mem_global_op_{one}.sum" for one in _OPERATIONS],
    "bank_conflicts": [f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{one}.sum" for one in _OPERATIONS],
}
SHARES = {
    "compute": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}


def add(request: Request, checked: Checked) -> None:
    """Add to each layer's entry what ncu counted, or to the result why it could not."""
    result, images = checked.result, request.images or IMAGES
    try:
        if checked.file is None or request.path.suffix.lower() == ".py":
            raise DeviceError("expected a CUDA file that runs on a GPU")
        sizes = ["x".join(map(str, [images, *entry["layer"]])) for entry in result["layers"]]
        found = counters.collect_metrics(["-m", __name__, checked.file.program.what, *sizes], SUMS, SHARES, SECONDS)
    except (DataError, DeviceError) as error:
        result["ncu"] = f"without Nsight Compute's counters: {' '.join(str(error).split())}"
        return
    for number, entry in enumerate(result["layers"]):
        if f"layer_{number}" in found:
            entry["ncu"] = {"images": images, **found[f"layer_{number}"]}


def _launch(library: str, problems: Sequence[ConvProblem]) -> None:
    cupy, forward = cuda.cupy(), ctypes.CDLL(library).ece408_grade_forward
    for number, problem in enumerate(problems):
        x, w = map(cupy.asarray, inputs(problem))
        y = cupy.empty(problem.y_shape, "f")
        y.data.memset(0, y.nbytes)  # no kernel, so ncu does not list it
        counters.launch_marker(f"layer_{number}")
        shapes = (problem.y_shape, problem.x_shape, problem.w_shape)
        pointers = (array.data.ptr for array in (y, x, w))
        forward(ctypes.byref(Call(*pointers, *((ctypes.c_uint * 4)(*one) for one in shapes))))
        cuda.wait(library, cupy.cuda.get_current_stream())


if __name__ == "__main__":
    asked: Any = [map(int, size.split("x")) for size in sys.argv[2:]]
    _launch(sys.argv[1], [ConvProblem(*sizes) for sizes in asked])
