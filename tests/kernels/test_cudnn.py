"""cuDNN as one of the kernels: where auto takes it, and what is said without it. test_gradients_gpu.py runs it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_layers import chip_of
from process import printed

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


class Tensor:
    """cuDNN's, which knows its shape; each setter returns it."""

    def __init__(self, shape=None):
        self.shape = shape

    def __getattr__(self, name):
        def setter(value):
            if name == "set_dim":
                self.shape = tuple(value)
            return self

        return setter


class Graph:
    """cuDNN's, which remembers what it was asked for."""

    refuses = False
    #: Milliseconds of the plans; None for one that cannot be built. Bytes of their scratch memory.
    times: tuple[float | None, ...] = (2.0,)
    workspaces = (3, 2, 1)
    made: list[Graph] = []
    now = 0.0
    #: The streams whose unused memory was freed.
    freed: list[Stream] = []

    def __init__(self, **options):
        self.excluded, self.asked, self.executed, self.ran = None, None, None, []
        Graph.made.append(self)

    def tensor(self, name, dim, stride, data_type):
        return Tensor(tuple(dim))

    def __getattr__(self, name):
        def step(*given, **words):
            if name.startswith("conv_"):
                self.asked = name, words
                return Tensor()
            if name == "check_support" and self.refuses:
                raise RuntimeError("no engine")

        return step

    def get_execution_plan_count(self):
        return len(self.times)

    def build_plan_at_index(self, number):
        if self.times[number] is None:
            raise RuntimeError("it is excluded")

    def get_workspace_size_plan_at_index(self, number):
        return self.workspaces[number]

    def deselect_numeric_notes(self, notes):
        self.excluded = set(notes)

    def execute_plan_at_index(self, pointers, workspace, number, handle):
        self.executed = {tensor.shape: pointer for tensor, pointer in pointers.items()}, workspace, handle
        self.ran.append(number)
        Graph.now += self.times[number]


class Stream(nullcontext):
    """CuPy's, the current one; it may be captured in a CUDA graph."""

    ptr, captured = 0, False

    def is_capturing(self):
        return self.captured

    def synchronize(self):
        pass


class Event:
    """CuPy's, of a GPU that only executes plans."""

    def record(self, stream):
        self.at = Graph.now


def cupy():
    """Return as much of CuPy as cudnn.py needs; the address of ``size`` bytes is 1000 + size."""
    return SimpleNamespace(
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=Graph.freed.append),
        cuda=SimpleNamespace(
            runtime=SimpleNamespace(getDevice=lambda: 0),
            alloc=lambda size: SimpleNamespace(ptr=1000 + size),
            get_current_stream=Stream,
            Event=Event,
            get_elapsed_time=lambda start, end: end.at - start.at,
        ),
    )


def forget():
    """Plan and choose again."""
    cudnn.forget_plans()
    dispatch.forget_choices()


@pytest.fixture
def installed(monkeypatch):
    """Have a package cudnn, and one GPU."""
    notes = SimpleNamespace(**{name: name for name in (*EXCLUDED, "WINOGRAD")})
    package = SimpleNamespace(
        backend_version=lambda: 91900,
        create_handle=lambda: "handle",
        set_stream=lambda handle, stream: None,
        pygraph=Graph,
        numerical_note=notes,
        data_type=SimpleNamespace(FLOAT="float"),
        heur_mode=SimpleNamespace(A="a", FALLBACK="fallback"),
    )
    monkeypatch.setitem(sys.modules, "cudnn", package)
    monkeypatch.setattr(cuda, "cupy", cupy)
    monkeypatch.setattr(Graph, "made", [])
    monkeypatch.setattr(Graph, "freed", [])
    forget()
    yield package
    forget()


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
def test_auto_takes_it_where_it_is_faster(installed, problem, architectures):
    chosen = {a for a in (70, 80, 90) if dispatch.select(problem, "gpu", chip=chip_of(a)) is cudnn.KERNEL}
    assert chosen == architectures


@pytest.mark.parametrize(
    ("problem", "name"), [(STRIDED, "fprop"), (STRIDED.data_gradient, "dgrad"), (STRIDED.weight_gradient, "wgrad")]
)
def test_it_asks_for_the_convolution_in_float32(installed, problem, name):
    plan = cudnn.KERNEL.plan(problem, chip_of(90), 16)
    (graph,) = Graph.made
    asked, words = graph.asked
    assert asked == f"conv_{name}"
    assert (words["stride"], words["padding"], words["dilation"]) == ([2, 2], [1, 1], [1, 1])
    assert graph.excluded == EXCLUDED
    (call,) = plan.steps(problem.batch)
    assert plan.launch_ranges(problem.batch) == [(0, problem.batch)]
    call.call(dict(zip(problem.operands, (16, 32, 48))), Stream())
    assert graph.executed == (dict(zip(problem.shapes, (16, 32, 48))), 1003, "handle")


def ran(problem, *streams):
    """Return the numbers of the plans that a call on each stream executed."""
    (call,) = cudnn.KERNEL.plan(problem, chip_of(90), 16).steps(problem.batch)
    (graph,) = Graph.made
    executed = []
    for stream in streams:
        graph.ran.clear()
        call.call(dict(zip(problem.operands, (16, 32, 48))), stream)
        executed.append(list(graph.ran))
    return executed


def test_the_first_call_finds_the_fastest_plan(installed, monkeypatch):
    monkeypatch.setattr(Graph, "times", (None, 2.0, 1.0, None, 3.0))
    monkeypatch.setattr(Graph, "workspaces", (0, 1, 2, 3, 4))
    streams = Stream(), Stream()
    first, second = ran(STRIDED, *streams)
    assert Graph.freed == [streams[0]]
    assert set(first) == {1, 2, 4}
    assert first[-1] == 2
    assert second == [2]
    assert Graph.made[0].executed[1] == 1002


def test_each_batch_has_a_first_run_of_its_own():
    """The contexts leave the first run out of the Op Time."""
    assert cudnn.KERNEL.prepared_with(WIDE) == WIDE
    assert dispatch.find("naive").prepared_with(WIDE) == WIDE.with_batch(1)


def test_no_plan_is_timed_while_a_graph_is_captured(installed, monkeypatch):
    monkeypatch.setattr(Graph, "times", (2.0, 1.0))
    captured = Stream()
    captured.captured = True
    during, after, last = ran(STRIDED, captured, Stream(), captured)
    assert (during, last) == ([0], [1])
    assert after[-1] == 1


def test_plans_are_timed_for_a_limited_time(installed, monkeypatch):
    """Ten of twelve plans; slow ones by one call after the warm-up; none after a second."""
    monkeypatch.setattr(Graph, "workspaces", (1,) * 12)
    monkeypatch.setattr(Graph, "times", (1.0,) * 12)
    assert set(ran(STRIDED, Stream())[0]) == set(range(10))
    forget()
    Graph.made.clear()
    monkeypatch.setattr(Graph, "times", (100.0,) * 12)
    monkeypatch.setattr(cudnn, "TIMED_SECONDS", 0.0)
    assert ran(STRIDED, Stream())[0] == [0, 0, 0]


def test_a_plan_without_room_is_left_out(installed, monkeypatch):
    monkeypatch.setattr(Graph, "times", (2.0, 1.0))
    monkeypatch.setattr(Graph, "workspaces", (1, 1 << 30))
    module = cupy()

    def alloc(size):
        if size > 1:
            raise MemoryError
        return SimpleNamespace(ptr=size)

    monkeypatch.setattr(module.cuda, "alloc", alloc)
    monkeypatch.setattr(cuda, "cupy", lambda: module)
    assert ran(STRIDED, Stream(), Stream())[1] == [0]


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


def test_a_problem_that_it_refuses_goes_to_our_kernels(installed, monkeypatch):
    monkeypatch.setattr(Graph, "refuses", True)
    assert dispatch.select(FIRST.data_gradient, "gpu", chip=chip_of(90)).name == "blocked_gemm"
    with pytest.raises(UnsupportedError, match="cuDNN: expected a plan for the data gradient of .*, got no engine"):
        dispatch.select(FIRST.data_gradient, "gpu", "cudnn", chip=chip_of(90))


def test_without_it_auto_takes_our_kernels_and_its_name_says_what_to_install(tmp_path):
    (tmp_path / "cudnn.py").write_text("raise ImportError('there is none')")
    program = """
import sys
from cuda_layers import chip_of
from ece408_op.core import dispatch
from ece408_op.errors import UnsupportedError
from ece408_op.problem import ConvProblem
problem = ConvProblem(128, 3, 224, 224, 64, 7, stride=(2, 2), pad=(3, 3)).data_gradient
print(dispatch.select(problem, "gpu", chip=chip_of(90)).name)
try:
    dispatch.select(problem, "gpu", "cudnn", chip=chip_of(90))
except UnsupportedError as error:
    print(error)
"""
    name, message = printed("-W", "ignore", "-c", program, first=[tmp_path]).splitlines()
    assert name == "blocked_gemm"
    assert "there is none" in message
    assert "pip install -e '.[cudnn]'" in message
