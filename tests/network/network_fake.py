"""A GPU of NumPy arrays: all of a network but its kernels runs on any machine.

In CuPy's place stands NumPy, and memory starts as NaN. The package chooses the implementations as for an H100; what
they compute is computed by NumPy.
"""

from __future__ import annotations

import ctypes
import math
import threading
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from queue import SimpleQueue
from types import SimpleNamespace
from unittest import mock

import numpy as np

from ece408_op.network import engine
from ece408_op.plugin import host_context
from ece408_op.plugin.host_context import STAGING_BYTES
from ece408_op.runtime import cuda
from ece408_op.runtime.copy_pipeline import StagingBuffer
from ece408_op.runtime.launch import Chip

MEMORY = 1 << 30
CHIP = Chip("none", (9, 0), 132, 227 * 1024)


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
    """An array whose ``data`` is a pointer, like CuPy's."""

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
    """A stream whose work is done when it is queued."""

    ptr = 0

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
    runtime = SimpleNamespace(memGetInfo=lambda: (Gpu.free, MEMORY), memcpyAsync=_copy, CUDARuntimeError=Error)
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
        empty=lambda *args: np.full(*args[:1], np.nan, *args[1:]).view(Array),
        asarray=lambda array: np.array(array).view(Array),
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
    )


class Hold:
    @contextmanager
    def held(self, stream, array):
        yield


class Gpu:
    """What host_context has for a GPU."""

    #: The largest piece of memory that there is, and what is free.
    largest = free = MEMORY

    def __init__(self, threads=4):
        self.cuda, self.device, self.stream = fake_cupy().cuda, nullcontext(), Stream()
        self.lock, self.threads, self.hold, self.staging = threading.Lock(), threads, Hold(), SimpleQueue()
        for _ in range(threads):
            self.staging.put(StagingBuffer(np.empty(STAGING_BYTES // 4, np.float32), Stream()))

    def wait(self):
        assert self.staging.qsize() == self.threads


class NumpyArrays:
    """NumPy as the operators' own methods ask for it."""

    xp = np

    def matmul(self, a, b, out):
        np.matmul(a, b, out=out)

    def erf(self, x, out):
        out[...] = np.frompyfunc(math.erf, 1, 1)(x).astype(np.float32)


EPILOGUES = {
    None: lambda v: v,
    "relu": lambda v: np.maximum(v, 0),
    "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
    "tanh": np.tanh,
    "softrelu": lambda v: np.logaddexp(v, 0),
    "softsign": lambda v: v / (1 + abs(v)),
}


class Computation:
    """A node by its operator's own method and its epilogue; parameters arrive before it is bound."""

    scratch = 64

    def __init__(self, node):
        self.node, self.prepared = node, False

    def prepare(self, inputs):
        self.prepared = True

    def bind(self, inputs, out, scratch):
        assert self.prepared

        def call():
            scratch.fill(np.nan)
            with np.errstate(all="ignore"):
                self.node.operator.compute(NumpyArrays(), inputs, out)
                out[...] = EPILOGUES[self.node.epilogue](out)

        return call


class Chooser(engine.Chooser):
    """The package's choices, by node in ``chosen``, and NumPy's computations."""

    chosen: dict = {}

    def choose(self, node, inputs, output):
        # With cuDNN installed, the package's choice for a Convolution would build a plan on the GPU.
        if find_spec("cudnn") is None or node.op != "Convolution":
            Chooser.chosen[node.name] = super().choose(node, inputs, output)
        return Computation(node)


@contextmanager
def installed():
    """Have the package use this GPU; yields it. Networks do not stay."""
    gpu, module = Gpu(), fake_cupy()
    engine.clear()
    Chooser.chosen = {}
    with (
        mock.patch.multiple(cuda, cupy=lambda: module, chip=lambda number=0: CHIP),
        mock.patch.object(host_context, "gpu", lambda number=0: gpu),
        mock.patch.object(engine, "Chooser", Chooser),
    ):
        yield gpu
    engine.clear()
