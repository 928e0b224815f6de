"""Views of MXNet's arrays for kernels, without a copy, and checks of the GPUs that MXNet can use.

MXNet's engine runs operators asynchronously. Inside ``CustomOp.forward`` the inputs are ready and the outputs have no
other users; anywhere else, wait for an array before you read its memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ece408_op.errors import DeviceError, ProblemError
from ece408_op.runtime import c_calls, cuda, memory
from ece408_op.runtime.install_hint import command

#: The compute capabilities that MXNet's GPU wheels have machine code for; they have no PTX to compile for others.
MXNET_CAPABILITIES = ((5, 0), (6, 0), (7, 0), (8, 0), (8, 6))

#: MXNet's number for GPUs.
_GPU = 2


def cpu_view(array: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Return a writable float32 view of a CPU NDArray's memory; ``shape`` is the array's, if the caller knows it.

    The array must be dense float32 and must outlive the view. Its memory is C-contiguous, even for a slice of another
    array. Raises MXNetError if MXNet does not return a pointer.
    """
    if shape is None:
        shape = array.shape
    if 0 in shape:
        return np.empty(shape, np.float32)
    return view_at(address_of(array), shape)


def view_at(address: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return a writable float32 view of C-contiguous memory, which must outlive the view; not for an empty shape."""
    floats: Any = (ctypes.c_float * math.prod(shape)).from_address(address)
    return np.ndarray(shape, np.float32, floats)


def addresses(arrays: Iterable[Any]) -> list[int]:
    """Return the addresses of the memory of CPU NDArrays, 0 for an empty one that has none; see ``cpu_view``."""
    return addresses_of([array.handle.value for array in arrays])


def addresses_of(handles: Sequence[int]) -> list[int]:
    """Return the addresses of the memory of CPU NDArrays with these handles, 0 for an empty one that has none."""
    found = np.zeros(len(handles), np.int64)
    calls = np.zeros((len(handles), c_calls.ARGUMENTS), np.int64)
    calls[:, 0] = handles
    calls[:, 1] = memory.address(found) + found.itemsize * np.arange(len(found))
    lib, check_call = _mxnet()
    check_call(c_calls.any_nonzero(c_calls.address_of(lib.MXNDArrayGetData), calls))
    values: list[int] = found.tolist()
    return values


def address_of(array: Any) -> int:
    """Return the address of the memory of a non-empty NDArray on the CPU or a GPU.

    The array must be dense float32. Its memory is C-contiguous, even for a slice of another array. A GPU kernel needs
    only the address; a view by DLPack would take about 50 microseconds, as long as a small kernel.
    """
    lib, check_call = _mxnet()
    pointer = ctypes.c_void_p()
    check_call(lib.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    assert pointer.value is not None, "an array that is not empty has memory"
    return pointer.value


def on_gpu(array: Any) -> bool:
    """Return whether an NDArray is on a GPU; faster than the property ``context``, which makes objects."""
    lib, check_call = _mxnet()
    kind, number = ctypes.c_int(), ctypes.c_int()
    check_call(lib.MXNDArrayGetContext(array.handle, ctypes.byref(kind), ctypes.byref(number)))
    return kind.value == _GPU


def gpu_problem(context: str) -> str | None:
    """Return why a whole network cannot run on this machine's first GPU, in one sentence; None if it can.

    context: "host" for arrays in mx.cpu(), which the operator copies in and out, with any build of MXNet; "device" for
    arrays in mx.gpu(), where MXNet's own kernels must run too. The function only reads properties of the build and the
    GPU; it computes nothing. (Single calls of mx.nd.Custom on mx.gpu() arrays work on newer GPUs too.)
    """
    if context not in ("host", "device"):
        raise ValueError(f"context: expected 'host' or 'device', got {context!r}")
    try:
        chip = cuda.chip()
        if context == "device":
            require_mxnet_gpu()
    except DeviceError as error:
        return str(error)
    major, minor = chip.capability
    if context == "host" or any(major == known and minor >= least for known, least in MXNET_CAPABILITIES):
        return None
    known = ", ".join(f"{major}.{minor}" for major, minor in MXNET_CAPABILITIES)
    return (
        f"mx.gpu(): expected a GPU that MXNet's own kernels are built for (compute capability {known}, or a later one "
        f"of the same major number), got {major}.{minor} ({chip.name}); run whole networks in the host context "
        "(arrays in mx.cpu(), device='gpu')"
    )


def require_mxnet_gpu() -> None:
    """Raise DeviceError, which says what to do, if this MXNet has no mx.gpu()."""
    import mxnet as mx

    if not mx.runtime.Features().is_enabled("CUDA"):
        raise DeviceError(
            "mx.gpu(): expected a GPU build of MXNet, got its CPU build; pip uninstall mxnet, then "
            f"{command('cu117')}, or compute in the host context (arrays in mx.cpu(), device='gpu'), which any build "
            "can do"
        )
    try:
        count = mx.context.num_gpus()
    except mx.MXNetError as error:
        reason = str(error).strip().splitlines()[0]
        raise DeviceError(f"mx.gpu(): expected a working NVIDIA driver, got {reason}; use the CPU here") from error
    if count == 0:
        raise DeviceError("mx.gpu(): expected at least one NVIDIA GPU, got none; use the CPU here")


def check_float32(dtype: Any, name: str) -> None:
    """Raise ProblemError for a known type other than float32."""
    if dtype is not None and np.dtype(dtype) != np.float32:
        got = np.dtype(dtype).names or [np.dtype(dtype).name]  # bfloat16 is a structure with one field of that name
        raise ProblemError(f"{name}: expected float32, got {got[0]}; convert it with astype")


def check_dense(stype: str, name: str) -> None:
    """Raise ProblemError for a storage type of MXNet's sparse arrays."""
    if stype != "default":
        raise ProblemError(f"{name}: expected a dense array, got a {stype} one; convert it with tostype('default')")


@cache
def _mxnet() -> tuple[Any, Callable[[int], None]]:
    """Return MXNet's library, and MXNet's function that raises for a failed call's status; imports MXNet."""
    from mxnet.base import _LIB, check_call

    return _LIB, check_call
