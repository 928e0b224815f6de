"""cuDNN as one of the kernels: where auto takes it, and what is said without it. test_gradients_gpu.py runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda_layers import chip_of

from ece408_op.core import dispatch
from ece408_op.errors import UnsupportedError
from ece408_op.kernels.cuda import cudnn
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

WIDE = ConvProblem(128, 64, 56, 56, 64, 3, pad=(1, 1))
STRIDED = ConvProblem(128, 128, 56, 56, 128, 3, stride=(2, 2), pad=(1, 1))
FIRST = ConvProblem(128, 3, 224, 224, 64, 7, stride=(2, 2), pad=(3, 3))
DEPTHWISE = ConvProblem(128, 32, 112, 112, 32, 3, stride=(2, 2), pad=(1, 1), groups=32)


class Tensor:
    """cuDNN's, which knows its layout."""

    def __init__(self, shape=None, strides=None):
        self.shape, self.strides = shape, strides

    def set_output(self, yes):
        return self

    def set_data_type(self, kind):
        return self

    def set_dim(self, shape):
        self.shape = tuple(shape)
        return self

    def set_stride(self, strides):
        self.strides = tuple(strides)
        return self


class Graph:
    """cuDNN's, which remembers what it was asked for."""

    refuses = False
    made: list[Graph] = []

    def __init__(self, **options):
        self.excluded, self.executed, self.asked = None, None, None
        Graph.made.append(self)

    def tensor(self, name, dim, stride, data_type):
        return Tensor(tuple(dim), tuple(stride))

    def __getattr__(self, name):
        def step(*given, **words):
            if name.startswith("conv_"):
                self.asked = name, words
                return Tensor()
            if name == "check_support" and self.refuses:
                raise RuntimeError("no engine")
            return 3 if name == "get_workspace_size" else None

        return step

    def deselect_numeric_notes(self, notes):
        self.excluded = set(notes)

    def execute(self, pointers, workspace, handle):
        self.executed = {tensor.shape: pointer for tensor, pointer in pointers.items()}, workspace, handle


@pytest.fixture
def installed(monkeypatch):
    """Have a package cudnn, and one GPU."""
    notes = SimpleNamespace(**{name: name for name in (*cudnn._EXCLUDED, "WINOGRAD")})
    package = SimpleNamespace(
        backend_version=lambda: 91900,
        create_handle=lambda: "handle",
        set_stream=lambda handle, stream: None,
        pygraph=Graph,
        numerical_note=notes,
        data_type=SimpleNamespace(FLOAT="float"),
        heur_mode=SimpleNamespace(A="a", FALLBACK="fallback"),
        build_plan_policy=SimpleNamespace(HEURISTICS_CHOICE="first"),
    )
    module = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0)))
    monkeypatch.setitem(sys.modules, "cudnn", package)
    monkeypatch.setattr(cuda, "cupy", lambda: module)
    monkeypatch.setattr(Graph, "made", [])
    monkeypatch.setattr(cudnn, "_handles", {})
    for cached in (cudnn.library, cudnn._graph, dispatch._select):
        cached.cache_clear()
    yield package
    for cached in (cudnn.library, cudnn._graph, dispatch._select):
        cached.cache_clear()


@pytest.mark.parametrize("architecture", [70, 80, 90])
@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (FIRST.data_gradient, True),
        (STRIDED.data_gradient, True),
        (WIDE.weight_gradient, True),
        (STRIDED.weight_gradient, False),
        (FIRST.weight_gradient, False),
        (FIRST, False),
        (DEPTHWISE.data_gradient, False),
        (DEPTHWISE.weight_gradient, False),
    ],
    ids=str,
)
def test_auto_takes_it_where_it_is_faster(installed, architecture, problem, expected):
    chosen = dispatch.select(problem, "gpu", chip=chip_of(architecture))
    assert (chosen is cudnn.KERNEL) == expected


def test_wide_layers_need_it_on_gpus_without_wgmma_only(installed):
    assert dispatch.select(WIDE, "gpu", chip=chip_of(80)) is cudnn.KERNEL
    assert dispatch.select(WIDE, "gpu", chip=chip_of(90)) is not cudnn.KERNEL
    assert dispatch.select(WIDE.data_gradient, "gpu", chip=chip_of(90)) is not cudnn.KERNEL


@pytest.mark.parametrize(
    ("problem", "name"), [(STRIDED, "fprop"), (STRIDED.data_gradient, "dgrad"), (STRIDED.weight_gradient, "wgrad")]
)
def test_it_asks_for_the_convolution_in_float32(installed, problem, name):
    plan = cudnn.KERNEL.plan(problem, chip_of(90), 16)
    (graph,) = Graph.made
    asked, words = graph.asked
    assert asked == f"conv_{name}"
    assert (words["stride"], words["padding"], words["dilation"]) == ([2, 2], [1, 1], [1, 1])
    assert graph.excluded == {"TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION"}
    (call,) = plan.steps(problem.batch)
    assert plan.launch_ranges(problem.batch) == [(0, problem.batch)]
    call.call({**dict(zip(problem.operands, (16, 32, 48))), "workspace": 64}, SimpleNamespace(ptr=0))
    assert graph.executed == (dict(zip(problem.shapes, (16, 32, 48))), 64, "handle")


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
    folders = (tmp_path, Path(__file__).parents[1] / "helpers", Path(__file__).parents[2])
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, "-W", "ignore", "-c", program], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    name, message = done.stdout.splitlines()
    assert name == "blocked_gemm"
    assert "there is none" in message
    assert "pip install -e '.[cudnn]'" in message
