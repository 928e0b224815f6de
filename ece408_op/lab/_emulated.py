"""A CUDA file in the emulator: a course submission, or a CudaKernel in Python by its plan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ece408_op import emulator
from ece408_op.core.kernel import CudaKernel
from ece408_op.emulator.plans import Case, Plans
from ece408_op.errors import Ece408Error
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip
from ece408_op.submission import EndedError, python_worker

#: What y holds before a call: no sum of the lab's inputs.
FILL = 4096.5
_SECONDS = 60.0
#: The chip for which a kernel in Python plans its launches.
_CHIP = Chip("NVIDIA H100", (9, 0), 132, 227 * 1024)

#: Computes layers, one after another, from x (B, C, H, W) and w (M, C, K, K) of each; a report for each, until one ends
#: the process.
Run = Callable[[Sequence[ConvProblem], Sequence[tuple[np.ndarray, np.ndarray]]], list[emulator.Report]]


def compiled(path: Path, kernel: CudaKernel | None) -> Run:
    """Return the emulated file, or the kernel in Python that it defines; raises CompileError.

    The function that is returned raises CompileError for such a kernel, and EndedError where that does not take the
    problem or its plan fails.
    """
    if kernel is not None:
        return lambda problems, arrays: [_run_plan(path, kernel, *one) for one in zip(problems, arrays)]
    program = emulator.compile(path)
    return lambda problems, arrays: emulator.run_layers(program, arrays, fill=FILL, seconds=_SECONDS)


def python_kernel(path: Path) -> CudaKernel:
    """Load the CudaKernel of a .py file in this process; raises EndedError."""
    folder, modules, state = str(path.resolve().parent), set(sys.modules), sys.dont_write_bytecode
    with python_errors(path):
        # Its neighbours may change until the next call; two versions of one second may look like one compiled file.
        sys.path.insert(0, folder)
        sys.dont_write_bytecode = True
        try:
            kernel = python_worker.load_kernel(str(path.resolve()))
        finally:
            sys.path.remove(folder)
            sys.dont_write_bytecode = state
            for name in set(sys.modules) - modules:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                    del sys.modules[name]
        if not isinstance(kernel, CudaKernel):
            raise TypeError(f"expected a CudaKernel, got {kernel.name} for the {kernel.device}")
    return kernel


@contextmanager
def python_errors(path: Path) -> Iterator[None]:
    """Raise EndedError, with the line of the .py file, in place of an exception of its code."""
    try:
        yield
    except Ece408Error:
        raise
    except (Exception, SystemExit) as error:
        raise EndedError("crashed", python_worker.described(error, str(path.resolve()))) from None


def _run_plan(
    path: Path, kernel: CudaKernel, problem: ConvProblem, inputs: tuple[np.ndarray, np.ndarray]
) -> emulator.Report:
    with python_errors(path):
        reasons = kernel.not_supported_reasons(problem, _CHIP)
        if reasons:
            raise EndedError("unsupported", f"it does not take {problem}: {'; '.join(reasons)}")
        plan = kernel.plan(problem, _CHIP, 256)
        arrays = {"x": inputs[0], "w": inputs[1], "y": np.full(problem.y_shape, FILL, np.float32)}
        arrays.update((name, np.full(size, 0xFF, np.uint8)) for name, size in plan.scratch.items())
        case = Case(kernel.name, kernel.text(plan), plan, tuple(arrays), problem.batch)
        # Its text has the launches, for which the plan is asked for its steps.
        plans = Plans([case], races=True, counters=True, source=kernel.sources[-1].name)
    return plans.run(kernel.name, arrays, dict.fromkeys(arrays, 256), _SECONDS)
