"""The graders of this machine: one for its CPU, one for its GPUs."""

from __future__ import annotations

import queue
from dataclasses import replace

from ece408_op.runtime import cuda

from . import _gpu_side, _sandbox
from ._grading import Grader
from ._rounds import Bench
from ._spec import Spec

#: A file that fails in one run of five should be caught.
_GPU_RUNS = 8


def for_cpu(tools: _sandbox.Tools, rules: Spec, jobs: int = 1) -> Grader:
    """The grader for this machine's processor; where ``jobs`` submissions share it, repeating a run helps nobody."""
    bench = Bench(tools, rules)
    return Grader(bench if jobs == 1 else replace(bench, repeats=0), "cpu")


def for_gpus(tools: _sandbox.Tools, rules: Spec) -> Grader:
    """The grader for this machine's GPUs of the first one's kind; raises DeviceError where there is none."""
    chip = cuda.chip()
    alike = [number for number in range(cuda.device_count()) if cuda.chip(number) == chip]
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in alike:
        free.put(number)
    bench = Bench(
        *(tools, rules, _gpu_side.GpuSide),
        runs=_GPU_RUNS,
        gpu=True,
        floor=_gpu_side.roofline_seconds,
        check=_gpu_side.check,
    )
    return Grader(bench, "gpu", f"sm_{chip.architecture}", chip.name, free, len(alike))
