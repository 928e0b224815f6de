"""A GPU of NumPy arrays: all of a network but its kernels runs on any machine.

NumPy replaces CuPy, and memory starts as NaN. The package chooses the implementations as for an H200 and binds them to
arrays, and each launch is checked for the arrays that it names. NumPy computes what kernels and cuBLAS compute.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from contextlib import contextmanager, nullcontext, suppress
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import numpy_operators
import pytest
from cuda_layers import H200

from ece408_op.network import _blas, _gpu_update, engine, trainer
from ece408_op.network._data_parallel import Rank
from ece408_op.network._definition import Arrays, Trained
from ece408_op.network._elementwise import Activation, Function
from ece408_op.network._formats import SplitArray
from ece408_op.network._layers import BatchNorm, Convolution, Pooling
from ece408_op.plugin import host_context
from ece408_op.plugin.host_context import STAGING_BYTES
from ece408_op.runtime import cuda, nccl, pinned
from ece408_op.runtime.copy_pipeline import StagingBuffer
from ece408_op.runtime.launch import Launch

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


class Device(nullcontext):
    """A device, by default one that no GPU has."""

    def __init__(self, number=-1):
        super().__init__()
        self.id = number


class Array(np.ndarray):
    """An array whose ``data`` is a pointer, like CuPy's."""

    device = Device()

    @property
    def data(self):
        return Pointer(self)

    def set(self, array):
        self[...] = array


def _on_block(shape, dtype, pointer):
    count = int(np.prod(shape)) * 4
    return pointer.block[pointer.offset : pointer.offset + count].view(dtype).reshape(shape).view(Array)


Error, OutOfMemoryError = type("Error", (Exception,), {}), type("OutOfMemoryError", (Exception,), {})


def no_room(*given):
    """Stand for a function of CuPy's that finds no memory."""
    raise OutOfMemoryError("no room")


class Stream(nullcontext):
    """A stream whose work is done when it is queued."""

    ptr = 0

    def record(self, event=None):
        return event or self

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


class Module(SimpleNamespace):
    """What is not replaced is NumPy's."""

    def __getattr__(self, name):
        return getattr(np, name)


def fake_cupy():
    memory = {"memGetInfo": lambda: (Gpu.free, MEMORY), "memcpyAsync": _copy}
    memory |= {"hostRegister": lambda address, size, flags: Gpu.pin(address, size), "hostUnregister": Gpu.unpin}
    runtime = SimpleNamespace(**memory, getDevice=lambda: Device().id, CUDARuntimeError=Error)
    namespace = SimpleNamespace(
        alloc=_alloc,
        Event=lambda: SimpleNamespace(record=lambda: None),
        get_current_stream=Stream,
        get_elapsed_time=lambda start, end: 1.0,
        runtime=runtime,
        MemoryPool=lambda allocate: SimpleNamespace(malloc=_alloc, free_all_blocks=lambda: None),
        using_allocator=lambda malloc: nullcontext(),
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        driver=SimpleNamespace(CUDADriverError=Error),
        compiler=SimpleNamespace(CompileException=Error),
    )
    return Module(
        cuda=namespace,
        ndarray=_on_block,
        zeros=lambda *args: np.zeros(*args).view(Array),
        empty=lambda shape, dtype: np.full(shape, 0 if dtype is np.int32 else np.nan, dtype).view(Array),
        asarray=lambda array: np.array(array).view(Array),
        ascontiguousarray=lambda array: np.ascontiguousarray(array).view(Array),
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
    )


class Gpu:
    """What host_context has for a GPU."""

    #: The largest piece of memory that there is, and what is free.
    largest = free = MEMORY
    #: The bytes of pinned memory, by its address.
    registered = {}

    @classmethod
    def pin(cls, address, size):
        if address in cls.registered:
            raise Error("pinned already")
        cls.registered[address] = size

    @classmethod
    def unpin(cls, address):
        del cls.registered[address]

    def __init__(self, threads=4, number=-1):
        self.cuda, self.device, self.stream, self.pinned_stream = fake_cupy().cuda, Device(number), Stream(), Stream()
        self.lock, self.threads, self.staging = threading.Lock(), threads, SimpleQueue()
        for _ in range(threads):
            self.staging.put(StagingBuffer(np.empty(STAGING_BYTES // 4, np.float32), Stream()))

    copy, copy_pinned, wait_for = host_context.Gpu.copy, host_context.Gpu.copy_pinned, host_context.Gpu.wait_for
    _queue_copy = host_context.Gpu._queue_copy
    blocked = nullcontext

    def pinned(self, size):
        return np.full(size, 0xFF, np.uint8)

    def wait(self):
        assert self.staging.qsize() == self.threads


class Cublas:
    """The functions of cuBLAS that networks use, on host memory, and CuPy's module for it."""

    create = staticmethod(lambda: 1)
    getVersion = staticmethod(lambda handle: 130_000)  # noqa: N815
    cublasSetStream_v2 = cublasSetWorkspace_v2 = staticmethod(lambda *arguments: 0)  # noqa: N815

    @staticmethod
    def cublasGemmStridedBatchedEx(*arguments):  # noqa: N802
        _, transa, transb, m, n, k, _, a, a_type, lda, stride_a, b, b_type, ldb, stride_b, _, c, c_type = arguments[:18]
        ldc, stride_c, count, compute_type, algorithm = arguments[18:]
        assert (transb, a_type, b_type, c_type, compute_type, algorithm) == (0, 0, 0, 0, 68, -1)

        def rows(address, length, used, leading):
            floats = (ctypes.c_float * (leading * (length - 1) + used)).from_address(address)
            return np.lib.stride_tricks.as_strided(np.frombuffer(floats, "f"), (length, used), (4 * leading, 4))

        for number in range(count):
            # Column-major matrices: the rows in memory are those of the transposed ones.
            first = a + 4 * number * stride_a
            factor = rows(first, m, k, lda).T if transa else rows(first, k, m, lda)
            rows(c + 4 * number * stride_c, n, m, ldc)[...] = rows(b + 4 * number * stride_b, n, k, ldb) @ factor
        return 0


def checked(program, batch, arrays, given=None):
    """Check a launch's arguments in place of the launch."""
    plan = program.plan
    steps = (*plan.setup, *plan.steps(min(batch, plan.images_per_launch)))
    named = {a for step in steps for a in (step.args if isinstance(step, Launch) else (step.source,))}
    missing = {name for name in named if isinstance(name, str)} - {*arrays, *plan.scratch, "first", "images"}
    assert not missing, (program.name, missing)
    return lambda: None


def prepared(program, batch, arrays, scratch=None):
    """Check a launch that takes the device from its array x."""
    assert "x" in arrays
    return checked(program, batch, arrays)


def _plain(array):
    """Return what stands for a split activation: float32 values in its memory, in NCHW."""
    if not isinstance(array, SplitArray):
        return array
    return array.values[: math.prod(array.shape)].reshape(array.shape)


def computed_by_numpy(node, chosen):
    """Have a computation make its launches, which are checked, and then compute the node by NumPy."""
    bind, scratch_bytes, name = chosen.bind, chosen.scratch, getattr(chosen, "name", type(chosen).__name__)

    def bind_both(inputs, out, scratch):
        # cuDNN, if it is installed, computes on a GPU alone.
        launches = name != "cudnn" and bind(inputs, out, scratch if scratch_bytes else None)
        inputs, out = [_plain(each) for each in inputs], _plain(out)
        complete = name == "ArrayComputation" or (name == "cublas" and len(inputs) == 2 and not node.epilogue)

        def call():
            scratch.fill(np.nan)
            with np.errstate(all="ignore"):
                x = np.copy(inputs[0])  # a BatchNorm with computed parameters is computed by its launch, maybe in place
                if launches:
                    launches()
                if not complete:
                    numpy_operators.compute(node.operator, [x, *inputs[1:]], out, node.epilogue)

        return call

    chosen.bind, chosen.scratch, chosen.repeatable = bind_both, scratch_bytes + 4, False
    return chosen


class Chooser(engine.Chooser):
    """The package's choices, by node in ``chosen``, and NumPy's computations."""

    chosen: dict = {}

    def __init__(self, impl, precision, chip):
        super().__init__(impl, precision, chip)
        matmul, self.arrays = self.arrays.matmul, Arrays()
        self.arrays.matmul = lambda a, b, out, **words: matmul(a, b, out.view(Array), **words)  # by cuBLAS

    def choose(self, node, inputs, output, *values):
        chosen = super().choose(node, inputs, output, *values)
        Chooser.chosen[node.name] = chosen
        return computed_by_numpy(node, chosen)


#: Operators whose steps of training are launches of our kernels.
LAUNCHED = (Convolution, BatchNorm, Pooling, Activation, Function)


class Operators(trainer.GpuOperators):
    """The package's launches in training, and NumPy's computations."""

    def train(self, node, inputs, out, seed):
        with np.errstate(all="ignore"):
            if isinstance(node.operator, LAUNCHED):
                super().train(node, inputs, out, seed)
            if not self._exchanges(node):
                return numpy_operators.train(node, inputs, out, seed)
            x, mine = self._whole_batch(inputs[0])
            whole = np.empty(x.shape, np.float32)
            saved = numpy_operators.train(node, [x, *inputs[1:]], whole)
            out[...] = whole[mine]
            return saved

    def gradients(self, node, given, gradient, wanted):
        with np.errstate(all="ignore"):
            if isinstance(node.operator, LAUNCHED):
                super().gradients(node, given, gradient, wanted)
            if not (self._exchanges(node) and wanted[0]):
                return numpy_operators.gradients(node, given, gradient, wanted)
            (x, _), (y, _), (dy, mine) = map(self._whole_batch, (given.inputs[0], given.out, gradient))
            given = Trained([x, *given.inputs[1:]], y, given.saved)
            to_data, *others = numpy_operators.gradients(node, given, dy, wanted)
            if self.rank.number:
                others = [None if one is None else np.zeros_like(one) for one in others]
            return [to_data[mine], *others]

    def _exchanges(self, node):
        return self.rank and isinstance(node.operator, BatchNorm) and not node.operator.use_global_stats

    def _whole_batch(self, array):
        """Return the whole batch's array, and the images of this GPU's share."""
        group, whole = self.rank.group, []
        group.barrier(self.rank.number, (array, whole), _concatenate)
        return whole[0].view(Array), group.shares[self.rank.number]


def _concatenate(items):
    """Append the whole batch's array to each rank's list."""
    whole = np.concatenate([array for array, _ in items])
    for _, found in items:
        found.append(whole)


def updated(rule, updates, apply=_gpu_update.apply):
    apply(rule, updates)
    for one in updates:
        numpy_operators.update(rule, one)


class Communicator:
    """NCCL on NumPy's arrays."""

    aborted = False

    def abort(self):
        self.aborted = True

    def watch(self, event):
        pass

    def all_gather(self, arrays, streams):
        assert len(arrays) == len(streams) > 1
        whole = np.stack([array[part] for part, array in enumerate(arrays)])
        for array in arrays:
            array[...] = whole

    def reduce(self, sources, sums, streams):
        assert len(sources) == len(streams) > 1
        for number, (_, total) in enumerate(sums):
            total[...] = sum(arrays[number] for arrays in sources)


def captured_once(call, stream):
    """Return a CUDA graph that keeps nothing of the call and launches nothing."""
    call()
    return SimpleNamespace(launch=lambda stream: None)


def launched(self, graph):
    """Launch the graphs of all ranks at the same time: each is a call, whose barriers are those of its capture."""
    self.group.barrier(self.number, None, len)
    graph.launch(self.gpu.stream)


def forget():
    """Forget networks, and the addresses of this test's arrays, where a later test's may lie."""
    engine.clear()
    _gpu_update.pending.clear()
    pinned.wanted.clear()


@contextmanager
def installed():
    """Have the package use this GPU under the number 0, and others like it; yields it. Networks do not stay."""
    gpus, module = [Gpu(number=number) for number in range(4)], fake_cupy()
    forget()
    Chooser.chosen = {}
    backends = ModuleType("cupy_backends")  # Hypothesis makes a set of the modules, so a SimpleNamespace would not do
    backends.cublas = Cublas
    patched = {"cupy": lambda: module, "chip": lambda number=0: H200, "prepared_launch": prepared, "execute": checked}
    patched["fill_with_zeros"] = lambda array, stream: None
    patched["captured"] = lambda call, stream: SimpleNamespace(launch=lambda stream: call())
    libraries = SimpleNamespace(**{**vars(ctypes), "CDLL": lambda name: Cublas})
    with (
        mock.patch.multiple(cuda, **patched),
        mock.patch.object(host_context, "gpu", lambda number=0: gpus[number]),
        mock.patch.object(nccl, "communicator", lambda numbers: Communicator()),
        mock.patch.object(Rank, "launch", launched),
        mock.patch.object(engine, "Chooser", Chooser),
        mock.patch.object(trainer, "GpuOperators", Operators),
        mock.patch.object(_gpu_update, "apply", updated),
        mock.patch.object(_blas, "ctypes", libraries),
        pytest.MonkeyPatch.context() as patch,
    ):
        # mock.patch.dict would forget modules that are imported meanwhile.
        patch.setitem(sys.modules, "cudnn", None)
        for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.libs"):
            patch.setitem(sys.modules, name, backends)
        try:
            yield gpus[0]
        finally:
            # What is queued in MXNet would be computed without this GPU later, amid another test.
            if "mxnet" in sys.modules:
                with suppress(Exception):
                    sys.modules["mxnet"].nd.waitall()
    forget()
