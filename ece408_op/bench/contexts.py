"""How long the host context takes beside a bare copy of its output.

    python -m ece408_op.bench.contexts [--impl NAME] [--fuse] [--repeats N] [--json FILE]

Prints a table to stdout: the 2017 layer, 10000 images, through the operator on mx.cpu() arrays, and in the same run
its output alone copied from the GPU through the same staging buffers by the same threads. Both go into memory
that was never touched, and into memory that was. With --fuse the layer has its tanh and 2 x 2 maxima in the same pass.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.core import dispatch
from ece408_op.data.atomic import folder_problem, replacing
from ece408_op.errors import DeviceError
from ece408_op.plugin import host_context, mxnet_import, op_times
from ece408_op.problem import ConvProblem, PooledProblem
from ece408_op.runtime import cuda

LAYER = ConvProblem(10_000, 1, 28, 28, 50, 5)

_EPILOG = """\
example:
  python -m ece408_op.bench.contexts --impl sliding_window --repeats 5 --json contexts.json

exit codes: 0 done, 2 usage, 3 this machine can't (no GPU)"""


def measure(layer: ConvProblem, kernel: str, repeats: int) -> list[tuple[str, float, float, float]]:
    """For fresh and for reused memory: the bare copy, the call, and its Op Time, medians in milliseconds."""
    mx = mxnet_import.load()
    cp = cuda.cupy()
    rng = np.random.default_rng(0)
    x = mx.nd.array(rng.random(layer.x_shape, np.float32))
    w = mx.nd.array(rng.standard_normal(layer.w_shape, np.float32))
    source = cp.empty(layer.y_shape, np.float32)
    source.data.memset(0, source.nbytes)
    gpu = host_context.gpu()
    options = {"op_type": "New", "kernel": (5, 5), "num_filter": layer.filters, "device": "gpu", "impl": kernel}
    if isinstance(layer, PooledProblem):
        options["fuse"] = "tanh_pool"
    kept, out = np.ones(layer.y_shape, np.float32), mx.nd.ones(layer.y_shape)
    out.wait_to_read()

    def fresh_call() -> Any:
        y = mx.nd.Custom(x, w, **options)
        y.wait_to_read()
        return y

    def fresh_copy() -> Any:
        y = np.empty(layer.y_shape, np.float32)
        gpu.copy_alone(source, y)
        return y

    def reused_call() -> None:
        mx.nd.Custom(x, w, out=out, **options)
        out.wait_to_read()

    ways = {"fresh": (fresh_copy, fresh_call), "reused": (lambda: gpu.copy_alone(source, kept), reused_call)}
    rows = []
    for name, (copy, call) in ways.items():
        op_times.clear_op_times()
        copies, calls = [], []
        for repeat in range(repeats + 1):
            times = milliseconds(copy), milliseconds(call)
            if repeat:  # the first pair warms up
                copies.append(times[0])
                calls.append(times[1])
        op = statistics.median(call.seconds for call in op_times.op_times()[1:]) * 1000
        rows.append((name, statistics.median(copies), statistics.median(calls), op))
    return rows


def milliseconds(call: Callable[[], Any]) -> float:
    """The time of one call, the freeing of what it returns left out."""
    start = time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - start
    del kept
    return seconds * 1000


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ece408_op.bench.contexts",
        description=__doc__.splitlines()[0],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--impl", choices=["auto", *dispatch.names("gpu")], default="auto", help="default: auto")
    parser.add_argument("--repeats", type=int, default=9, help="pairs measured, the median counts (default 9)")
    parser.add_argument("--fuse", action="store_true", help="with tanh and 2 x 2 maxima in the same pass")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to FILE as well")
    options = parser.parse_args()
    problem = folder_problem(options.json)
    if problem:
        parser.error(f"--json: {problem}")
    layer = LAYER.pooled(full=False) if options.fuse else LAYER
    try:
        chip = cuda.chip()
    except DeviceError as error:
        print(f"bench_contexts: {error}", file=sys.stderr)
        return 3
    rows = measure(layer, options.kernel, options.repeats)
    cp = cuda.cupy()
    print(
        f"{layer}, {chip.name}, {host_context.gpu().threads} threads, each with {host_context.STAGING_BYTES >> 20} MB "
        f"of staging memory; CuPy {cp.__version__}, CUDA {cp.cuda.runtime.runtimeGetVersion()}, "
        f"NumPy {np.__version__}, Python {platform.python_version()}; median of {options.repeats}\n"
    )
    print("| output memory | bare staged copy, ms | operator, copies and computing, ms | ratio | Op Time, ms |")
    print("| --- | --- | --- | --- | --- |")
    for name, bare, call, op in rows:
        print(f"| {name} | {bare:.1f} | {call:.1f} | {call / bare:.2f} | {op:.3f} |")
    if options.json is not None:
        keys = ("output_memory", "copy_ms", "call_ms", "op_time_ms")
        data = {"layer": str(layer), "gpu": chip.name, "rows": [dict(zip(keys, row)) for row in rows]}
        with replacing(options.json) as file:
            file.write((json.dumps(data, indent=2) + "\n").encode())
    return 0


if __name__ == "__main__":
    from ece408_op import commands

    sys.exit(commands.guard("ece408_op.bench.contexts", main))
