"""Every GPU kernel on a network's own layers: python -m ece408_op.report.kernels MODEL SIZE --json FILE.

The network's images go through the layers as in a run; each layer's input and filters are copied to the GPU, each
kernel fills an output poisoned with NaN, is held against float64, and timed between events. What the compiler and
the driver say of it is read beside: registers, shared and local memory, the blocks that a multiprocessor can hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ece408_op.core import dispatch, roofline
from ece408_op.core.check import compare
from ece408_op.core.kernel import CudaKernel
from ece408_op.data import load_test
from ece408_op.data.atomic import replacing
from ece408_op.errors import DeviceError, Ece408Error
from ece408_op.models import files, inference, shapes
from ece408_op.plugin import bridge, host_context, mxnet_import
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Launch, Plan, ceil_div

_THREADS_PER_MULTIPROCESSOR = 39  # cudaDevAttrMaxThreadsPerMultiProcessor
_WARP = 32

#: Timed calls: up to so many while together they take less than the budget, and a few in any case.
_REPEATS, _FEWEST_REPEATS, _BUDGET_MILLISECONDS = 10, 3, 300.0

#: How the times were taken: it is kept with them.
METHOD = (
    "the median of up to ten calls between events, after one that isn't timed, each held back until all of it is queued"
)


def measure(network: files.Network, size: int, kernels: Sequence[CudaKernel], data: str | None) -> dict[str, Any]:
    """The layers of a network, each with a row for every kernel; raises DeviceError where there is no GPU."""
    cuda.chip(0)
    mx = mxnet_import.load()
    images, _, _ = load_test(shapes.info(network).image[1], size, data)
    loaded = inference.with_operator(network, dispatch.AUTO, "gpu")
    found = []
    for layer in inference.layers(loaded.symbol):
        given = inference.run(mx.sym.Group([layer.data, layer.weight]), loaded, images)
        problem = ConvProblem.from_shapes(given[0].shape, given[1].shape)
        x, w = (_on_gpu(array) for array in given)
        # Also what wakes the GPU up: its clocks are low after the network's work on the host.
        ceilings = roofline.measure()
        found.append(
            {
                "layer": layer.name,
                "method": METHOD,
                "problem": asdict(problem),
                "flops": problem.flops,
                "bytes": problem.bytes,
                "roofline_seconds": ceilings.roofline_seconds(problem),
                "ceilings": asdict(ceilings),
                "rows": _rows(kernels, problem, x, w),
            }
        )
    return {"model": network.name, "size": size, "layers": found}


def _on_gpu(array: Any) -> Any:
    array.wait_to_read()
    return cuda.cupy().asarray(bridge.cpu_view(array))


def _rows(kernels: Sequence[CudaKernel], problem: ConvProblem, x: Any, w: Any) -> list[dict[str, Any]]:
    out = cuda.cupy().empty(problem.y_shape, "f")
    rows = []
    for kernel in kernels:
        row: dict[str, Any] = {"kernel": kernel.name, "summary": kernel.summary, "precision": kernel.precision}
        rows.append(row)
        reasons = kernel.not_supported_reasons(problem, cuda.chip())
        if reasons:
            row["reason"] = "; ".join(reasons)
            continue
        try:
            _measure(row, kernel, problem, (x, w, out))
        except DeviceError as error:
            row.update(right=False, reason=str(error))
    return rows


def _measure(row: dict[str, Any], kernel: CudaKernel, problem: ConvProblem, arrays: tuple[Any, Any, Any]) -> None:
    """Put into the row whether the kernel is right, what it launches and, of a right one, its time."""
    x, w, out = arrays
    out.fill(np.nan)
    kernel.run(problem, x, w, out)
    places = sorted({0, problem.batch // 2, problem.batch - 1})
    check = compare(out[places].get(), x[places].get(), w.get(), kernel)
    row.update(right=check.passed, error=check.scaled, reason="" if check.passed else str(check))
    row["launches"] = _launches(kernel, problem, cuda.alignment(x.data.ptr, w.data.ptr, out.data.ptr))
    if check.passed:
        row["seconds"] = _seconds(kernel, problem, arrays)


def _seconds(kernel: CudaKernel, problem: ConvProblem, arrays: tuple[Any, Any, Any]) -> float:
    """The median time of a warm call, as Op Time is taken: held back until all of it is queued, between two events."""
    gpu = cuda.cupy().cuda
    stream, gate = gpu.get_current_stream(), host_context.gpu(0).gate
    times: list[float] = []
    while len(times) < _REPEATS and (len(times) < _FEWEST_REPEATS or sum(times) < _BUDGET_MILLISECONDS):
        start, end = gpu.Event(), gpu.Event()
        with gate.held(stream, arrays[0]):
            start.record(stream)
            kernel.run(problem, *arrays, stream)
            end.record(stream)
        cuda.wait(kernel.name, stream)
        times.append(float(gpu.get_elapsed_time(start, end)))
    return median(times) / 1000


def _launches(kernel: CudaKernel, problem: ConvProblem, aligned: int) -> list[dict[str, Any]]:
    """Each launch of a call with the number of times that it is made, and what is known of its function."""
    plan = kernel.plan(problem, cuda.chip(), aligned)
    binary = cuda.compiled(cuda.Program(kernel.name, kernel.text(plan), kernel.options, plan), 0)
    driver, runtime = cuda.cupy().cuda.driver, cuda.cupy().cuda.runtime
    warps = runtime.deviceGetAttribute(_THREADS_PER_MULTIPROCESSOR, 0) // _WARP
    found = []
    for (entry, grid, block, shared), count in launches(plan, problem.batch).items():
        function = binary.function(entry, shared)
        facts = function.attributes
        blocks = driver.occupancyMaxActiveBlocksPerMultiprocessor(function.kernel.ptr, prod(block), shared)
        found.append(
            {
                "entry": entry,
                "count": count,
                "grid": grid,
                "block": block,
                "registers": facts["num_regs"],
                "static_shared": facts["shared_size_bytes"],
                "dynamic_shared": shared,
                "local": facts["local_size_bytes"],
                "constant": facts["const_size_bytes"],
                "occupancy": blocks * ceil_div(prod(block), _WARP) / warps,
            }
        )
    return found


def launches(plan: Plan, batch: int) -> Counter[tuple]:
    """How often a call makes each launch: entry, grid, block, dynamic shared memory."""
    found: Counter[tuple] = Counter()
    sizes = Counter(images for _, images in plan.launch_ranges(batch))
    for steps, count in [(plan.setup, 1), *((plan.steps(images), count) for images, count in sizes.items())]:
        for step in steps:
            if isinstance(step, Launch):
                found[step.entry, step.grid, step.block, step.shared] += count
    return found


def chosen(names: Sequence[str] | None) -> list[CudaKernel]:
    """The GPU kernels of these names, in the list's order; all of them for None."""
    kernels = (dispatch.find(name) for name in dispatch.names("gpu"))
    return [kernel for kernel in kernels if isinstance(kernel, CudaKernel) and (names is None or kernel.name in names)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 1 failed, 2 usage, 3 no GPU."""
    parser = argparse.ArgumentParser(prog="python -m ece408_op.report.kernels", description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=files.list_names())
    parser.add_argument("size", type=int)
    parser.add_argument("--kernels", nargs="+", metavar="NAME", choices=dispatch.names("gpu"))
    parser.add_argument("--data", metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    options = parser.parse_args(arguments)
    try:
        result = measure(files.find(options.model), options.size, chosen(options.kernels), options.data)
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 3
    except (Ece408Error, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    with replacing(options.json) as file:
        file.write((json.dumps(result, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
