"""The layers that tests compile and check CUDA kernels on, a chip to plan for without a GPU, and launches' types."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import strategies as st

from ece408_op.core.kernel import CudaKernel
from ece408_op.kernels import KERNELS
from ece408_op.problem import COURSE_LAYERS, ConvProblem
from ece408_op.runtime.launch import Chip, Launch, TensorMap

#: The kernels that this package compiles.
CUDA_KERNELS = [kernel for kernel in KERNELS if isinstance(kernel, CudaKernel) and kernel.sources]

#: Every architecture that some kernel supports.
ARCHITECTURES = (50, 60, 70, 80, 90, 100, 120)
#: One of them by default.
each_architecture = pytest.mark.parametrize(
    "architecture", [pytest.param(a, marks=() if a == 90 else pytest.mark.exhaustive) for a in ARCHITECTURES]
)

#: The layers of the course's networks: 2017, 2018 spring, 2018 fall.
COURSE = list(COURSE_LAYERS.values())
#: The smallest layer, odd and non-square ones, one filter more than a tile has, the widest, a pointwise one.
ODD = [
    ConvProblem(1, 1, 1, 1, 1, 1),
    ConvProblem(7, 5, 7, 13, 3, 3),
    ConvProblem(3, 2, 9, 70, 65, 2),
    ConvProblem(2, 64, 12, 15, 256, 11),
    ConvProblem(7, 3, 40, 37, 9, 1),
    ConvProblem(1000, 17, 6, 11, 31, 6),
    ConvProblem(5, 1, 23, 19, 17, 4),
    ConvProblem(5, 131, 23, 19, 70, 1),
    ConvProblem(4, 24, 11, 10, 130, 1),
]
#: Small layers with every attribute: padding, strides with and without common divisors of the dilation, groups,
#: rectangular filters, filters as large as the padded image, images smaller than the padded filter.
GENERAL = [
    ConvProblem(3, 5, 8, 8, 12, 3, pad=(1, 1)),
    ConvProblem(2, 3, 11, 9, 20, 5, stride=(2, 2), pad=(2, 2)),
    ConvProblem(3, 6, 9, 12, 9, 2, 3, stride=(3, 2), pad=(0, 2), dilate=(2, 3), groups=3),
    ConvProblem(2, 70, 6, 5, 34, 1, stride=(2, 1)),
    ConvProblem(5, 4, 3, 2, 140, 4, 3, pad=(2, 3), dilate=(2, 1), groups=2),
    ConvProblem(2, 2, 10, 9, 3, 2, stride=(4, 6), dilate=(2, 4)),
    ConvProblem(2, 6, 13, 10, 12, 3, stride=(2, 2), pad=(1, 1), groups=6),
    ConvProblem(3, 5, 20, 7, 5, 2, 3, stride=(3, 1), pad=(1, 0), dilate=(2, 2), groups=5),
]
#: The same and their gradients, and the gradients of plain layers.
PROBLEMS = [
    each
    for plain in [
        *GENERAL,
        ConvProblem(7, 5, 7, 13, 3, 3),
        ConvProblem(3, 6, 12, 12, 16, 5),
        ConvProblem(13, 1, 11, 14, 7, 3, 4, pad=(1, 3)),
    ]
    for each in (*([plain] if plain.needs else []), plain.data_gradient, plain.weight_gradient)
]
#: Layers with fused tanh and pooling: the course's, odd edges, a single maximum, a pointwise one.
POOLED = [
    *[problem.pooled(False) for problem in COURSE],
    ConvProblem(7, 5, 7, 13, 3, 3).pooled(True),
    ConvProblem(1, 1, 1, 1, 1, 1).pooled(True),
    ConvProblem(3, 2, 9, 70, 65, 2).pooled(False),
    ConvProblem(2, 64, 12, 15, 256, 11).pooled(False),
    ConvProblem(7, 3, 40, 37, 9, 1).pooled(False),
]


def random_layers(batches: list[int], side: int) -> st.SearchStrategy[ConvProblem]:
    """Layers of those batches whose outputs have at most side x side pixels; some with one channel, some pointwise."""
    return st.builds(
        lambda b, c, h, w, m, k: ConvProblem(b, c, h + k - 1, w + k - 1, m, k),
        st.sampled_from(batches),
        st.one_of(st.integers(1, 64), st.just(1)),
        st.integers(1, side),
        st.integers(1, side),
        st.integers(1, 256),
        st.one_of(st.integers(1, 11), st.just(1)),
    )


def random_problems(batches: list[int], side: int) -> st.SearchStrategy[ConvProblem]:
    """Convolutions with every attribute and their gradients, images of at most side x side pixels.

    Some are depthwise, some have stride 1, no dilation and one group, as kernels for the one or the other need it.
    """
    pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))

    def build(family, batch, groups, channels, filters, size, kernel, stride, pad, dilate, kind):
        if family == "depthwise":
            groups, channels, filters = channels, 1, 1 + filters % 2
        elif family in ("dense", "square"):
            groups, stride, dilate = 1, (1, 1), (1, 1)
            kernel = (kernel[0], kernel[0] if family == "square" else kernel[1])
        least = tuple(max(1, d * (k - 1) + 1 - 2 * p) for d, k, p in zip(dilate, kernel, pad))
        height, width = (max(one, other) for one, other in zip(size, least))
        problem = ConvProblem(
            batch, groups * channels, height, width, groups * filters, *kernel, stride, pad, dilate, groups
        )
        return {"y": problem, "x": problem.data_gradient, "w": problem.weight_gradient}[kind]

    return st.builds(
        build,
        st.sampled_from(["any", "depthwise", "dense", "square"]),
        st.sampled_from(batches),
        st.one_of(st.just(1), st.integers(1, 9)),
        st.one_of(st.just(1), st.integers(1, 24)),
        st.one_of(st.just(1), st.integers(1, 70)),
        st.tuples(st.integers(1, side), st.integers(1, side)),
        st.one_of(st.just((1, 1)), st.tuples(st.integers(1, 5), st.integers(1, 5))),
        pairs,
        st.one_of(st.just((0, 0)), st.tuples(st.integers(0, 3), st.integers(0, 3))),
        pairs,
        st.sampled_from("yxw"),
    )


H200 = Chip("NVIDIA H200", (9, 0), 132, 227 * 1024)


def chip_of(architecture: int) -> Chip:
    """A chip of that architecture with the shared memory that all chips of the architecture have."""
    shared = {50: 48, 60: 48, 70: 96, 80: 163, 90: 227, 100: 227, 120: 99}[architecture]
    return Chip(f"sm_{architecture}", (architecture // 10, architecture % 10), 100, shared * 1024)


def check_args(text: str, step: Launch) -> None:
    """Check that a launch's arguments have the types of the kernel's parameters in its source.

    Names of arrays are pointers; "first" and "images" are numbers that the launch fills in.
    """
    found = re.search(rf'extern "C" __global__ void[^;{{]*?\b{step.entry}\(([^)]*)\)\s*{{', text)
    assert found, f"no kernel {step.entry} in the source"
    parameters = re.sub(r"\bconst\b|__grid_constant__", "", found.group(1)).split(",")
    names = {"first": "long long", "images": "int"}
    types = {np.int32: "int", np.int64: "long long", np.float32: "float", np.float64: "double", TensorMap: "TensorMap"}
    passed = [names.get(one, "pointer") if isinstance(one, str) else types[type(one)] for one in step.args]
    declared = ["pointer" if "*" in each else " ".join(each.split()[:-1]) for each in parameters]
    assert passed == declared, step.entry
