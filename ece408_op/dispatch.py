"""The one place that chooses a kernel."""

from __future__ import annotations

import os
from functools import lru_cache

from .errors import UnsupportedError
from .kernel import CpuKernel
from .kernels import KERNELS
from .problem import ConvProblem

#: The name that stands for the fastest kernel that takes the problem.
AUTO = "auto"

#: Operations for which a thread is worth waking: some 20 microseconds of the fastest kernel, about what waking takes.
_THREAD_FLOPS = 4_000_000


def names(device: str | None = None) -> list[str]:
    """The names of all kernels, or of those of one device, in order of preference."""
    return [kernel.name for kernel in KERNELS if device in (None, kernel.device)]


def find(name: str) -> CpuKernel:
    """The kernel of that name; raises UnsupportedError with the known names."""
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    raise UnsupportedError(f"impl: expected one of {', '.join([AUTO, *names()])}; got {name!r}")


def device_of(impl: str, default: str) -> str:
    """The device that an implementation runs on; ``auto`` runs on the default."""
    return default if impl == AUTO else find(impl).device


@lru_cache(maxsize=1024)
def select(problem: ConvProblem, device: str = "cpu", impl: str = AUTO, precision: str = "float32") -> CpuKernel:
    """The kernel for a problem: the one named, or by default the first of the list that takes it.

    Raises UnsupportedError with every reason of every kernel that was tried.
    """
    tried = []
    fitting = [kernel for kernel in KERNELS if (kernel.device, kernel.precision) == (device, precision)]
    candidates = fitting if impl == AUTO else [find(impl)]
    for kernel in candidates:
        reasons = kernel.not_supported_reasons(problem)
        if not reasons:
            return kernel
        tried.append(f"{kernel.name}: {'; '.join(reasons)}")
    raise UnsupportedError(f"no kernel takes {problem} on the {device}: {' | '.join(tried)}")


def thread_count(problem: ConvProblem) -> int:
    """Threads for a CPU kernel: the smallest of OMP_NUM_THREADS, the cores this process may use, and the work there is.

    The work is shared out by images, and a thread's share must be worth waking it.
    """
    cores = len(os.sched_getaffinity(0))
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    limit = int(asked) if asked.isdecimal() and int(asked) > 0 else cores
    return max(1, min(limit, cores, problem.batch, problem.flops // _THREAD_FLOPS))
