"""The layers that tests compile and check CUDA kernels on, and a chip to plan for without a GPU."""

from __future__ import annotations

from hypothesis import strategies as st

from ece408_op.core.kernel import CudaKernel
from ece408_op.kernels import KERNELS
from ece408_op.problem import COURSE_LAYERS, ConvProblem
from ece408_op.runtime.launch import Chip

CUDA_KERNELS = [kernel for kernel in KERNELS if isinstance(kernel, CudaKernel)]

#: Every architecture that some kernel supports.
ARCHITECTURES = (50, 60, 70, 80, 90, 100, 120)

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


def chip_of(architecture: int) -> Chip:
    """A chip of that architecture with the shared memory that all chips of the architecture have."""
    shared = {50: 48, 60: 48, 70: 96, 80: 163, 90: 227, 100: 227, 120: 99}[architecture]
    return Chip(f"sm_{architecture}", (architecture // 10, architecture % 10), 100, shared * 1024)
