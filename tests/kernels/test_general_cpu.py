"""CPU kernels with every attribute of MXNet's Convolution, and their gradients, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_kernels import CPU_KERNELS
from general_problems import problems
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ece408_op.core import dispatch
from ece408_op.core.check import compare
from ece408_op.problem import ConvProblem

RESULTS = {
    "forward": lambda problem: problem,
    "data": lambda problem: problem.data_gradient,
    "weight": lambda problem: problem.weight_gradient,
}
PLAIN = {size: ConvProblem(1, 1, 9, 9, 1, size) for size in (1, 2, 3, 4)}

#: Kernels, and the results for which they take more than the plain convolution.
CASES = [
    pytest.param(kernel, result, id=f"{kernel.name}-{name}")
    for kernel in CPU_KERNELS
    for name, result in RESULTS.items()
    if kernel.features and not kernel.not_supported_reasons(result(PLAIN[3]))
]
each_case = pytest.mark.parametrize(("kernel", "result"), CASES)

#: Layers of networks in small, each with an attribute, and a course layer.
LAYERS = {
    "2017": ConvProblem(3, 1, 28, 28, 50, 5),
    "2018fa-2": ConvProblem(2, 12, 33, 33, 24, 7),
    "padding": ConvProblem(2, 16, 14, 14, 32, 3, pad=(1, 1)),
    "wide rows, padding": ConvProblem(1, 20, 5, 110, 40, 3, pad=(1, 1)),
    "bands of rows": ConvProblem(1, 17, 120, 9, 3, 3, pad=(21, 1), stride=(1, 1)),
    "wide padding": ConvProblem(1, 3, 5, 6, 4, 3, pad=(4, 3)),
    "stride": ConvProblem(2, 3, 31, 29, 8, 7, stride=(2, 2), pad=(3, 3)),
    "stride beyond the filter": ConvProblem(2, 4, 11, 12, 5, 1, stride=(3, 2)),
    "1 x 1": ConvProblem(3, 20, 7, 9, 33, 1),
    "rectangular": ConvProblem(2, 6, 17, 17, 8, 1, 7, pad=(0, 3)),
    "one column": ConvProblem(2, 6, 17, 17, 8, 7, 1, pad=(3, 0)),
    "depthwise": ConvProblem(2, 32, 20, 37, 32, 3, pad=(1, 1), groups=32),
    "depthwise, stride": ConvProblem(2, 24, 15, 35, 24, 3, stride=(2, 2), pad=(1, 1), groups=24),
    "depthwise, several filters": ConvProblem(2, 8, 9, 20, 24, 5, pad=(2, 2), groups=8),
    "groups": ConvProblem(2, 12, 10, 11, 18, 3, pad=(1, 1), groups=3),
    "dilation": ConvProblem(2, 5, 19, 21, 7, 3, pad=(2, 2), dilate=(2, 2)),
    "filter of the padded image": ConvProblem(2, 2, 3, 4, 3, 5, 6, pad=(1, 1)),
    "no column left": ConvProblem(1, 2, 1, 1, 3, 3, pad=(1, 1)),
}


def arrays(problem, seed):
    random = np.random.RandomState(seed)
    return [random.standard_normal(shape).astype(np.float32) for shape in problem.shapes[:2]]


def run(kernel, problem, a, b, threads=2):
    out = np.full(problem.shapes[2], np.nan, np.float32)
    kernel.run(problem, a, b, out, threads)
    return out


def check(kernel, problem, a, b):
    found = compare(run(kernel, problem, a, b), a, b, kernel, problem=problem)
    assert found.passed, f"{problem}: {found}"


@each_case
def test_random_problems(kernel, result):
    ran = []
    sizes = [size for size, plain in PLAIN.items() if not kernel.not_supported_reasons(result(plain))]

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
    @given(problem=problems(kernel.features, largest_extra=7, sizes=sizes), seed=st.integers(0, 99))
    def each(problem, seed):
        problem = result(problem)
        assume(not kernel.not_supported_reasons(problem))
        check(kernel, problem, *arrays(problem, seed))
        ran.append(problem)

    each()
    assert len(ran) >= 30


@each_case
def test_layers_of_networks(kernel, result):
    taken = [problem for problem in map(result, LAYERS.values()) if not kernel.not_supported_reasons(problem)]
    for problem in taken:
        check(kernel, problem, *arrays(problem, 1))
    assert len(taken) >= 3


@each_case
def test_special_values_are_those_of_the_sums_in_float64(kernel, result):
    """Padding counts as zeros, whose product with an infinite weight is NaN, as in MXNet with a few channels."""
    ran = 0
    for layer in LAYERS.values():
        problem = result(layer)
        if kernel.not_supported_reasons(problem):
            continue
        for special in (np.nan, np.inf, -np.inf):
            for operand in (0, 1):
                both = arrays(problem, 2)
                other, place = both[1 - operand].reshape(-1), both[operand].reshape(-1)
                other[:: 1 + len(other) // 5] = 0
                place[len(place) * 2 // 3] = place[0] = special
                check(kernel, problem, *both)
                ran += 1
    assert ran >= 18


#: Many images, and fewer than threads, whose output channels the threads share.
SHARED = {
    "images": ConvProblem(29, 4, 12, 20, 6, 3),
    "an image": ConvProblem(1, 40, 9, 20, 48, 3, pad=(1, 1)),
    "two images": ConvProblem(2, 66, 8, 11, 64, 3),
    "groups": ConvProblem(1, 64, 9, 20, 128, 3, pad=(1, 1), groups=4),
    "depthwise": ConvProblem(1, 60, 9, 20, 60, 3, stride=(2, 1), pad=(1, 1), groups=60),
}


@each_case
@pytest.mark.parametrize("layer", SHARED.values(), ids=SHARED)
def test_the_number_of_threads_changes_no_bit(kernel, result, layer):
    problem = result(layer)
    if kernel.not_supported_reasons(problem):
        pytest.skip(f"{kernel.name} does not take the layer")
    a, b = arrays(problem, 3)
    one = run(kernel, problem, a, b, 1)
    assert compare(one, a, b, kernel, problem=problem).passed
    for threads in (2, 3, 8):
        np.testing.assert_array_equal(run(kernel, problem, a, b, threads), one)


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_one_kernel_takes_each_problem_that_was_chosen(result):
    """What ``auto`` chooses is right, whichever kernel that is."""
    for layer in LAYERS.values():
        problem = result(layer)
        check(dispatch.select(problem), problem, *arrays(problem, 4))
