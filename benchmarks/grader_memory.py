"""Time submissions on memory that the grader shares with them, and on memory of their own.

    python benchmarks/grader_memory.py FILE...

Each FILE is a .cuh or .cu submission. The table has each layer's median of the worker's own clock in milliseconds, for
the grader's buffers and for cudaMalloc in the same worker, and the ratio of the two. It needs a GPU.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

from ece408_op.grade import _build, _grading, _tools
from ece408_op.grade._buffers import Buffers
from ece408_op.grade._judge import REAL
from ece408_op.grade._networks import KNOWN
from ece408_op.grade._sandbox import Limits
from ece408_op.grade._spec import Spec
from ece408_op.grade._worker import Program, Worker


def medians(
    tools: _tools.Tools, program: Program, shared: bool, net: str, images: int, runs: int, folder: Path
) -> list[float]:
    """Each layer's median in milliseconds, on memory shared with the worker or allocated by it."""
    (problems,) = (one.problems(images) for one in KNOWN if one.name == net)
    buffers = [Buffers(problem, 0) for problem in problems]
    for array in () if shared else [array for one in buffers for array in one.arrays]:
        array.handle = "malloc"
    found = []
    with Worker(tools, program, buffers, folder, Limits(), 0) as worker:
        worker.begin()
        worker.load(60.0)
        for number, one in enumerate(buffers):
            one.draw(REAL, np.random.default_rng(1))
            one.present(flush=True)
            times = [worker.call(number, 60.0).worker_seconds for _ in range(runs)]
            found.append(1e3 * statistics.median(times))
    for one in buffers:
        one.__exit__()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="+", type=Path)
    parser.add_argument("--network", default="2018fa", choices=[net.name for net in KNOWN])
    parser.add_argument("--images", type=int, default=10000)
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    print("| file | layer | shared, ms | own, ms | ratio |\n| --- | --- | --- | --- | --- |")
    with _tools.new_folder("memory") as name:
        tools = _tools.build(Path(name), [(True, False)])
        grader = _grading.for_gpus(tools, Spec())
        for file in arguments.file:
            with _tools.new_folder("build") as inner:
                folder = Path(inner)
                built = _build.build(file, "gpu", folder, tools, Spec().limits, grader.architecture)
                program = Program(str(built.library), (built.library.parent,))
                both = [
                    medians(tools, program, shared, arguments.network, arguments.images, arguments.runs, folder)
                    for shared in (True, False)
                ]
                for layer, (ours, own) in enumerate(zip(*both), 1):
                    print(f"| {file.stem} | {layer} | {ours:.3f} | {own:.3f} | {ours / own:.3f} |", flush=True)


if __name__ == "__main__":
    main()
