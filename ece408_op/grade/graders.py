"""The graders of this machine: one for its CPU, one for its GPUs."""

from __future__ import annotations

import queue
from dataclasses import replace

from ece408_op import cuda

from . import gpu_side, jail
from .grading import Grader
from .rounds import Bench
from .spec import Spec

#: A file that fails in one run of five should be caught.
_GPU_RUNS = 8


def for_cpu(tools: jail.Tools, rules: Spec, jobs: int = 1) -> Grader:
    """The grader for this machine's processor; where ``jobs`` submissions share it, repeating a run helps nobody."""
    bench = Bench(tools, rules)
    return Grader(bench if jobs == 1 else replace(bench, repeats=0), "cpu")


def for_gpus(tools: jail.Tools, rules: Spec) -> Grader:
    """The grader for this machine's GPUs of the first one's kind; raises DeviceError where there is none."""
    chip = cuda.chip()
    alike = [number for number in range(cuda.device_count()) if cuda.chip(number) == chip]
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in alike:
        free.put(number)
    bench = Bench(
        *(tools, rules, gpu_side.GpuSide),
        runs=_GPU_RUNS,
        gpu=True,
        floor=gpu_side.floor_seconds,
        check=gpu_side.check,
    )
    return Grader(bench, "gpu", f"sm_{chip.architecture}", chip.name, free, len(alike))
