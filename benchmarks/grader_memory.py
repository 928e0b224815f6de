"""Time submissions in the grader's worker, and in a plain process that allocates by cudaMalloc.

    python benchmarks/grader_memory.py              # benchmarks/results/grader-memory-h200.txt has its output
    python benchmarks/grader_memory.py FILE...      # .cuh, .cu and .py submissions

Without a FILE it times the ten access patterns of tests/submissions/memory.cases and a kernel in Python. For each
layer, the table has the median milliseconds of a call in both processes, by each process's own clock, and their
ratio. The script needs a GPU and nvcc. Exit code 1 if a ratio is off by more than 2 % or an output is wrong.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import submissions  # noqa: E402

from ece408_op.grade._buffers import Buffers, Device  # noqa: E402
from ece408_op.grade._verdict import REAL, WRONG  # noqa: E402
from ece408_op.problem import KNOWN_NETS, ConvProblem  # noqa: E402
from ece408_op.runtime import cuda  # noqa: E402
from ece408_op.submission import build  # noqa: E402
from ece408_op.submission.sandbox import LimitsSpec, Tools  # noqa: E402
from ece408_op.submission.worker import Program, Worker, python_program  # noqa: E402

PYTHON = submissions.HERE / "python" / "on_the_gpu.py"
MOST_APART = 0.02

#: The script of the plain process, with the arguments WHAT RUNS {B C H W M K}...: call a compiled submission, or a
#: kernel in Python, and print each layer's seconds.
PLAIN = """
import ctypes, sys, time
import cupy
from ece408_op.problem import ConvProblem
from ece408_op.submission.python_worker import Call, load_kernel

cupy.cuda.set_allocator(None)  # cudaMalloc's memory
what, stream = sys.argv[1], cupy.cuda.Stream()
kernel = load_kernel(what) if what.endswith(".py") else None
library = None if kernel else ctypes.CDLL(what)
for first in range(3, len(sys.argv), 6):
    problem = ConvProblem(*map(int, sys.argv[first : first + 6]))
    x, w = (cupy.random.uniform(-1, 1, shape, dtype="f") for shape in (problem.x_shape, problem.w_shape))
    y = cupy.zeros(problem.y_shape, "f")
    shapes = ((ctypes.c_uint * 4)(*array.shape) for array in (y, x, w))
    call = Call(*(array.data.ptr for array in (y, x, w)), *shapes, stream.ptr)
    cupy.cuda.runtime.deviceSynchronize()
    for run in range(int(sys.argv[2])):
        start = time.perf_counter()
        kernel.run(problem, x, w, y) if kernel else library.ece408_grade_forward(ctypes.byref(call))
        cupy.cuda.runtime.deviceSynchronize()
        print(time.perf_counter() - start, end=" ")
    print()
    del x, w, y
"""

Seconds = list[list[float]]


def in_a_worker(tools: Tools, program: Program, problems: list[ConvProblem], runs: int, folder: Path) -> Seconds:
    """Return seconds of each layer's runs on the grader's memory, by the worker's clock; exit if an output is wrong."""
    with ExitStack() as stack:
        buffers = [stack.enter_context(Buffers(problem, Device(0))) for problem in problems]
        worker = stack.enter_context(Worker(tools, program, buffers, folder, LimitsSpec()))
        worker.begin()
        worker.call(0, 60.0, "load")
        found = []
        for layer, one in enumerate(buffers):
            one.draw(REAL, np.random.default_rng(1))
            one.clear(0.0)
            one.present(flush=False)
            seconds = [worker.call(layer, 60.0).worker_seconds]
            one.take_output()  # of the first run, because some submissions add to y
            outcome = one.outcome(REAL)
            if outcome.precision == WRONG:
                raise SystemExit(f"{program.what}: {outcome}")
            found.append(seconds + [worker.call(layer, 60.0).worker_seconds for _ in range(runs - 1)])
        return found


def in_a_plain_process(what: str, problems: list[ConvProblem], runs: int) -> Seconds:
    """Return the seconds of each layer's runs in a plain process, on memory from cudaMalloc."""
    words = [str(size) for problem in problems for size in problem.sizes.values()]
    command = [sys.executable, "-c", PLAIN, what, str(runs), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return [[float(word) for word in line.split()] for line in done.stdout.splitlines()]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="*")
    parser.add_argument("--network", default="2018fa", choices=[net.name for net in KNOWN_NETS])
    parser.add_argument("--images", type=int, default=10000)
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    (problems,) = (one.problems(options.images) for one in KNOWN_NETS if one.name == options.network)
    chip, cupy = cuda.chip(), cuda.cupy()
    versions = f"CuPy {cupy.__version__}, CUDA driver {cupy.cuda.runtime.driverGetVersion()}"
    print(" ".join(["python benchmarks/grader_memory.py", *sys.argv[1:]]))
    print(f"{chip.name}, Python {platform.python_version()}, NumPy {np.__version__}, {versions}")
    print(f"{options.images} images of {options.network}, median of {options.runs} runs; ms\n")
    print("| submission | layer | worker | plain process | ratio |\n| --- | --- | --- | --- | --- |")
    worst = 1.0
    with ExitStack() as stack:
        top, tools = Path(stack.enter_context(build.new_folder("memory"))), build.tools()
        files = [Path(file) for file in options.file]
        if not files:
            cases = submissions.write(submissions.for_memory(), top / "cases", "new-forward.cuh")
            files = [*(path / "new-forward.cuh" for path in cases.values()), PYTHON]

        def prepared(path: Path) -> Program:
            if path.suffix == ".py":
                return python_program(path.resolve())
            folder = Path(stack.enter_context(build.new_folder("build")))
            return build.build(path, "gpu", folder, tools, LimitsSpec(), f"sm_{chip.architecture}")

        for path, program in zip(files, stack.enter_context(ThreadPoolExecutor(8)).map(prepared, files)):
            name = path.parent.name if path.stem == "new-forward" else path.stem
            # The plain process runs before and after the worker, to compensate for a drift of the clocks.
            before = in_a_plain_process(program.what, problems, options.runs)
            ours = in_a_worker(tools, program, problems, options.runs, top)
            after = in_a_plain_process(program.what, problems, options.runs)
            for layer in range(len(problems)):
                ours_ms, own_ms = (1e3 * statistics.median(one) for one in (ours[layer], before[layer] + after[layer]))
                worst = max(worst, ours_ms / own_ms, own_ms / ours_ms)
                print(f"| {name} | {layer + 1} | {ours_ms:.3f} | {own_ms:.3f} | {ours_ms / own_ms:.3f} |", flush=True)
    print(f"\nthe largest difference is {100 * (worst - 1):.1f} %")
    return int(worst > 1 + MOST_APART)


if __name__ == "__main__":
    sys.exit(main())
