"""Inference on one or several GPUs of one host, whose shares of the images differ by at most one.

Parameters are float32 arrays that MXNet may change between calls without notice. So every call compares them, bit by
bit, with host copies of the GPUs' parameters, while the GPUs compute. If they differ, the call sends the new ones and
computes again. It skips an executor's parameters that MXNet has not written since the last call.

If all data except small arrays is pinned and the outputs fit a staging buffer, the calling thread queues the work of
all GPUs without waiting for any of it. Otherwise each GPU's work goes through a copy pipeline, whose threads contend
for the GIL at each CUDA call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import or_
from typing import Any

import numpy as np

from ece408_op.errors import DeviceError, ProblemError
from ece408_op.plugin import array_version, op_times
from ece408_op.plugin.host_context import STAGING_BYTES, Gpu
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import cuda, pinned
from ece408_op.runtime.copy_pipeline import INPUT, Chunk, Pipeline, StagingBuffer, Transfer
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.memory import address
from ece408_op.runtime.thread_pool import parallel_for

from ._batch import STAGES
from ._network import Network, splits
from .engine import Engine, copying_threads, sharing

#: The fewest bytes of a transfer.
LEAST_TRANSFER = 2 << 20
#: The value of cudaMemcpyDeviceToHost.
_TO_HOST = 2


def shares(network: Network, data: Sequence[np.ndarray], gpus: int) -> list[slice]:
    """Return each GPU's images of a batch: for the first ones of ``gpus`` GPUs, so that each has at least one image.

    Raises ProblemError if there are several GPUs and the network does not compute each image by itself.
    """
    if gpus == 1:
        return [slice(None)]
    if not splits(network, tuple(array.shape for array in data)):
        raise ProblemError(
            "device_ids: expected a network that computes each image by itself, with the images as the first axis "
            "of all data and outputs, got another one; pass one GPU"
        )
    images, gpus = len(data[0]), min(gpus, len(data[0]))
    edges = [images * gpu // gpus for gpu in range(gpus + 1)]
    return list(map(slice, edges, edges[1:]))


def on_each(work: Callable[[int], None], gpus: Sequence[Gpu], threads: int | None = None) -> None:
    """Run work(0), work(1), ..., in one thread per GPU, or in ``threads`` threads.

    A DeviceError from work(i) is raised again with the number of gpus[i] in its message.
    """

    def named(part: int) -> None:
        try:
            with sharing(len(gpus)):
                work(part)
        except DeviceError as error:
            raise type(error)(f"GPU {gpus[part].device.id}: {error}") from error

    parallel_for(named, len(gpus), threads or len(gpus))


@contextmanager
def locked(gpus: Sequence[Gpu]) -> Iterator[None]:
    """Hold the GPUs' locks, taken by number, so that networks with different orders of GPUs cannot deadlock."""
    with ExitStack() as locks:
        for gpu in sorted(gpus, key=lambda gpu: gpu.device.id):
            locks.enter_context(gpu.lock)
        yield


class _Known:
    """Which parameters are known to equal those on the GPUs: MXNet has not written them since they were compared.

    MXNet's own fused layers trust the same counts of writes (src/operator/subgraph/mkldnn/mkldnn_conv.cc,
    ``weight_ver``).
    """

    def __init__(self) -> None:
        #: The number of the list that they equal (``Engine.sends``), 0 for none.
        self._number = 0
        #: Of the last call: addresses, what counts MXNet's writes, and the counts.
        self._addresses: Sequence[int] = []
        self._counted: Sequence[array_version.Counted | None] = []
        self._counts: Sequence[int | None] = []

    def unknown(self, addresses: Sequence[int], number: int) -> Sequence[int]:
        """Return the addresses, with 0 for each parameter that is known to equal that of the list ``number``.

        The caller compares the others, and calls ``compared`` then.
        """
        if self._addresses != addresses or None in self._counted:
            self._addresses, self._counted = addresses, array_version.counted(addresses)
            self._number = 0
        before, self._counts = self._counts, [one.version() if one else None for one in self._counted]
        if self._number == number:
            now = zip(addresses, self._counts, before)
            addresses = [0 if count is not None and count == last else at for at, count, last in now]
        self._number = 0  # until ``compared``, since the call may fail
        return addresses

    def compared(self, number: int) -> None:
        """Record that the parameters equal the list ``number``: that of ``unknown``, or a new one."""
        self._number = number


class Inference:
    """Inference of one network by engines on different GPUs, which get consecutive parts of the images."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines, self._known = engines, _Known()
        #: The records of the last call. Making them takes a quarter of a millisecond, so the next call makes them while
        #: the GPUs compute.
        self._last: list[op_times.Later] = []

    def run(
        self,
        data: Sequence[np.ndarray],
        parameters: Callable[[], Sequence[int]],
        outputs: Callable[[], Sequence[np.ndarray]],
        is_pinned: Sequence[bool] = (),
        meanwhile: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Fill the outputs from data and parameters: C-contiguous float32 arrays in the network's order.

        parameters: returns addresses, because making views of hundreds of arrays would take a millisecond. outputs:
        returns the outputs, which share no memory with the data, nor with the parameters unless all data is pinned.
        Both, and the functions ``meanwhile``, take as long as the first copies; so they are called while these copies
        run, if the GPUs have parameters and memory plans. is_pinned: whether each array of data is pinned. Raises
        ProblemError as ``shares``, and DeviceError, which names the GPU, if a GPU fails or lacks memory for one image.
        """
        with suppress(cuda.NoRoomError):
            return self._run(data, parameters, outputs, is_pinned, meanwhile)
        # The error has freed the batch's memory; it is allocated again for as many images as there is room for.
        return self._run(data, parameters, outputs, is_pinned, meanwhile)

    def _run(
        self,
        data: Sequence[np.ndarray],
        parameters: Callable[[], Sequence[int]],
        outputs: Callable[[], Sequence[np.ndarray]],
        is_pinned: Sequence[bool],
        meanwhile: Sequence[Callable[[], None]],
    ) -> None:
        found = zip(self._engines, shares(self._engines[0].network, data, len(self._engines)))
        parts = [_Share(engine, mine, [x[mine] for x in data], is_pinned) for engine, mine in found]
        first = parts[0].engine
        with locked([part.gpu for part in parts]):
            is_sent = bool(first.sent)
            try:
                _prepare(parts, first.sent or first.copied(parameters()))
                checks = [*meanwhile, *(last.make for last in self._last)]
                compared = (lambda: self._known.unknown(parameters(), first.sends)) if is_sent else tuple
                if _compute_and_compare(parts, compared, outputs, checks):
                    for part in parts:
                        part.chunked.op_times(part.images)
                    _prepare(parts, first.copied(parameters()))
                    _compute_and_compare(parts, tuple, outputs, ())
                self._known.compared(first.sends)
            except BaseException:
                for part in parts:
                    with suppress(DeviceError), cuda.reported("network"):
                        part.gpu.wait()
                    # Otherwise this call's times would be added to the next call's.
                    part.engine.batches.clear()
                raise
            self._last = [part.chunked.op_times(part.images) for part in parts]
            for last in self._last:
                op_times.record(last)


def _on_shares(parts: Sequence[_Share], work: Callable[[_Share], None], threads: int | None = None) -> None:
    """Run ``work`` for each GPU's share as ``on_each``."""
    on_each(lambda part: work(parts[part]), [part.gpu for part in parts], threads)


def _prepare(parts: Sequence[_Share], parameters: Sequence[np.ndarray]) -> None:
    """Prepare all GPUs (``_Share.prepare``): in parallel, unless all of them are ready."""
    ready = all(part.is_ready(parameters) for part in parts)
    _on_shares(parts, lambda part: part.prepare(parameters), 1 if ready else None)


def _compute_and_compare(
    parts: Sequence[_Share],
    compared: Callable[[], Sequence[int]],
    outputs: Callable[[], Sequence[np.ndarray]],
    meanwhile: Sequence[Callable[[], None]],
) -> bool:
    """Compute all images; return whether the parameters at the addresses ``compared()`` differ from the GPUs' ones."""
    first, each = parts[0], partial(_on_shares, parts)
    if all(part.can_queue for part in parts):
        with ExitStack() as buffers:
            # Queue the first copies of all GPUs before any launch: a launch takes longer than queueing a copy.
            for number in range(STAGES):
                each(lambda part: part.copy_in(number), 1)  # noqa: B023
            for part in parts:
                buffers.enter_context(part.staged_outputs())
            for number in range(max(len(part.chunked.chunks) for part in parts)):
                each(lambda part: part.launch(number), 1)  # noqa: B023
                each(lambda part: part.copy_in(number + STAGES), 1)  # noqa: B023
            comparisons, differ = first.engine.comparisons(compared())
            checks = [*meanwhile, *comparisons]
            threads = copying_threads(first.gpu, sum(array.nbytes for array in first.engine.sent))
            parallel_for(lambda number: checks[number](), len(checks), threads)
            filled = outputs()
            each(lambda part: part.finish(filled), 1)
    else:
        comparisons, differ = first.engine.comparisons(compared())
        checks, filled = [*meanwhile, *comparisons], outputs()
        # The first GPU's threads compare the parameters for all GPUs.
        each(lambda part: part.run_pipeline(filled, checks if part is first else [], len(parts) > 1))
    return differ.is_set()


class _Share:
    """One GPU's images of a call, in chunks, and the copy pipeline's interface to the GPU; the caller has its lock."""

    def __init__(self, engine: Engine, mine: slice, data: Sequence[np.ndarray], is_pinned: Sequence[bool]) -> None:
        self.engine, self.gpu, self.images, self.staging = engine, engine.gpu, len(data[0]), engine.gpu.staging
        self._mine, self._data, self._is_pinned = mine, data, is_pinned
        self._shapes = [array.shape for array in data]
        #: For each chunk, the events of its copies in, and the event of its end.
        self._copied: list[list[Any]] = []
        self._ends: list[Any] = []
        #: Views of a staging buffer for the outputs.
        self._staged: list[np.ndarray] = []

    def is_ready(self, parameters: Sequence[np.ndarray]) -> bool:
        """Return whether the GPU has the parameters and the chunks, so that ``prepare`` is fast."""
        return self.engine.has(parameters) and self.engine.has_chunks(self._shapes)

    def prepare(self, parameters: Sequence[np.ndarray]) -> None:
        """Send the parameters and make the chunks, unless the GPU has them. The engine keeps the parameter arrays."""
        with self.gpu.device, cuda.reported("network"):
            if not self.engine.has(parameters):
                self.engine.send(parameters)
            self.chunked = self.engine.chunks(self._shapes)
        self._batches = {chunk.stage: batch for chunk, batch in zip(self.chunked.chunks, self.chunked.batches)}
        self._copied, self._ends = [], []
        if len(self.chunked.chunks) == 1:
            self._data = [array.reshape(1, -1) for array in self._data]
        small = (array.nbytes < pinned.LEAST_BYTES for array in self._data)  # CUDA copies these without waiting
        ready = any(self._is_pinned) and all(map(or_, self._is_pinned, small))
        batch = self.chunked.batches[0]
        output_bytes = sum(output.nbytes for output in batch.outputs[0]) * ceil_div(self.images, batch.images)
        #: Whether all work can be queued without waiting.
        self.can_queue = ready and output_bytes <= STAGING_BYTES

    def copy_in(self, number: int) -> None:
        """Queue the copies of a chunk's data to the GPU, if there is a chunk of that number."""
        if number >= len(self.chunked.chunks):
            return
        chunk = self.chunked.chunks[number]
        before = self._ends[number - STAGES] if number >= STAGES else None
        given = [array[chunk.first : chunk.first + chunk.images] for array in self._data]
        with self.gpu.device, cuda.reported("network"):
            buffers = self._batches[chunk.stage].data[chunk.stage]
            self._copied.append([self.gpu.copy_pinned(x, to.data.ptr, before) for x, to in zip(given, buffers)])

    @contextmanager
    def staged_outputs(self) -> Iterator[None]:
        """Use a staging buffer for the outputs within this context."""
        buffer, first = self.staging.get(), 0
        rows = sum(chunk.images - chunk.overlap for chunk in self.chunked.chunks)
        try:
            self._staged = []
            for output in self.chunked.batches[0].outputs[0]:
                size = output.size if rows == 1 else output.size // len(output)
                self._staged.append(buffer.floats[first : first + rows * size].reshape(rows, size))
                first += rows * size
            yield
        finally:
            self.staging.put(buffer)

    def launch(self, number: int) -> None:
        """Queue the computation of a chunk, and the copies of its outputs, if there is a chunk of that number."""
        if number >= len(self.chunked.chunks):
            return
        chunk, gpu = self.chunked.chunks[number], self.gpu
        with gpu.device, gpu.stream, cuda.reported("network"):
            gpu.wait_for(self._copied[number])
            for output, staged in zip(self._run(chunk), self._staged):
                target, source = staged[_new(chunk)], output[chunk.overlap :].data.ptr
                gpu.cuda.runtime.memcpyAsync(address(target), source, target.nbytes, _TO_HOST, gpu.stream.ptr)
            self._ends.append(gpu.stream.record())

    def finish(self, outputs: Sequence[np.ndarray]) -> None:
        """Wait for each chunk, and copy its outputs from the staging buffer."""
        targets = [array[self._mine].reshape(staged.shape) for array, staged in zip(outputs, self._staged)]
        for chunk, end in zip(self.chunked.chunks, self._ends):
            cuda.wait("network", end)
            for target, staged in zip(targets, self._staged):
                target[_new(chunk)] = staged[_new(chunk)]

    def run_pipeline(self, outputs: Sequence[np.ndarray], checks: Sequence[Callable[[], None]], several: bool) -> None:
        """Compute all chunks through a copy pipeline, whose threads run the checks while the GPU computes.

        several: whether other GPUs compute at the same time.
        """
        outputs = [array[self._mine] for array in outputs]
        if len(self.chunked.chunks) == 1:
            outputs = [array.reshape(1, -1) for array in outputs]
        copied = (*self._data, *outputs, *(self.engine.sent if checks else ()))
        threads = copying_threads(self.gpu, sum(array.nbytes for array in copied))
        # Each thread copies an equal part of each chunk, in as few transfers as the staging buffers' size allows. With
        # several GPUs, it uses at least two transfers, because the GPUs' threads do not begin at the same time.
        chunks = self.chunked.chunks
        part = ceil_div(chunks[0].images * sum(array[0].nbytes for array in self._data), threads)
        transfers = max(1 + several, ceil_div(part, STAGING_BYTES))
        most = max(LEAST_TRANSFER, ceil_div(part, transfers)) // ITEM_BYTES
        with self.gpu.device, cuda.reported("network"):
            Pipeline(self, chunks, self._data, outputs, most, checks=checks).run(threads)

    def copy(self, buffer: StagingBuffer, transfer: Transfer, after: Any) -> None:
        batch = self._batches[transfer.stage]
        buffers = batch.data if transfer.role == INPUT else batch.outputs
        self.gpu.copy(buffer, buffers[transfer.stage][transfer.array].data.ptr, transfer, after)

    def compute(self, chunk: Chunk) -> Any:
        gpu = self.gpu
        with gpu.device, gpu.stream:
            for source, target in zip(self._run(chunk), self._batches[chunk.stage].outputs[chunk.stage]):
                target.data.copy_from_device_async(source.data, source.nbytes, gpu.stream)
            return gpu.stream.record()

    def _run(self, chunk: Chunk) -> list[Any]:
        batch = self._batches[chunk.stage]
        return batch.run(batch.data[chunk.stage], timed=True)


def _new(chunk: Chunk) -> slice:
    """Return the images of a chunk without those that the chunk before has too."""
    return slice(chunk.first + chunk.overlap, chunk.first + chunk.images)
