"""The one place that chooses a kernel."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache

from ece408_op.errors import UnsupportedError
from ece408_op.kernels import KERNELS
from ece408_op.problem import ConvProblem, PooledProblem
from ece408_op.runtime.launch import Chip

from . import tuning
from .kernel import CpuKernel, CudaKernel, Kernel

#: The name that stands for the fastest kernel that takes the problem.
AUTO = "auto"

#: What serves a precision that was asked for: it, then what is more precise.
SERVES = {"float32": ("float32",), "tf32": ("tf32", "float32"), "fp16": ("fp16", "tf32", "float32")}

#: Operations for which a thread is worth waking: some 20 microseconds of the fastest kernel, about what waking takes.
_THREAD_FLOPS = 4_000_000

#: From so many channels on, multiples of a vector, MXNet's Convolution is faster on the CPU, and cuDNN's on a GPU.
_VECTOR, _BLOCKED_CHANNELS, _CUDNN_CHANNELS = 8, 16, 64


def names(device: str | None = None) -> list[str]:
    """The names of all kernels, or of those of one device, in order of preference."""
    return [kernel.name for kernel in KERNELS if device in (None, kernel.device)]


def find(name: str) -> Kernel:
    """The kernel of that name; raises UnsupportedError with the known names."""
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    raise UnsupportedError(f"impl: expected one of {', '.join([AUTO, *names()])}; got {name!r}")


def device_of(impl: str, default: str) -> str:
    """The device that an implementation runs on; ``auto`` runs on the default."""
    return default if impl == AUTO else find(impl).device


@lru_cache(maxsize=1024)
def select(
    problem: ConvProblem,
    device: str = "cpu",
    impl: str = AUTO,
    precision: str = "float32",
    chip: Chip | None = None,
) -> Kernel:
    """Return the kernel for a problem: the named one, or the one that is expected to be fastest.

    On the CPU, "auto" is the first recommended kernel of the list KERNELS that supports the problem. On a GPU, it is
    the one with the smallest time that the tuning table predicts; for a PooledProblem, the first one of the list.

    Args:
        problem: the sizes of the convolution.
        device: "cpu" or "gpu"; ignored if impl names a kernel.
        impl: the name of a kernel, or "auto".
        precision: the least precision of the products: "float32", "tf32" (11 bits) or "fp16" (11 bits and fp16's
            range).
        chip: the GPU, or None if it is unknown.

    Raises:
        UnsupportedError: no kernel supports the problem; the message has every reason of every kernel.
    """
    tried = []
    for kernel in _candidates(problem, device, impl, precision, chip):
        reasons = (
            kernel.not_supported_reasons(problem)
            if isinstance(kernel, CpuKernel)
            else kernel.not_supported_reasons(problem, chip)
        )
        if not reasons:
            return kernel
        tried.append(f"{kernel.name}: {'; '.join(reasons)}")
    raise UnsupportedError(f"no kernel takes {problem} on the {device}: {' | '.join(tried)}")


def _candidates(problem: ConvProblem, device: str, impl: str, precision: str, chip: Chip | None) -> Iterable[Kernel]:
    """Kernels to try, the best first."""
    if impl != AUTO:
        return [find(impl)]
    ranks = SERVES[precision]
    fitting = [kernel for kernel in KERNELS if kernel.device == device and kernel.precision in ranks]
    fitting.sort(key=lambda kernel: ranks.index(kernel.precision))
    # The table's layers have nothing behind them: for those that have, the list's order holds.
    measured: list[Kernel] = []
    if chip is not None and not isinstance(problem, PooledProblem):
        known = {k.name: k for k in fitting if isinstance(k, CudaKernel) and k.runs_on(chip)}

        def estimate(name: str) -> float:
            # Kernels that are not recommended come last in any case, and a prediction takes a while.
            return (
                known[name].predicted_milliseconds(problem, chip)
                if known[name].recommended(problem, chip)
                else math.inf
            )

        measured = [known[name] for name in tuning.preference(problem, chip, known, estimate)]
    candidates = measured + [kernel for kernel in fitting if kernel not in measured]
    return _recommended_first(candidates, problem, chip)


def _recommended_first(kernels: list[Kernel], problem: ConvProblem, chip: Chip | None) -> Iterator[Kernel]:
    """Kernels that others are expected to be faster than, or of which times say nothing for this problem, come last."""
    late = []
    for kernel in kernels:
        recommended = (
            kernel.recommended(problem)
            if isinstance(kernel, CpuKernel)
            else chip is None or kernel.recommended(problem, chip)
        )
        if not recommended:
            late.append(kernel)
        else:
            yield kernel
    yield from late


def slower_than_mxnet(w_shape: tuple[int, ...], device: str) -> bool:
    """Whether ``New`` is expected to be slower than MXNet's own Convolution in the place of it, inside a network.

    w_shape: (M, C, K, K). On the CPU MXNet's oneDNN keeps layers of whole vectors of channels in a blocked layout, and
    fuses BatchNorm and activations into them (measured by benchmarks/replaced_layers.py). On a GPU cuDNN is faster on
    filters of more than one element with many channels (docs/performance.md).
    """
    filters, channels, kernel, _ = w_shape
    if device == "gpu":
        return channels >= _CUDNN_CHANNELS and kernel > 1
    return channels >= _BLOCKED_CHANNELS and channels % _VECTOR == 0 and filters % _VECTOR == 0


def thread_count(problem: ConvProblem) -> int:
    """Threads for a CPU kernel: the smallest of OMP_NUM_THREADS, the cores this process may use, and the work there is.

    The work is shared out by images, and a thread's share must be worth waking it.
    """
    worth = min(problem.batch, problem.flops // _THREAD_FLOPS)
    if worth <= 1:
        return 1
    cores = len(os.sched_getaffinity(0))
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    limit = int(asked) if asked.isdecimal() and int(asked) > 0 else cores
    return max(1, min(limit, cores, worth))
