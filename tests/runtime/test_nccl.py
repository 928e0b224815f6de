"""Sums on several GPUs: the calls of NCCL's C interface on a stand-in, its errors, and real sums on two GPUs."""

import ctypes
import importlib.util
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from gpu_case import require_gpus
from process import printed

from ece408_op.errors import DeviceError
from ece408_op.runtime import cuda, nccl


class Library:
    """A library whose functions note their calls and succeed, but for those of ``failing``, which return 3."""

    def __init__(self, *failing):
        self.calls, self.failing = [], failing
        self.ncclGetErrorString = lambda status: f"reason {status}".encode()

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            return 3 if name in self.failing else 0

        setattr(self, name, call)  # ctypes sets attributes of functions
        return call


@pytest.fixture
def fresh(monkeypatch):
    """A function: the module as it is before its first call, with that library, or with none."""

    def made(library):
        def load(name, **_):
            if library is None:
                raise OSError("no such file")
            return library

        spec = importlib.util.spec_from_file_location("ece408_op.runtime.nccl", nccl.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(module, "load_libraries", lambda names: [])
        monkeypatch.setattr(module, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": load}))
        return module

    return made


class Stream:
    """A stream that notes waits for it; it runs for as long as ``running()``, and then may fail."""

    def __init__(self, number, waited, fails=False, running=lambda: False):
        self.ptr, self.waited, self.fails, self.running = number, waited, fails, running

    def query(self):
        return 600 if self.running() else 700 if self.fails else 0

    def synchronize(self):
        assert not self.running(), "nobody ends it"
        self.waited.append(self.ptr)
        if self.fails:
            raise DeviceError("its kernel failed")


@pytest.fixture
def streams(monkeypatch):
    """A function that makes streams which CuPy knows by their numbers."""

    def made(*several):
        query = SimpleNamespace(streamQuery=lambda number: several[number].query())
        monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=query)))
        monkeypatch.setattr(cuda, "wait", lambda name, stream: stream.synchronize())
        return several

    return made


def array(address, count, item=4):
    return SimpleNamespace(data=SimpleNamespace(ptr=address), size=count, nbytes=item * count)


def test_each_array_is_summed_on_one_gpu(fresh, streams):
    library, waited = Library(), []
    communicator = fresh(library).communicator((3, 1))
    (name, (_, count, numbers)), *others = library.calls
    assert (name, count, list(numbers), others) == ("ncclCommInitAll", 2, [3, 1], [])
    library.calls.clear()
    sources = [[array(10, 5), array(20, 7)], [array(30, 5), array(40, 7)]]
    asked = iter([True, True, False])
    both = streams(Stream(0, waited, running=lambda: next(asked, False)), Stream(1, waited))
    communicator.reduce(sources, [(0, array(50, 5)), (1, array(60, 7))], both)
    assert waited == [1, 0]
    names, arguments = zip(*library.calls)
    assert names == ("ncclGroupStart", *["ncclReduce"] * 4, "ncclGroupEnd")
    reduced = [(*given[:6], given[7]) for given in arguments[1:-1]]
    assert reduced == [
        (10, 50, 5, 7, 0, 0, 0),
        (20, 60, 7, 7, 0, 1, 0),
        (30, 50, 5, 7, 0, 0, 1),
        (40, 60, 7, 7, 0, 1, 1),
    ]


def test_rows_are_exchanged(fresh):
    library = Library()
    communicator = fresh(library).communicator((3, 1))
    library.calls.clear()
    communicator.all_gather([array(1000, 10, 8), array(2000, 10, 8)], [SimpleNamespace(ptr=7), SimpleNamespace(ptr=9)])
    names, arguments = zip(*library.calls)
    assert names == ("ncclGroupStart", *["ncclAllGather"] * 2, "ncclGroupEnd")
    assert [(*given[:4], given[5]) for given in arguments[1:-1]] == [(1000, 1000, 5, 8, 7), (2040, 2000, 5, 8, 9)]


def test_a_communicator_stays_until_it_is_aborted(fresh, monkeypatch):
    """The abort does not wait for NCCL, which may wait for a CUDA graph."""
    library, held = Library(), threading.Event()
    library.ncclCommAbort = lambda rank: not held.wait(20)
    module = fresh(library)
    monkeypatch.setattr(module, "ABORT_SECONDS", 0)
    communicator = module.communicator((0, 1))
    assert module.communicator((0, 1)) is communicator is not module.communicator((1, 0))
    for _ in range(2):
        communicator.abort()
    assert communicator.aborted
    assert module.communicator((0, 1)) is not communicator
    library.calls.clear()
    with pytest.raises(DeviceError, match="NCCL: expected a communicator, got one that is aborted"):
        communicator.all_gather([array(10, 4, 8)] * 2, [SimpleNamespace(ptr=7)] * 2)
    assert library.calls == []
    held.set()


def test_no_library_is_one_clear_error(fresh):
    with pytest.raises(DeviceError, match="several GPUs: expected NCCL.*got no such file; install nvidia-nccl-cu12 or"):
        fresh(None).communicator((0, 1))


@pytest.mark.parametrize("failing", ["ncclCommInitAll", "ncclReduce", "ncclGroupEnd"])
def test_a_status_is_an_error_with_its_reason(fresh, failing):
    """The communicator is gone when its streams have ended."""
    library, waited = Library(failing, "ncclGroupEnd"), []
    module = fresh(library)
    with pytest.raises(DeviceError, match=f"{failing}: expected success, got reason 3"):
        communicator = module.communicator((0, 1))
        communicator.reduce([[array(1, 2)]] * 2, [(0, array(3, 2))], [Stream(0, waited, True), Stream(1, waited)])
    names = [name for name, _ in library.calls]
    if failing != "ncclCommInitAll":
        assert waited == [0, 1]
        assert (names.count("ncclGroupStart"), names.count("ncclGroupEnd"), names.count("ncclCommAbort")) == (1, 1, 2)
        assert module.communicator((0, 1)) is not communicator


@pytest.mark.parametrize("failing", [0, 1])
def test_a_gpu_that_fails_ends_the_kernel_that_waits_for_it(fresh, streams, failing):
    library, waited = Library(), []
    module = fresh(library)
    communicator = module.communicator((0, 1))

    def running():
        return [name for name, _ in library.calls].count("ncclCommAbort") < 2

    both = [Stream(number, waited, running=running) for number in range(2)]
    both[failing] = Stream(failing, waited, fails=True)
    with pytest.raises(DeviceError, match="its kernel failed"):
        communicator.reduce([[array(1, 2)]] * 2, [(0, array(3, 2))], streams(*both))
    assert waited == [failing, 0, 1]
    assert module.communicator((0, 1)) is not communicator


@pytest.mark.parametrize("last", [700, 0], ids=["fails", "ends"])
def test_a_gpu_that_fails_while_nobody_waits_aborts_the_communicator(fresh, monkeypatch, last):
    module, states, aborts = fresh(Library()), iter([600, 600, last]), []
    monkeypatch.setattr(module, "WATCH_SECONDS", 0)
    monkeypatch.setattr(module.threading, "Thread", lambda target, daemon: SimpleNamespace(start=target))
    runtime = SimpleNamespace(eventQuery=lambda event: next(states))
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    communicator = module.communicator((0, 1))
    monkeypatch.setattr(communicator, "abort", lambda: (aborts.append(1), setattr(communicator, "aborted", True)))
    communicator.watch(SimpleNamespace(ptr=5))
    assert len(aborts) == bool(last)
    assert next(states, None) is None


@pytest.mark.gpu
def test_sums_on_two_gpus():
    cupy = require_gpus(2)
    host = [[np.random.default_rng((gpu, size)).random(size, np.float32) for size in (1, 7, 1001)] for gpu in range(2)]
    sources, streams = [], []
    for gpu, arrays in enumerate(host):
        with cupy.cuda.Device(gpu):
            streams.append(cupy.cuda.Stream(non_blocking=True))
            sources.append([cupy.asarray(one) for one in arrays])
            cupy.cuda.Device(gpu).synchronize()
    sums = []
    for root, like in zip((0, 1, 1), host[0]):
        with cupy.cuda.Device(root):
            sums.append((root, cupy.full(like.shape, np.nan, np.float32)))
            cupy.cuda.Device(root).synchronize()
    nccl.communicator((0, 1)).reduce(sources, sums, streams)
    for first, second, (_, total) in zip(*host, sums):
        np.testing.assert_array_equal(total.get(), first + second)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_rows_on_two_gpus(captured):
    """Twice as large as the rows of the widest layers; a graph exchanges what its arrays have at its launch."""
    cupy = require_gpus(2)
    streams, arrays, count = [], [], 8191
    for gpu in range(2):
        with cupy.cuda.Device(gpu):
            streams.append(cupy.cuda.Stream(non_blocking=True))
            arrays.append(cupy.full((2, count), np.nan, np.float64))
            cupy.cuda.Device(gpu).synchronize()
    communicator, launches = nccl.communicator((0, 1)), []
    communicator.all_gather(arrays, streams)
    if captured:
        for stream in streams:
            stream.begin_capture()
        communicator.all_gather(arrays, streams)
        launches = [stream.end_capture() for stream in streams]
    rows = np.random.default_rng(3).random((2, count))
    for gpu in range(2):
        with cupy.cuda.Device(gpu), streams[gpu]:
            arrays[gpu][...] = np.nan
            arrays[gpu][gpu].set(rows[gpu])
    for gpu, graph in enumerate(launches):
        with cupy.cuda.Device(gpu):
            graph.launch(streams[gpu])
    if not captured:
        communicator.all_gather(arrays, streams)
    for stream, one in zip(streams, arrays):
        stream.synchronize()
        np.testing.assert_array_equal(one.get(), rows)


@pytest.mark.gpu
def test_an_abort_ends_a_graph_that_waits():
    """One of two captured exchanges is launched; a new communicator works in spite of the old graphs."""
    require_gpus(2)
    assert printed("-c", _ABORTING) == "ended\n[1.0, 2.0] [1.0, 2.0]\n"


_ABORTING = """
import cupy, os, time
from ece408_op.runtime import nccl
arrays, streams = [], []
for number in range(2):
    with cupy.cuda.Device(number):
        streams.append(cupy.cuda.Stream(non_blocking=True))
        arrays.append(cupy.full((2, 1), number + 1.0))
        cupy.cuda.Device(number).synchronize()
communicator = nccl.communicator((0, 1))
communicator.all_gather(arrays, streams)
for stream in streams:
    stream.begin_capture()
communicator.all_gather(arrays, streams)
graphs = [stream.end_capture() for stream in streams]
with cupy.cuda.Device(0):
    graphs[0].launch(streams[0])
time.sleep(0.5)
assert cupy.cuda.runtime.streamQuery(streams[0].ptr) == 600
communicator.abort()
streams[0].synchronize()
print("ended", flush=True)
nccl.communicator((0, 1)).all_gather(arrays, streams)
for stream in streams:
    stream.synchronize()
print(*[one.get()[:, 0].tolist() for one in arrays], flush=True)
os._exit(0)
"""


@pytest.mark.gpu
def test_a_gpu_that_fails_ends_the_sum_with_its_error():
    """In a process of its own, which can use neither GPU afterwards."""
    require_gpus(2)
    assert printed("-c", _FAILING) == "NCCL: expected the kernel to run\n"


_FAILING = """
import cupy, os
from ece408_op.errors import DeviceError
from ece408_op.runtime import nccl
arrays, streams = [], []
for number in range(2):
    with cupy.cuda.Device(number):
        streams.append(cupy.cuda.Stream(non_blocking=True))
        arrays.append([cupy.ones(1 << 20, cupy.float32)])
        cupy.cuda.Device(number).synchronize()
communicator = nccl.communicator((0, 1))
with cupy.cuda.Device(0):
    sums = [(0, cupy.empty_like(arrays[0][0]))]
    communicator.reduce(arrays, sums, streams)
with cupy.cuda.Device(1):
    cupy.RawKernel('extern "C" __global__ void fail() { asm("trap;"); }', "fail")((1,), (1,), (), stream=streams[1])
try:
    communicator.reduce(arrays, sums, streams)
except DeviceError as error:
    print(str(error).split(",")[0], flush=True)
    os._exit(0)  # what closes a GPU that failed may fail too
"""
