"""Prepared launches: their arguments are built once, and a call sets the addresses only and calls the driver.

CuPy builds a launch's arguments at each call, which for one small image takes longer than the kernel. Nor does it know
programmatic dependent launches: the driver lets such a kernel begin before the one before it has ended, and the kernel
waits by itself (``griddepcontrol.wait``) before it touches what the other one writes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np

from ece408_op.errors import DeviceError

from .launch import Launch, TensorMap, round_up

#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
_PROGRAMMATIC = 6
#: The bytes of a CUtensorMap, and what its address on the host has to be a multiple of.
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
#: CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, and the swizzles by the bytes that they span.
_FLOAT16, _L2_PROMOTION, _SWIZZLES = 6, 2, {32: 1, 64: 2, 128: 3}


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: which, and a union of 64 bytes that begins with an int."""

    _fields_ = (("which", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def launch_function() -> Any:
    """Return the driver's function, None where the driver, that of CUDA 11.7, is too old to have it."""
    call = getattr(ctypes.CDLL("libcuda.so.1"), "cuLaunchKernelEx", None)
    if call:
        call.argtypes = (ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
    return call


class Addresses:
    """The addresses of one call, by name, in memory that prepared launches point to."""

    def __init__(self, names: Iterable[str]) -> None:
        self._indices = {name: index for index, name in enumerate(names)}
        self._values = (ctypes.c_uint64 * len(self._indices))()

    def fill(self, given: Mapping[str, int]) -> None:
        """Set some of them."""
        for name, address in given.items():
            if name in self._indices:  # a kernel may not use an array
                self._values[self._indices[name]] = address

    def location(self, name: str) -> int:
        """Return where the address of that name is stored."""
        return ctypes.addressof(self._values) + 8 * self._indices[name]

    def __getitem__(self, name: str) -> int:
        return int(self._values[self._indices[name]])


class PreparedLaunch:
    """One launch, complete except for addresses and stream; for one caller at a time.

    ``function`` is CuPy's, of the current device.
    """

    def __init__(self, function: Any, step: Launch, addresses: Addresses) -> None:
        self._function, self._step, self._addresses = function, step, addresses
        self._handle = function.kernel.ptr
        self._values = [_value(a) for a in step.args]
        self._maps = [(a, buffer) for a, buffer in zip(step.args, self._values) if isinstance(a, TensorMap)]
        locations = [addresses.location(a) if isinstance(a, str) else ctypes.addressof(a) for a in self._values]
        self._pointers = (ctypes.c_void_p * len(locations))(*locations)
        self._attribute = _Attribute(_PROGRAMMATIC, 0, 1)
        attributes = ctypes.pointer(self._attribute)
        self._config = _Config(step.grid, step.block, step.shared, None, attributes, int(step.programmatic))
        self._reference = ctypes.byref(self._config)

    def enqueue(self, stream: Any) -> None:
        """Put the launch on a CuPy stream; raises CuPy's errors where it cannot be launched."""
        call = launch_function()
        for tensor, buffer in self._maps:
            buffer.raw = _encoded(tensor, self._addresses[tensor.buffer])
        self._config.stream = stream.ptr
        failed = call(self._reference, self._handle, self._pointers, None) if call else None
        if failed != 0:
            # CuPy can launch it with an older driver, and reports what is wrong; but it knows no tensor maps.
            step = self._step
            if self._maps:
                got = "a driver without cuLaunchKernelEx" if call is None else f"error {failed} of cuLaunchKernelEx"
                raise DeviceError(f"{step.entry}: expected the driver to launch it, got {got}")
            args = tuple(np.uint64(self._addresses[a]) if isinstance(a, str) else a for a in step.args)
            with stream:
                self._function(step.grid, step.block, args, shared_mem=step.shared)


def _value(argument: Any) -> Any:
    """Return the memory of an argument, a tensor map's to be filled at each launch; a buffer's name as it is."""
    if isinstance(argument, str):
        return argument
    if isinstance(argument, TensorMap):
        return ctypes.create_string_buffer(_MAP_BYTES)
    return ctypes.create_string_buffer(argument.tobytes(), 8)


@lru_cache(maxsize=256)
def _encoded(tensor: TensorMap, address: int) -> bytes:
    """Return the TMA descriptor (CUtensorMap) of the tensor at that address; raises DeviceError if the driver refuses.

    The driver's calls are described in the CUDA Driver API, "Tensor Map Object Management".
    """
    buffer = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    place = round_up(ctypes.addressof(buffer), _MAP_ALIGNMENT)
    rank = len(tensor.sizes)
    strides = [2 * prod(tensor.sizes[:dimension]) for dimension in range(1, rank)]
    begin = (
        ctypes.c_void_p(place),
        ctypes.c_int(_FLOAT16),
        ctypes.c_uint(rank),
        ctypes.c_void_p(address + tensor.offset),
        (ctypes.c_uint64 * rank)(*tensor.sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
    )
    lower, upper, steps = tensor.im2col or ((), (), (1,) * (rank - 2))
    end = (
        (ctypes.c_uint * rank)(1, *steps, 1),
        ctypes.c_int(0),
        ctypes.c_int(_SWIZZLES[2 * tensor.box[0]]),
        ctypes.c_int(_L2_PROMOTION),
        ctypes.c_int(0),  # what lies outside reads as zero
    )
    driver = ctypes.CDLL("libcuda.so.1")
    try:
        if tensor.im2col is None:
            failed = driver.cuTensorMapEncodeTiled(*begin, (ctypes.c_uint * rank)(*tensor.box), *end)
        else:
            corners = (ctypes.c_int * (rank - 2))(*lower), (ctypes.c_int * (rank - 2))(*upper)
            channels, pixels = map(ctypes.c_uint, tensor.box)
            failed = driver.cuTensorMapEncodeIm2col(*begin, *corners, channels, pixels, *end)
    except AttributeError as error:
        raise DeviceError(f"TMA descriptors: expected a driver for CUDA 12 or later, got {error}") from error
    if failed:
        raise DeviceError(f"TMA descriptors: expected the driver to encode {tensor}, got error {failed}")
    return ctypes.string_at(place, _MAP_BYTES)
