"""Every CPU kernel of the list, and every gradient that it computes, against float64: layers, values, threads, memory.

``--exhaustive`` runs all layers with each instruction set, not this CPU's best one alone.
"""

import ctypes
import gc
import mmap
import os
import pkgutil
import signal
import tracemalloc
from importlib import import_module

import numpy as np
import pytest
from cpu_kernels import CPU_KERNELS, LEVELS, arrays, assert_right, check, fitting, run
from general_problems import problems
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ece408_op.core.check import compare
from ece408_op.kernels import cpu
from ece408_op.kernels.cpu import direct, im2col
from ece408_op.problem import ConvProblem
from ece408_op.runtime.llvm import CAPACITY
from ece408_op.runtime.memory import aligned

#: With pooling, both conventions: "valid" needs two rows and columns.
RESULTS = {
    "forward": lambda problem: problem,
    "data": lambda problem: problem.data_gradient,
    "weight": lambda problem: problem.weight_gradient,
    "pooled": lambda problem: problem.pooled(problem.batch % 2 == 1 or min(problem.y_shape[2:]) < 2),
}
PLAIN = {size: ConvProblem(1, 1, 19, 19, 1, size) for size in (1, 2, 3, 4, 7)}
#: Kernels, and the results that they compute.
CASES = [
    pytest.param(kernel, name, id=f"{kernel.name}-{name}")
    for kernel in CPU_KERNELS
    for name, result in RESULTS.items()
    if fitting(kernel, result(PLAIN[3]))
]
each_case = pytest.mark.parametrize(("kernel", "result"), CASES)
each_plain_case = pytest.mark.parametrize(("kernel", "result"), [case for case in CASES if case.values[1] != "pooled"])

#: Layers of networks in small, each with an attribute.
LAYERS = [
    ConvProblem(3, 1, 28, 28, 50, 5),
    ConvProblem(2, 12, 33, 33, 24, 7),
    ConvProblem(2, 16, 14, 14, 32, 3, pad=(1, 1)),
    ConvProblem(1, 20, 5, 110, 40, 3, pad=(1, 1)),  # wide rows
    ConvProblem(1, 17, 120, 9, 3, 3, pad=(21, 1)),  # bands of rows
    ConvProblem(1, 3, 5, 6, 4, 3, pad=(4, 3)),  # more padding than filter
    ConvProblem(2, 3, 31, 29, 8, 7, stride=(2, 2), pad=(3, 3)),
    ConvProblem(2, 4, 11, 12, 5, 1, stride=(3, 2)),  # beyond the filter
    ConvProblem(3, 20, 7, 9, 33, 1),
    ConvProblem(2, 6, 17, 17, 8, 1, 7, pad=(0, 3)),
    ConvProblem(2, 6, 17, 17, 8, 7, 1, pad=(3, 0)),
    ConvProblem(2, 32, 20, 37, 32, 3, pad=(1, 1), groups=32),
    ConvProblem(2, 24, 15, 35, 24, 3, stride=(2, 2), pad=(1, 1), groups=24),
    ConvProblem(2, 8, 9, 20, 24, 5, pad=(2, 2), groups=8),
    ConvProblem(2, 12, 10, 11, 18, 3, pad=(1, 1), groups=3),
    ConvProblem(2, 5, 19, 21, 7, 3, pad=(2, 2), dilate=(2, 2)),
    ConvProblem(2, 2, 3, 4, 3, 5, 6, pad=(1, 1)),  # a filter as large as the padded image
    ConvProblem(1, 2, 1, 1, 3, 3, pad=(1, 1)),
    ConvProblem(2, 2, 1, 3, 64, 3, stride=(2, 1), pad=(2, 1)),  # an output smaller than the filter, of many channels
]
#: Plain layers, for the kernels that compute the convolution.
FORWARD = [
    ConvProblem(3, 6, 30, 30, 16, 5),
    ConvProblem(1, 1, 1, 1, 1, 1),
    ConvProblem(2, 3, 9, 9, 5, 9),
    ConvProblem(2, 2, 3, 3, 4, 2),  # a plane of less than a vector
    ConvProblem(19, 3, 20, 27, 5, 5),  # several images in a vector
    ConvProblem(2, 2, 40, 3, 3, 3),
    ConvProblem(2, 2, 3, 70, 3, 3),
    ConvProblem(3, 5, 6, 7, 65, 1),
    ConvProblem(2, 25, 56, 46, 22, 3),  # in passes of two sizes
    ConvProblem(1, 2, 5, 700, 3, 3),
    ConvProblem(2, 33, 41, 43, 112, 3),  # blocks of filters in lanes
]
#: Layers for which ``direct`` compiles other code.
DIRECT = [
    ConvProblem(1, 2, 24, 31, 3, 20),
    ConvProblem(2, 64, 40, 60, 9, 5),  # many channels, in passes
    ConvProblem(1, 2, 150, 200, 3, 7),  # rows in bands
    ConvProblem(2, 300, 12, 13, 5, 9),  # passes and a few vectors
    ConvProblem(1, 30000, 2, 2, 2, 2),  # less than a vector, and too many channels for the cache
    ConvProblem(1, 3, 205, 202, 2, 200),  # the same of few channels, with a filter too large for it
    ConvProblem(3, 16, 40, 61, 32, 8),  # filters in lanes
]
#: Those that every instruction set computes by default, and ``direct`` one more.
SHORT = [LAYERS[0], LAYERS[2]]


def taken(kernel, result, layers):
    """The results that the kernel takes, with more images if it wants them."""
    found = [problem for layer in layers for problem in [fitting(kernel, RESULTS[result](layer))] if problem]
    assert found
    return found


def layers_of(kernel, result):
    """All results that the kernel takes, but for winograd's, whose tests have every size of filters."""
    if kernel.name == "winograd":
        return taken(kernel, result, [*SHORT, DIRECT[-1], FORWARD[2], FORWARD[4], FORWARD[6]])
    plain = [*FORWARD, *(DIRECT if kernel is direct.KERNEL else [])] if result in ("forward", "pooled") else []
    return taken(kernel, result, [*LAYERS, *plain])


@each_case
def test_random_problems(kernel, result):
    ran = []
    sizes = [size for size, plain in PLAIN.items() if fitting(kernel, RESULTS[result](plain))]

    @settings(max_examples=6, suppress_health_check=[HealthCheck.filter_too_much])
    @given(problem=problems(kernel.features, largest_extra=20, most_channels=5, sizes=sizes), seed=st.integers(0, 99))
    def each(problem, seed):
        problem = fitting(kernel, RESULTS[result](problem))
        assume(problem is not None)
        check(kernel, problem, *arrays(problem, seed))
        ran.append(problem)

    each()
    assert len(ran) >= 4


@each_case
@pytest.mark.parametrize(
    ("level", "every"),
    [
        *((level, level == LEVELS[-1]) for level in LEVELS),
        *(pytest.param(level, True, marks=pytest.mark.exhaustive) for level in LEVELS[:-1]),
    ],
)
def test_layers_with_each_instruction_set(kernel, result, level, every, monkeypatch):
    monkeypatch.setenv("ECE408_SIMD", level)
    short = [*SHORT, *(DIRECT[-1:] if kernel is direct.KERNEL else [])]
    for problem in layers_of(kernel, result) if every else taken(kernel, result, short):
        check(kernel, problem, *arrays(problem))


@each_plain_case
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_special_values_are_those_of_the_sums_in_float64(kernel, result, every):
    """Padding counts as zeros, whose product with an infinite weight is NaN, as in MXNet with a few channels.

    By default each of six or more layers has one of the three values in one operand, and another in the other.
    """
    # winograd's, which have every size of filters, are compiled for the other tests.
    problems = layers_of(kernel, result) if kernel.name == "winograd" else taken(kernel, result, LAYERS)
    values, ran = (np.nan, np.inf, -np.inf), 0
    for number, problem in enumerate(problems):
        for operand in (0, 1):
            for special in values if every or len(problems) < 6 else (values[(number + operand) % 3],):
                both = arrays(problem, 2)
                other, place = both[1 - operand].reshape(-1), both[operand].reshape(-1)
                other[:: 1 + len(other) // 5] = 0
                place[len(place) * 2 // 3] = place[0] = special
                check(kernel, problem, *both)
                ran += 1
    assert ran >= 6


#: Many images, and fewer than threads, whose output channels the threads share.
SHARED = [
    ConvProblem(29, 4, 12, 20, 6, 3),
    ConvProblem(1, 40, 9, 20, 48, 3, pad=(1, 1)),
    ConvProblem(2, 66, 8, 11, 64, 3),
    ConvProblem(1, 64, 9, 20, 128, 3, pad=(1, 1), groups=4),
    ConvProblem(1, 60, 9, 20, 60, 3, stride=(2, 1), pad=(1, 1), groups=60),
]


@each_case
def test_the_number_of_threads_changes_no_bit(kernel, result):
    for problem in taken(kernel, result, SHARED):
        a, b = arrays(problem, 3)
        one = run(kernel, problem, a, b, 1)
        assert_right(kernel, problem, a, b, one)
        for threads in (2, 3, 8):
            np.testing.assert_array_equal(run(kernel, problem, a, b, threads), one, err_msg=str(problem))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "shape",
    [
        *((1, 28, 28, 50, 5), (2, 8, 10, 3, 3), (1, 66, 35, 2, 4), (2, 150, 134, 3, 7)),
        pytest.param((64, 62, 34, 5, 3), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_large_outputs_are_right_past_the_caches(shape, level, monkeypatch):
    """From 32 MB on, and with planes of whole cache lines, outputs are stored past the caches."""
    monkeypatch.setenv("ECE408_SIMD", level)
    few = ConvProblem(3, *shape)
    assert np.prod(few.y_shape[2:]) % 16 == 0
    times = 2**25 // (4 * int(np.prod(few.y_shape))) + 1
    problem = few.with_batch(3 * times)
    x, w = arrays(few)
    out = aligned(int(np.prod(problem.y_shape))).reshape(problem.y_shape)
    out[...] = np.nan
    direct.KERNEL.run(problem, np.tile(x, (times, 1, 1, 1)), w, out, 2)
    found = compare(out[:3], x, w, direct.KERNEL)
    assert found.passed, f"{problem}: {found}"
    assert (out.reshape(times, *few.y_shape) == out[:3]).all()


@pytest.mark.parametrize("shape", [(1, 28, 28, 50, 5), (8, 32, 32, 8, 1)], ids=str)
def test_a_small_output_with_planes_of_whole_cache_lines_begins_anywhere(shape):
    """In a forked process, which a store past the caches to another address than a multiple of a vector would end."""
    problem = ConvProblem(2, *shape)
    x, w = arrays(problem)
    out = aligned(int(np.prod(problem.y_shape)) + 1)[1:].reshape(problem.y_shape)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        direct.KERNEL.run(problem, x, w, out, 2)
        os._exit(not compare(out, x, w, direct.KERNEL).passed)
    assert os.waitpid(child, 0)[1] == 0


@each_case
def test_nothing_is_written_around_an_output_at_any_alignment(kernel, result):
    problem = fitting(kernel, RESULTS[result](ConvProblem(3, 2, 9, 19, 5, 3)))
    a, b = arrays(problem)
    size = int(np.prod(problem.shapes[2]))
    for start in range(1, 17):
        around = np.full(size + 64, 7.0, np.float32)
        out = around[start : start + size].reshape(problem.shapes[2])
        out[...] = np.nan
        shifted = np.empty(a.size + start, np.float32)[start:].reshape(a.shape)
        shifted[...] = a
        kernel.run(problem, shifted, b, out, 2)
        assert_right(kernel, problem, a, b, out)
        assert (around[:start] == 7).all()
        assert (around[start + size :] == 7).all()


def guarded(shape, at_end):
    """An array of ones with a forbidden page right behind it, or right before it."""
    size = int(np.prod(shape)) * 4
    pages = -(-size // mmap.PAGESIZE) + 2
    whole = np.frombuffer(mmap.mmap(-1, pages * mmap.PAGESIZE), np.uint8)
    for page in (0, pages - 1):
        start = ctypes.c_void_p(whole.ctypes.data + page * mmap.PAGESIZE)
        assert ctypes.CDLL(None).mprotect(start, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    first = (pages - 1) * mmap.PAGESIZE - size if at_end else mmap.PAGESIZE
    array = whole[first : first + size].view(np.float32).reshape(shape)
    array[...] = 1
    return array


@each_case
@pytest.mark.parametrize(
    "level", [pytest.param(level, marks=pytest.mark.exhaustive) for level in LEVELS[:-1]] + LEVELS[-1:]
)
def test_no_byte_outside_the_arrays_is_touched(kernel, result, level, monkeypatch):
    """In a forked process, which has the code that other tests have compiled, and which such an access ends."""
    monkeypatch.setenv("ECE408_SIMD", level)
    problems = layers_of(kernel, result)
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        for problem in problems:
            for at_end in (True, False):
                a, b, out = (guarded(shape, at_end) for shape in problem.shapes)
                kernel.run(problem, a, b, out, 2)
                try:
                    assert_right(kernel, problem, a, b, out)
                except AssertionError:
                    os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@each_case
def test_a_call_keeps_nothing_of_the_size_of_an_operand(kernel, result):
    for problem in taken(kernel, result, SHORT):
        a, b = arrays(problem)
        out = np.empty(problem.shapes[2], np.float32)
        kernel.prepare(problem, out)
        tracemalloc.start()
        try:
            kernel.run(problem, a, b, out, 1)
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # A first call also makes some objects of Python.
        assert kept < max(1 << 14, min(a.nbytes, b.nbytes, out.nbytes)), problem


def test_a_layers_functions_are_kept_as_long_as_compiled_once_keeps_them():
    """The plans' caches have no limit, and hold no machine code."""
    modules = [import_module(f"{cpu.__name__}.{module.name}") for module in pkgutil.iter_modules(cpu.__path__)]
    found = [value for module in modules for value in vars(module).values() if hasattr(value, "cache_parameters")]
    limits = [cache.cache_parameters()["maxsize"] for cache in found]
    assert len(limits) > len(CPU_KERNELS)
    assert {limit for limit in limits if limit is not None} == {CAPACITY}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_weight_gradient_of_small_outputs_is_right_where_products_have_different_numbers_of_images(threads):
    problem = ConvProblem(35, 4, 9, 8, 6, 8, 7, groups=2).weight_gradient
    a, b = arrays(problem)
    assert_right(im2col.KERNEL, problem, a, b, run(im2col.KERNEL, problem, a, b, threads))


@pytest.mark.filterwarnings("error")
def test_a_weight_gradient_that_overflows_as_images_are_added_is_no_warning():
    problem = ConvProblem(2, 1, 2, 2, 1, 2).weight_gradient
    x, y, out = (np.full(shape, value, np.float32) for shape, value in zip(problem.shapes, (2e38, 1, 0)))
    im2col.KERNEL.run(problem, x, y, out, 2)
    assert np.isinf(out).all()
