"""cuDNN as one of the kernels: where auto takes it, and what is said without it. test_kernels_gpu.py runs it."""

import sys
from contextlib import nullcontext
from math import prod
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from cuda_layers import chip_of

from ece408_op.core import dispatch
from ece408_op.core.check import compare
from ece408_op.errors import UnsupportedError
from ece408_op.kernels.cuda import cudnn
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

WIDE = ConvProblem(128, 64, 56, 56, 64, 3, pad=(1, 1))
STRIDED = ConvProblem(128, 128, 56, 56, 128, 3, stride=(2, 2), pad=(1, 1))
FIRST = ConvProblem(128, 3, 224, 224, 64, 7, stride=(2, 2), pad=(3, 3))
LARGE = ConvProblem(128, 64, 27, 27, 192, 5, pad=(2, 2))
DEPTHWISE = ConvProblem(128, 32, 112, 112, 32, 3, stride=(2, 2), pad=(1, 1), groups=32)
#: Plans that shorten the factors or the sums, and the transforms that lose digits.
EXCLUDED = {"TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "WINOGRAD_TILE_13x13"}


class Stream(nullcontext):
    """CuPy's, the current one; it may be captured in a CUDA graph."""

    ptr = 0

    def __init__(self, captured=False):
        super().__init__()
        self.is_capturing, self.synchronize = (lambda: captured), (lambda: None)


class Gpu:
    """A GPU with the package cudnn, whose graphs remember what they were asked for; an address is 1000 + its bytes.

    times: milliseconds of the plans; None for one that cannot be built. workspaces: bytes of their scratch memory.
    """

    def __init__(self):
        self.times, self.workspaces, self.now = [2.0], [3, 2, 1], 0.0
        self.graphs, self.ran, self.freed, self.copied, self.free_bytes = [], [], [], [], 1 << 40
        self.package = MagicMock(pygraph=self.graph)
        for name in (*EXCLUDED, "WINOGRAD"):
            setattr(self.package.numerical_note, name, name)
        self.package.create_handle.return_value = "handle"

    def graph(self, **options):
        graph = MagicMock()
        graph.tensor.side_effect = lambda name, dim, **_: tuple(dim)
        graph.get_execution_plan_count.side_effect = lambda: len(self.times)
        graph.build_plan_at_index.side_effect = self.build
        graph.get_workspace_size_plan_at_index.side_effect = lambda number: self.workspaces[number]
        graph.execute_plan_at_index.side_effect = self.execute
        self.graphs.append(graph)
        return graph

    def build(self, number):
        if self.times[number] is None:
            raise RuntimeError("it is excluded")

    def execute(self, pointers, workspace, number, handle):
        self.ran.append(number)
        self.now += self.times[number]

    def alloc(self, size):
        if size > self.free_bytes:
            raise MemoryError
        return SimpleNamespace(ptr=1000 + size)

    def event(self):
        event = SimpleNamespace()
        event.record = lambda stream: setattr(event, "at", self.now)
        return event

    def cupy(self):
        """As much of CuPy as cudnn.py needs."""
        return SimpleNamespace(
            get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=self.freed.append),
            cuda=SimpleNamespace(
                runtime=SimpleNamespace(
                    getDevice=lambda: 0,
                    memcpyDeviceToDevice=3,
                    memcpyAsync=lambda target, source, size, kind, stream: self.copied.append((target, source, size)),
                ),
                alloc=self.alloc,
                get_current_stream=Stream,
                Event=self.event,
                get_elapsed_time=lambda start, end: end.at - start.at,
            ),
        )


@pytest.fixture
def gpu(monkeypatch, request):
    gpu = Gpu()
    monkeypatch.setitem(sys.modules, "cudnn", gpu.package)
    monkeypatch.setattr(cuda, "cupy", gpu.cupy)
    for forget in (cudnn.forget_plans, dispatch.forget_choices):
        forget()
        request.addfinalizer(forget)
    return gpu


#: A layer whose maps fill a small part of the FFT's tiles.
UNFILLED = [ConvProblem(128, 64, rows, rows, 64, 5, pad=(2, 2)) for rows in (14, 35)]
#: Problems, and the architectures on which auto takes cuDNN.
FASTER = [
    (FIRST.data_gradient, {70, 80, 90}),
    (STRIDED.data_gradient, {70, 80, 90}),
    (LARGE.data_gradient, {70, 80, 90}),
    (ConvProblem(128, 32, 28, 28, 96, 5, pad=(2, 2)).data_gradient, {70, 80, 90}),
    (ConvProblem(128, 32, 28, 28, 96, 5, pad=(2, 2)).weight_gradient, {70, 80, 90}),
    # Our kernels for wide layers need wgmma.
    *((problem, {70, 80}) for problem in (WIDE, WIDE.data_gradient, WIDE.weight_gradient, LARGE)),
    *((problem.data_gradient, {70, 80}) for problem in UNFILLED),
    *((problem, set()) for problem in (FIRST, FIRST.weight_gradient, STRIDED.weight_gradient)),
    *((problem, set()) for problem in (DEPTHWISE.data_gradient, DEPTHWISE.weight_gradient)),
]


@pytest.mark.parametrize(("problem", "architectures"), FASTER, ids=str)
def test_auto_takes_it_where_it_is_faster(gpu, problem, architectures):
    chosen = {a for a in (70, 80, 90) if dispatch.select(problem, "gpu", chip=chip_of(a)) is cudnn.KERNEL}
    assert chosen == architectures


@pytest.mark.parametrize(
    ("problem", "name"), [(STRIDED, "fprop"), (STRIDED.data_gradient, "dgrad"), (STRIDED.weight_gradient, "wgrad")]
)
def test_it_asks_for_the_convolution_in_float32(gpu, problem, name):
    plan = cudnn.KERNEL.plan(problem, chip_of(90), 16)
    (graph,) = gpu.graphs
    asked = getattr(graph, f"conv_{name}")
    words = asked.call_args.kwargs
    assert (words["stride"], words["padding"], words["dilation"]) == ([2, 2], [1, 1], [1, 1])
    assert set(graph.deselect_numeric_notes.call_args.args[0]) == EXCLUDED
    out = asked.return_value
    out.set_output().set_data_type().set_dim.assert_called_once_with(list(problem.shapes[2]))
    (call,) = plan.steps(problem.batch)
    assert plan.launch_ranges(problem.batch) == [(0, problem.batch)]
    call.call(dict(zip(problem.operands, (16, 32, 48))), Stream())
    pointers = dict(zip((*problem.shapes[:2], out), (16, 32, 48)))
    graph.execute_plan_at_index.assert_called_with(pointers, 1003, 0, handle="handle")


def test_an_array_whose_address_cudnn_refuses_is_copied(gpu):
    call = cudnn.KERNEL.plan(STRIDED, chip_of(90), 4).steps(STRIDED.batch)[0].call
    sizes = [4 * prod(shape) for shape in STRIDED.shapes]
    copies = [1000 + size for size in sizes]
    for moved, (name, start) in enumerate({"x": 20, "w": 36, "y": 52}.items()):
        gpu.copied = []
        call({"x": 16, "w": 32, "y": 48} | {name: start}, Stream())
        ends = (start, copies[moved]) if name == "y" else (copies[moved], start)
        assert gpu.copied == [(*ends, sizes[moved])]
        used = gpu.graphs[0].execute_plan_at_index.call_args.args[0].values()
        assert list(used) == [copies[n] if n == moved else aligned for n, aligned in enumerate((16, 32, 48))]


def ran(gpu, *streams):
    """Return the numbers of the plans that a call of STRIDED on each stream executed."""
    (call,) = cudnn.KERNEL.plan(STRIDED, chip_of(90), 16).steps(STRIDED.batch)
    executed = []
    for stream in streams:
        gpu.ran = []
        call.call(dict(zip(STRIDED.operands, (16, 32, 48))), stream)
        executed.append(gpu.ran)
    return executed


def test_the_first_call_finds_the_fastest_plan(gpu):
    gpu.times, gpu.workspaces = [None, 2.0, 1.0, None, 3.0], [0, 1, 2, 3, 4]
    streams = Stream(), Stream()
    first, second = ran(gpu, *streams)
    assert gpu.freed == [streams[0]]
    assert set(first) == {1, 2, 4}
    assert (first[-1], second) == (2, [2])
    assert gpu.graphs[0].execute_plan_at_index.call_args.args[1] == 1002


def test_no_plan_is_timed_while_a_graph_is_captured(gpu):
    gpu.times = [2.0, 1.0]
    during, after, last = ran(gpu, Stream(captured=True), Stream(), Stream(captured=True))
    assert (during, after[-1], last) == ([0], 1, [1])


@pytest.mark.parametrize(("milliseconds", "limit", "plans"), [(1.0, 60.0, range(10)), (100.0, 0.0, [0])])
def test_plans_are_timed_for_a_limited_time(gpu, milliseconds, limit, plans, monkeypatch):
    """Ten of twelve plans; no other plan after the limit, and a slow one by one call after the warm-up."""
    gpu.times, gpu.workspaces = [milliseconds] * 12, [1] * 12
    monkeypatch.setattr(cudnn, "TIMED_SECONDS", limit)
    (first,) = ran(gpu, Stream())
    assert set(first) == set(plans)
    assert limit or first == [0, 0, 0]


def test_a_plan_without_room_is_left_out(gpu):
    gpu.times, gpu.workspaces, gpu.free_bytes = [2.0, 1.0], [1, 1 << 30], 1
    assert ran(gpu, Stream(), Stream())[1] == [0]


def test_its_bound_covers_winograds_transforms():
    """F(4x4, 3x3) in float32, against float64."""
    a = np.array([[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]], "f")
    g = np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]], "f") / np.float32(24)
    b = np.array(
        [[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0],
         [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1]], "f")  # fmt: skip
    squares = (a**2) @ ((g**2).sum(1) * (b**2).sum(1))
    assert squares.max() / 3 == pytest.approx(cudnn.AMPLIFICATION, rel=0.01)
    rng = np.random.default_rng(1)
    for channels in (4, 64):
        problem = ConvProblem(500, channels, 6, 6, 8, 3)
        x, w = (rng.standard_normal(shape, dtype=np.float32) for shape in problem.shapes[:2])
        products = sum((b @ x[:, None, c] @ b.T) * (g @ w[None, :, c] @ g.T) for c in range(channels))
        found = compare(a @ products @ a.T, x, w, cudnn.KERNEL, problem=problem)
        assert found.passed, found


def test_a_problem_that_it_refuses_goes_to_our_kernels(gpu):
    gpu.times = []
    assert dispatch.select(FIRST.data_gradient, "gpu", chip=chip_of(90)).name == "blocked_gemm"
    with pytest.raises(UnsupportedError, match="cuDNN: expected a plan for the data gradient of .*, got none that"):
        dispatch.select(FIRST.data_gradient, "gpu", "cudnn", chip=chip_of(90))


def test_without_it_auto_takes_our_kernels_and_its_name_says_what_to_install(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert dispatch.select(FIRST.data_gradient, "gpu", chip=chip_of(90)).name == "blocked_gemm"
    with pytest.raises(UnsupportedError, match=r"import of cudnn halted.*pip install -e '.\[cudnn\]'"):
        dispatch.select(FIRST.data_gradient, "gpu", "cudnn", chip=chip_of(90))
