"""Time submissions in the grader's worker, and in a plain process that allocates by cudaMalloc.

    python benchmarks/grader_memory.py              # benchmarks/results/grader-memory-h200.txt has its output
    python benchmarks/grader_memory.py FILE...      # .cuh, .cu and .py submissions

Without a FILE it times the ten access patterns of tests/submissions/memory.cases and a kernel in Python. The table
has the medians of the process's own clock around a call in milliseconds, for each layer, and their ratio. It needs a
GPU and nvcc. Exit code 1 if a ratio is off by more than 2 % or an output is wrong.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
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

PYTHON = (str(submissions.HERE / "python" / "on_the_gpu.py"),)
MOST_APART = 0.02

#: LIBRARY RUNS {B C H W M K}...: a plain process that calls a compiled submission and prints each layer's seconds.
PLAIN = r"""
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <dlfcn.h>

struct Call {
  float *y, *x, *w;
  unsigned y_shape[4], x_shape[4], w_shape[4];
  cudaStream_t stream;
  const char* note;
};

__global__ void fill(float* to, size_t count) {  // in [-1, 1)
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
    to[i] = (unsigned)(i * 2654435761u ^ i >> 7) * 4.6566129e-10f - 1;
}

float* allocate(const unsigned* shape) {
  void* at = nullptr;
  const size_t count = (size_t)shape[0] * shape[1] * shape[2] * shape[3];
  if (cudaMalloc(&at, 4 * count) != cudaSuccess) exit(1);
  fill<<<1024, 256>>>((float*)at, count);
  return (float*)at;
}

int main(int, char** words) {
  void* library = dlopen(words[1], RTLD_NOW);
  auto forward = (void (*)(Call*))dlsym(library, "ece408_grade_forward");
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  for (char** at = words + 3; *at; at += 6) {
    unsigned n[6];
    for (int i = 0; i < 6; ++i) n[i] = atoi(at[i]);
    Call call = {0, 0, 0, {n[0], n[4], n[2] - n[5] + 1, n[3] - n[5] + 1}, {n[0], n[1], n[2], n[3]},
                 {n[4], n[1], n[5], n[5]}, stream, 0};
    call.x = allocate(call.x_shape), call.w = allocate(call.w_shape), call.y = allocate(call.y_shape);
    cudaDeviceSynchronize();
    for (int run = 0; run < atoi(words[2]); ++run) {
      auto start = std::chrono::steady_clock::now();
      forward(&call);
      if (cudaDeviceSynchronize() != cudaSuccess) return 1;
      printf("%.9f ", std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    printf("\n");
    cudaFree(call.x), cudaFree(call.w), cudaFree(call.y);
  }
}
"""
#: The same for a kernel in Python: WHAT RUNS {B C H W M K}...
PLAIN_PYTHON = """
import sys, time
import cupy
from ece408_op.submission import python_worker
from ece408_op.problem import ConvProblem

cupy.cuda.set_allocator(None)
kernel = python_worker.load_kernel(sys.argv[1])
for first in range(3, len(sys.argv), 6):
    problem = ConvProblem(*map(int, sys.argv[first : first + 6]))
    x, w = (cupy.random.uniform(-1, 1, shape, dtype="f") for shape in (problem.x_shape, problem.w_shape))
    y = cupy.zeros(problem.y_shape, "f")
    cupy.cuda.runtime.deviceSynchronize()
    for run in range(int(sys.argv[2])):
        start = time.perf_counter()
        kernel.run(problem, x, w, y)
        cupy.cuda.runtime.deviceSynchronize()
        print(time.perf_counter() - start, end=" ")
    print()
    del x, w, y
"""


Seconds = list[list[float]]


def in_a_worker(tools: Tools, program: Program, problems: list[ConvProblem], runs: int, folder: Path) -> Seconds:
    """Seconds of each layer's runs on the grader's memory, by the worker's clock; a wrong output ends the benchmark."""
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
            one.take_output()  # of the first run: some add to y
            outcome = one.outcome(REAL)
            if outcome.precision == WRONG:
                raise SystemExit(f"{program.what}: {outcome}")
            found.append(seconds + [worker.call(layer, 60.0).worker_seconds for _ in range(runs - 1)])
        return found


def in_a_plain_process(command: list[str], problems: list[ConvProblem], runs: int) -> Seconds:
    """Seconds of each layer's runs on memory of its own."""
    words = [str(size) for problem in problems for size in problem.sizes.values()]
    done = subprocess.run([*command, str(runs), *words], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return [[float(word) for word in line.split()] for line in done.stdout.splitlines()]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="*")
    parser.add_argument("--network", default="2018fa", choices=[net.name for net in KNOWN_NETS])
    parser.add_argument("--images", type=int, default=10000)
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    (problems,) = (one.problems(arguments.images) for one in KNOWN_NETS if one.name == arguments.network)
    chip, cupy = cuda.chip(), cuda.cupy()
    versions = f"CuPy {cupy.__version__}, CUDA driver {cupy.cuda.runtime.driverGetVersion()}"
    print(" ".join(["python benchmarks/grader_memory.py", *sys.argv[1:]]))
    print(f"{chip.name}, Python {platform.python_version()}, NumPy {np.__version__}, {versions}")
    print(f"{arguments.images} images of {arguments.network}, median of {arguments.runs} runs; ms\n")
    print("| submission | layer | worker | plain process | ratio |\n| --- | --- | --- | --- | --- |")
    with ExitStack() as stack:

        def new_folder(purpose: str) -> Path:
            return Path(stack.enter_context(build.new_folder(purpose)))

        top = new_folder("memory")
        tools = build.tools()
        (top / "plain.cu").write_text(PLAIN, encoding="utf-8")
        options = ["-O2", "-arch", f"sm_{chip.architecture}", "-o", str(top / "plain"), str(top / "plain.cu"), "-ldl"]
        subprocess.run([build.compiler("nvcc"), *options], check=True)
        files = arguments.file
        if not files:
            cases = submissions.write(submissions.for_memory(), top / "cases", "new-forward.cuh")
            files = [*(str(path / "new-forward.cuh") for path in cases.values()), *PYTHON]
        architecture = f"sm_{cuda.chip().architecture}"

        def prepared(file: str) -> tuple[str, Program, list[str]]:
            """A submission's name, its program in the worker, and its command in a plain process."""
            path = Path(file)
            if path.suffix == ".py":
                program = python_program(path.resolve())
                return path.stem, program, [sys.executable, "-c", PLAIN_PYTHON, program.what]
            program = build.build(path, "gpu", new_folder("build"), tools, LimitsSpec(), architecture)
            name = path.parent.name if path.stem == "new-forward" else path.stem
            return name, program, [str(top / "plain"), program.what]

        worst = 1.0
        with ThreadPoolExecutor(8) as pool:
            for name, program, command in pool.map(prepared, files):
                # The plain process runs before and after the worker, so that a drift of the clocks shows.
                plain = partial(in_a_plain_process, command, problems, arguments.runs)
                before, ours, after = plain(), in_a_worker(tools, program, problems, arguments.runs, top), plain()
                for layer in range(len(problems)):
                    both = before[layer] + after[layer]
                    ours_ms, own_ms = (1e3 * statistics.median(one) for one in (ours[layer], both))
                    ratio = ours_ms / own_ms
                    worst = max(worst, ratio, 1 / ratio)
                    print(f"| {name} | {layer + 1} | {ours_ms:.3f} | {own_ms:.3f} | {ratio:.3f} |", flush=True)
    print(f"\nthe largest difference is {100 * (worst - 1):.1f} %")
    return int(worst > 1 + MOST_APART)


if __name__ == "__main__":
    sys.exit(main())
