"""A GPU that is none: NumPy in CuPy's place, so that all of a network but its kernels is tested on any machine."""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np

from ece408_op.network import engine
from ece408_op.network._run import NumpyArrays, Plain
from ece408_op.plugin import host_context
from ece408_op.plugin.host_context import STAGING_BYTES
from ece408_op.runtime import cuda
from ece408_op.runtime.copy_pipeline import StagingBuffer
from ece408_op.runtime.launch import Chip

MEMORY = 1 << 30


class Pointer:
    """Memory from an address on."""

    def __init__(self, block, offset=0):
        self.block, self.offset = block, offset
        self.ptr = block.ctypes.data + offset

    def __add__(self, offset):
        return Pointer(self.block, self.offset + offset)

    def copy_from_device_async(self, source, count, stream):
        ctypes.memmove(self.ptr, source.ptr, count)


class Array(np.ndarray):
    """An array whose ``data`` is a pointer, as CuPy's."""

    @property
    def data(self):
        return Pointer(self)


def _on_block(shape, dtype, pointer):
    count = int(np.prod(shape)) * 4
    return pointer.block[pointer.offset : pointer.offset + count].view(dtype).reshape(shape).view(Array)


class Error(Exception):
    pass


class OutOfMemoryError(Exception):
    pass


class Stream(nullcontext):
    """One that has done its work as soon as it is given."""

    def record(self, event=None):
        return event

    def synchronize(self):
        pass

    def wait_event(self, event):
        pass


def _alloc(count):
    if count > Gpu.largest:
        raise OutOfMemoryError("no room")
    return Pointer(np.full(count, 0xFF, np.uint8))


def _copy(target, source, count, direction, stream):
    ctypes.memmove(target, source, count)


def fake_cupy():
    runtime = SimpleNamespace(memGetInfo=lambda: (MEMORY, MEMORY), memcpyAsync=_copy, CUDARuntimeError=Error)
    namespace = SimpleNamespace(
        alloc=_alloc,
        runtime=runtime,
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        driver=SimpleNamespace(CUDADriverError=Error),
        compiler=SimpleNamespace(CompileException=Error),
    )
    return SimpleNamespace(
        cuda=namespace,
        ndarray=_on_block,
        zeros=lambda *args: np.zeros(*args).view(Array),
        empty=lambda *args: np.empty(*args).view(Array),
        asarray=lambda array: np.array(array).view(Array),
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
    )


class Gate:
    @contextmanager
    def held(self, stream, array):
        yield


class Gpu:
    """What host_context keeps for a GPU."""

    #: The largest piece of memory that there is.
    largest = MEMORY

    def __init__(self, threads=4):
        self.cuda, self.device, self.stream = fake_cupy().cuda, nullcontext(), Stream()
        self.lock, self.threads, self.gate, self.staging = threading.Lock(), threads, Gate(), SimpleQueue()
        for _ in range(threads):
            buffer = StagingBuffer(np.empty(STAGING_BYTES // 4, np.float32))
            buffer.stream = SimpleNamespace(ptr=0, synchronize=lambda: None, wait_event=lambda event: None)
            self.staging.put(buffer)

    def wait(self):
        assert self.staging.qsize() == self.threads


class Chooser:
    """Every step by NumPy, and a count of those made."""

    made = 0

    def __init__(self, impl, precision, device, chip):
        self._arrays, self.hold = NumpyArrays(), None

    def step(self, node, inputs, output):
        Chooser.made += 1
        return Plain(self._arrays, node)


def install(monkeypatch):
    """Put the GPU that is none in its place; returns it."""
    gpu = Gpu()
    module = fake_cupy()
    monkeypatch.setattr(cuda, "cupy", lambda: module)
    monkeypatch.setattr(cuda, "chip", lambda number=0: Chip("none", (9, 0), 1))
    monkeypatch.setattr(host_context, "gpu", lambda number=0: gpu)
    monkeypatch.setattr(engine, "Chooser", Chooser)
    engine._engines.clear()
    return gpu
