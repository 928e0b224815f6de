"""The one place that chooses a kernel."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from ece408_op.errors import UnsupportedError
from ece408_op.kernels import KERNELS
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip

from . import tuning
from .kernel import CpuKernel, CudaKernel, Kernel

#: The name that stands for the fastest kernel that supports the problem.
AUTO = "auto"

#: The precisions that serve a requested one: itself, then the more precise ones.
SERVES = {"float32": ("float32",), "tf32": ("tf32", "float32"), "fp16": ("fp16", "tf32", "float32")}

#: oneDNN has a blocked layout for channels in multiples of _BLOCK, in grouped layers of _BLOCK_OF_GROUP. It reads
#: images of up to _IMAGE_CHANNELS channels as they are.
_BLOCK, _BLOCK_OF_GROUP, _IMAGE_CHANNELS = 8, 4, 3
#: From this number of channels on, winograd_gemm is faster than oneDNN on the CPU, and cuDNN than our kernels on a GPU.
_WIDE = 64

#: Kernels of the caller's own: see ``added``.
_added: list[Kernel] = []


@contextmanager
def added(kernel: Kernel) -> Iterator[None]:
    """Inside the context, ``impl`` may name this kernel too, such as a user's own file; "auto" does not take it."""
    _added.append(kernel)
    try:
        yield
    finally:
        _added.remove(kernel)
        forget_choices()


def names(device: str | None = None) -> list[str]:
    """Return the names of all kernels, or of those of one device, in order of preference."""
    return [kernel.name for kernel in (*KERNELS, *_added) if device in (None, kernel.device)]


def find(name: str) -> Kernel:
    """Return the kernel of that name; raises UnsupportedError with the known names."""
    for kernel in (*KERNELS, *_added):
        if kernel.name == name:
            return kernel
    raise UnsupportedError(f"impl: expected one of {', '.join([AUTO, *names()])}; got {name!r}")


def forget_choices() -> None:
    """Choose again at the next call: what kernels support, or the tuning table, has changed."""
    _select.cache_clear()


def device_of(impl: str, default: str) -> str:
    """Return the device that an implementation runs on; ``auto`` runs on the default."""
    return default if impl == AUTO else find(impl).device


def select(
    problem: ConvProblem,
    device: str = "cpu",
    impl: str = AUTO,
    precision: str = "float32",
    chip: Chip | None = None,
) -> Kernel:
    """Return the kernel for a problem: the named one, or the one that is expected to be fastest.

    On the CPU, "auto" is the first recommended kernel of the list KERNELS that supports the problem. On a GPU, it is
    the one with the smallest time that the tuning table predicts; for problems with attributes, gradients and a
    PooledProblem, the first recommended one of the list.

    Args:
        problem: the sizes of the convolution.
        device: "cpu" or "gpu"; ignored if impl names a kernel.
        impl: the name of a kernel, or "auto".
        precision: the least precision of the products: "float32", "tf32" (11 bits) or "fp16" (11 bits and fp16's
            range).
        chip: the GPU, or None if it is unknown.

    Raises:
        UnsupportedError: no kernel supports the problem; the message has each kernel's reasons.
    """
    # CPU kernels' limits read these settings too, which may change between calls.
    settings = os.environ.get("ECE408_SIMD"), len(os.sched_getaffinity(0))
    return _select(problem, device, impl, precision, chip, settings)


def select_with_gradients(
    problem: ConvProblem, device: str, impl: str, precision: str = "float32", chip: Chip | None = None
) -> Kernel:
    """Return what ``select`` does; a gradient that the named kernel does not compute gets the fastest one."""
    is_gradient = problem.operands != ConvProblem.operands
    if is_gradient and impl != AUTO and find(impl).not_supported_reasons(problem, chip):
        impl = AUTO
    return select(problem, device, impl, precision, chip)


@lru_cache(maxsize=1024)
def _select(
    problem: ConvProblem, device: str, impl: str, precision: str, chip: Chip | None, settings: tuple[str | None, int]
) -> Kernel:
    tried = []
    for kernel in [find(impl)] if impl != AUTO else _candidates(problem, device, precision, chip):
        reasons = kernel.not_supported_reasons(problem, chip)
        if not reasons:
            return kernel
        tried.append(f"{kernel.name}: {'; '.join(reasons)}")
    raise UnsupportedError(f"no kernel takes {problem} on the {device}: {' | '.join(tried)}")


def _candidates(problem: ConvProblem, device: str, precision: str, chip: Chip | None) -> Iterator[Kernel]:
    """Yield the kernels to try, the best first; those that are not recommended are last."""
    ranks = SERVES[precision]
    candidates = [kernel for kernel in KERNELS if kernel.device == device and kernel.precision in ranks]
    candidates.sort(key=lambda kernel: ranks.index(kernel.precision))
    # The tuning table has plain convolutions only: for all other problems the list's order decides.
    if chip is not None and not problem.needs:
        known = {k.name: k for k in candidates if isinstance(k, CudaKernel) and k.runs_on(chip)}

        def predicted(name: str) -> float:
            # Kernels that are not recommended are last in any case, and a prediction takes a while.
            kernel = known[name]
            return kernel.predicted_milliseconds(problem, chip) if kernel.recommended(problem, chip) else math.inf

        order = {name: place for place, name in enumerate(tuning.ranked_by_time(problem, chip, known, predicted))}
        candidates.sort(key=lambda kernel: order.get(kernel.name, len(order)))

    def recommended(kernel: Kernel) -> bool:
        if isinstance(kernel, CpuKernel):
            return kernel.recommended(problem)
        return chip is None or kernel.recommended(problem, chip)

    yield from filter(recommended, candidates)
    yield from (kernel for kernel in candidates if not recommended(kernel))


def slower_than_mxnet(w_shape: tuple[int, ...], device: str, groups: int = 1, dense: bool = True) -> bool:
    """Return whether ``New`` is probably slower than MXNet's own Convolution in its place, inside a network.

    w_shape: (M, C / G, K, L); ``dense``: stride and dilation are 1. On the CPU oneDNN keeps arrays in a blocked layout
    from layer to layer, and fuses BatchNorm and activations, where the numbers of channels allow it; other layers take
    its plain matrix product, which is slower than our kernels. ``winograd_gemm`` is faster on wide layers all the same
    (measured by benchmarks/replaced_layers.py). On the GPUs that MXNet has code for, cuDNN is faster on filters of more
    than one element with many channels: the kernels for wide layers need Hopper.
    """
    filters, channels, kernel, width = w_shape
    if device == "gpu":
        return channels >= _WIDE and kernel > 1
    if groups > 1:
        return (channels == 1 or channels % _BLOCK_OF_GROUP == 0) and filters % _BLOCK == 0
    if dense and kernel == width == 3 and min(channels, filters) >= _WIDE:
        return False
    return (channels <= _IMAGE_CHANNELS or channels % _BLOCK == 0) and filters % _BLOCK == 0
