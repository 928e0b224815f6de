"""A network on one GPU: its parameters there, and for each batch size a plan and memory.

Parameters are float32 arrays of MXNet's, which may change between calls. MXNet says nothing about that, so every
call compares them, bit by bit, with a copy of what was sent: the threads do it while the GPU computes
the last images, and where something differs it is sent and the call is computed again. Calls on one GPU take turns.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ece408_op.errors import DeviceError
from ece408_op.plugin import host_context, op_times
from ece408_op.plugin.host_context import STAGING_BYTES, Gpu
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import cuda
from ece408_op.runtime.copy_pipeline import INPUT, Chunk, Pipeline, StagingBuffer, Transfer, chunks_of
from ece408_op.runtime.launch import ceil_div

from ._fuse import fused
from ._gpu import Chooser, timing
from ._op_definition import Shape, size
from ._plan import infer, plan, splits
from ._run import Program
from .graph import parse

#: Chunks on the device at a time: copies of one overlap with the computation of the other.
STAGES = 2
#: Bytes of data and outputs of a chunk, and chunks at most: enough to overlap, few enough to launch.
CHUNK_BYTES, MOST_CHUNKS = 12 << 20, 4
#: Threads that copy at most, and the bytes that are worth one more: they hand the interpreter's lock to each other,
#: and to the one that launches, at each call of CUDA. Other settings took up to a fifth more on the course's networks.
_THREADS, _THREAD_BYTES = 8, 8 << 20
#: The share of the GPU's free memory that a plan may take.
_SHARE = 0.8
_LEAST_PIECE, _COMPARED_BYTES = 2 << 20, 4 << 20
_KEPT_PLANS, _KEPT_ENGINES = 3, 4
_TO_DEVICE, _TO_HOST = 1, 2


#: What computes the network, in order, and its outputs.
_Bound = tuple[list[Callable[[], None]], list[Any]]


class _Plan:
    """A program for so many images, with its memory: the block, and sets of data and output buffers."""

    def __init__(self, engine: Engine, images: int, shapes: dict[str, Shape]) -> None:
        cp = cuda.cupy()
        network = engine.network
        whole = images == next(iter(shapes.values()))[0]
        every = infer(network, shapes if whole else {n: (images, *s[1:]) for n, s in shapes.items()})
        stages = range(1 if whole else STAGES)
        self.program = Program(network, every, engine.chooser.step)
        self.block = cp.cuda.alloc(max(1, self.program.plan.bytes))
        self.data = [[cp.zeros(every[v.value], np.float32) for v in network.data] for _ in stages]
        self.outputs = [[cp.empty(every[v], np.float32) for _, v in network.outputs] for _ in stages]
        self._bound: dict[tuple[int, ...], _Bound] = {}

    def prepare(self, parameters: dict[int, Any]) -> None:
        """Take new parameters, by value number."""
        self.program.prepare(parameters)
        self._bound.clear()

    def run(self, given: dict[int, Any], data: Sequence[Any]) -> list[Any]:
        """Put the network's work on the current stream; its outputs, which the next run overwrites."""
        key = tuple(array.data.ptr for array in data)
        if key not in self._bound:
            if len(self._bound) > STAGES:
                self._bound.clear()
            self._bound[key] = self.program.bind(given, self.view)
        calls, outputs = self._bound[key]
        for call in calls:
            call()
        return outputs

    def view(self, offset: int, shape: Shape) -> Any:
        """The array of that shape in the block."""
        return cuda.cupy().ndarray(shape, np.float32, self.block + offset)


class Engine:
    """One network on one GPU; see the file's head."""

    def __init__(self, text: str, impl: str, precision: str, number: int) -> None:
        self.network = fused(parse(text))
        self.gpu: Gpu = host_context.gpu(number)
        with self.gpu.device, self.gpu.stream:
            self.chooser = Chooser(impl, precision, number, cuda.chip(number))
        self._sent: list[np.ndarray] = []
        self._there: dict[int, Any] = {}
        self._plans: OrderedDict[tuple[Shape, ...], tuple[int, _Plan]] = OrderedDict()

    def run(self, data: Sequence[np.ndarray], parameters: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Fill the outputs from data and parameters, each in the network's order: C-contiguous float32.

        Outputs share no memory with the others. Returns when they are filled. Raises DeviceError where the GPU fails or
        has no room for one image.
        """
        with self.gpu.lock, self.gpu.device, cuda.reported("network"):
            known = bool(self._there) or not parameters
            if not known:
                self._send(parameters)
            try:
                images, held = self._planned([array.shape for array in data])
                self.chooser.hold = lambda: self.gpu.gate.held(self.gpu.stream, held.data[0][0])
                differ = self._flow(images, held, data, outputs, parameters if known else ())
                if differ:
                    self._timings(held, data)
                    self._send(parameters)
                    self._flow(images, held, data, outputs, ())
            except BaseException:
                self.gpu.wait()
                raise
            finally:
                self.chooser.hold = None
            for record in self._timings(held, data):
                op_times.record(record)

    def compute(self, data: Sequence[Any], parameters: Sequence[np.ndarray] = ()) -> list[Any]:
        """The outputs of data that is on the GPU already, CuPy arrays, all images at once on the current stream.

        parameters: sent first where they are given. The outputs are the network's own memory until the next call.
        """
        with self.gpu.lock, self.gpu.device:
            if parameters:
                self._send(parameters)
            _, held = self._planned([array.shape for array in data], at_once=True)
            return held.run(self._given(data), data)

    def calls(self, data: Sequence[Any]) -> dict[str, Callable[[], None]]:
        """What computes each node by name, on data that is on the GPU already: for measuring one by one."""
        with self.gpu.lock, self.gpu.device:
            _, held = self._planned([array.shape for array in data], at_once=True)
            calls, _ = held.program.bind(self._given(data), held.view)
            names = [node.name for node in self.network.nodes if not node.kind.view or node.activation]
            return dict(zip(names, calls))

    def _given(self, data: Sequence[Any]) -> dict[int, Any]:
        return {**self._there, **{v.value: array for v, array in zip(self.network.data, data)}}

    def _send(self, parameters: Sequence[np.ndarray]) -> None:
        """Send all parameters, and keep a copy of what was sent."""
        cp = cuda.cupy()
        with self.gpu.stream:
            self._sent = [array.copy() for array in parameters]
            self._there = {v.value: cp.asarray(array) for v, array in zip(self.network.parameters, self._sent)}
            for _, held in self._plans.values():
                held.prepare(self._there)
        cuda.wait("network", self.gpu.stream)

    def _planned(self, shapes: Sequence[Shape], at_once: bool = False) -> tuple[int, _Plan]:
        """The images of a chunk, and the plan for them; made at the first call with such data."""
        key = (*shapes, (int(at_once),))
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        named = {v.name: shape for v, shape in zip(self.network.data, shapes)}
        while len(self._plans) >= _KEPT_PLANS:
            self._plans.popitem(last=False)
        # What CuPy keeps of memory that was freed counts as taken otherwise.
        pool = cuda.cupy().get_default_memory_pool()
        pool.free_all_blocks()
        images = shapes[0][0] if at_once else self._images(named)
        while True:
            try:
                found = images, self._made(images, named)
                break
            except cuda.cupy().cuda.memory.OutOfMemoryError as error:
                # Other networks on this GPU wait for their turn: their memory can go.
                for other in [self, *_engines.values()]:
                    if other.gpu is self.gpu:
                        other._plans.clear()
                pool.free_all_blocks()
                if images == 1 or at_once or not splits(self.network, named):
                    raise DeviceError(
                        f"the GPU's memory: expected room for {images} image{'s' if images > 1 else ''} of the "
                        f"network, got {error}; end what else uses the GPU, or take smaller images"
                    ) from error
                images = ceil_div(images, 2)
        self._plans[key] = found
        return found

    def _images(self, shapes: dict[str, Shape]) -> int:
        """How many images a chunk has: so that copies overlap computing, and that its memory fits."""
        batch = next(iter(shapes.values()))[0]
        if not splits(self.network, shapes):
            return batch
        every = infer(self.network, {name: (1, *shape[1:]) for name, shape in shapes.items()})
        moved = [v.value for v in self.network.data] + [v for _, v in self.network.outputs]
        image = ITEM_BYTES * sum(size(every[value]) for value in moved)
        count = min(MOST_CHUNKS, max(1, batch * image // CHUNK_BYTES))
        images = ceil_div(batch, count)
        room = _SHARE * self.gpu.cuda.runtime.memGetInfo()[0]
        while images > 1:
            there = infer(self.network, {name: (images, *shape[1:]) for name, shape in shapes.items()})
            if plan(self.network, there).bytes + STAGES * image * images <= room:
                break
            images = ceil_div(images, 2)
        return images

    def _made(self, images: int, shapes: dict[str, Shape]) -> _Plan:
        """A plan, its kernels compiled and run once: a first run is not to be timed."""
        with self.gpu.stream:
            held = _Plan(self, images, shapes)
            held.prepare(self._there)
            held.run(self._given(held.data[0]), held.data[0])
        cuda.wait("network", self.gpu.stream)
        return held

    def _flow(
        self,
        images: int,
        held: _Plan,
        data: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        compared: Sequence[np.ndarray],
    ) -> bool:
        """Compute all chunks; whether some of the parameters compared differ from those that were sent."""
        differ = threading.Event()
        checks = [
            lambda piece=piece: None if _same(*piece) else differ.set()  # type: ignore[misc]
            for pair in zip(compared, self._sent)
            for piece in _pieces(*pair)
        ]
        copied = sum(array.nbytes for array in (*data, *outputs, *compared))
        threads = max(1, min(self.gpu.threads, _THREADS, copied // _THREAD_BYTES))
        chunks = chunks_of(len(data[0]), images, STAGES) if images < len(data[0]) else [Chunk(0, 1)]
        if len(chunks) == 1:
            data, outputs = ([array.reshape(1, -1) for array in arrays] for arrays in (data, outputs))
        # All threads have a part of each chunk.
        share = chunks[0].images * sum(array[0].nbytes for array in data) // threads
        most = min(STAGING_BYTES, max(_LEAST_PIECE, share)) // ITEM_BYTES
        Pipeline(_Work(self, held), chunks, data, outputs, most, checks=checks).run(threads)
        return differ.is_set()

    def _timings(self, held: _Plan, data: Sequence[np.ndarray]) -> list[op_times.OpTime]:
        """What the convolutions took since they were last asked."""
        shapes = [held.program.plan.shapes[node.inputs[0]] for node in self.network.nodes]
        found = [
            timing(node, step, (len(data[0]), *shape[1:]))
            for node, step, shape in zip(self.network.nodes, held.program.steps, shapes)
        ]
        return [record for record in found if record is not None]


class _Work:
    """The device as the pipeline asks for it."""

    def __init__(self, engine: Engine, held: _Plan) -> None:
        self._engine, self._held, self._gpu = engine, held, engine.gpu

    def acquire(self) -> StagingBuffer:
        return self._gpu.staging.get()

    def release(self, buffer: StagingBuffer) -> None:
        self._gpu.staging.put(buffer)

    def copy_in(self, buffer: StagingBuffer, transfer: Transfer, after: Any) -> None:
        self._copy(buffer, transfer, after)

    def copy_out(self, buffer: StagingBuffer, transfer: Transfer, after: Any) -> None:
        self._copy(buffer, transfer, after)

    def compute(self, this: Chunk) -> Any:
        gpu, held = self._gpu, self._held
        with gpu.device, gpu.stream:
            data = held.data[this.stage]
            for source, target in zip(held.run(self._engine._given(data), data), held.outputs[this.stage]):
                target.data.copy_from_device_async(source.data, source.nbytes, gpu.stream)
            return gpu.stream.record()

    def _copy(self, buffer: StagingBuffer, transfer: Transfer, after: Any) -> None:
        inward = transfer.role == INPUT
        buffers = self._held.data if inward else self._held.outputs
        there = buffers[transfer.stage][transfer.array].data.ptr + ITEM_BYTES * transfer.start
        target, source = (there, buffer.address) if inward else (buffer.address, there)
        if after is not None:
            buffer.stream.wait_event(after)
        direction = _TO_DEVICE if inward else _TO_HOST
        self._gpu.cuda.runtime.memcpyAsync(target, source, transfer.host.nbytes, direction, buffer.stream.ptr)
        buffer.stream.synchronize()


@cache
def _memcmp() -> Any:
    function = ctypes.CDLL(None).memcmp
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return function


def _pieces(a: np.ndarray, b: np.ndarray) -> list[tuple[int, int, int]]:
    """Addresses in both arrays, and bytes from there on."""
    return [
        (a.ctypes.data + first, b.ctypes.data + first, min(_COMPARED_BYTES, a.nbytes - first))
        for first in range(0, a.nbytes, _COMPARED_BYTES)
    ]


def _same(a: int, b: int, count: int) -> bool:
    # Bits, so that a NaN is equal to itself; ctypes lets go of the interpreter's lock meanwhile.
    return not _memcmp()(a, b, count)


_engines: OrderedDict[tuple[str, str, str, int], Engine] = OrderedDict()
_lock = threading.Lock()


def engine(text: str, impl: str, precision: str, number: int) -> Engine:
    """The engine of that graph and those options; a few are kept, so that a graph bound again finds its own.

    Raises DeviceError where there is no GPU of that number, and GraphError as parse.
    """
    key = (text, impl, precision, number)
    with _lock:
        if key not in _engines:
            while len(_engines) >= _KEPT_ENGINES:
                _engines.popitem(last=False)
            _engines[key] = Engine(*key)
        _engines.move_to_end(key)
        return _engines[key]


# Run after the package's wait for pending calls, as host_context's.
atexit.register(_engines.clear)
