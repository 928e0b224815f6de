"""TMA descriptors (CUtensorMap): made by the driver on the host, passed to a kernel by value.

The driver's calls are described in the CUDA Driver API, "Tensor Map Object Management".
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

from ece408_op.errors import DeviceError

from .launch import TensorMap

#: The bytes of a CUtensorMap, and what its address on the host has to be a multiple of.
BYTES, _ALIGNMENT = 128, 64
#: CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, and the swizzles by the bytes that they span.
_FLOAT16, _L2_PROMOTION, _SWIZZLES = 6, 2, {32: 1, 64: 2, 128: 3}


@lru_cache(maxsize=256)
def encoded(tensor: TensorMap, address: int) -> bytes:
    """The descriptor of the tensor at that address; raises DeviceError where the driver refuses it."""
    buffer = ctypes.create_string_buffer(BYTES + _ALIGNMENT)
    place = -(-ctypes.addressof(buffer) // _ALIGNMENT) * _ALIGNMENT
    rank = len(tensor.sizes)
    strides, stride = [], 2
    for size in tensor.sizes[:-1]:
        stride *= size
        strides.append(stride)
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
    return ctypes.string_at(place, BYTES)
