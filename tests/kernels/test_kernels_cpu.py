"""Every CPU kernel of the list against float64: shapes, special values, memory's edges."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from cpu_kernels import each_kernel, fitting, fitting_or_skip
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ece408_op.core.check import compare
from ece408_op.kernels.cpu import direct
from ece408_op.problem import ConvProblem
from ece408_op.runtime.llvm import cpu
from ece408_op.runtime.memory import aligned

LEVELS = ["sse", "avx2", "avx512"][: ["sse", "avx2", "avx512"].index(cpu().level) + 1]


@st.composite
def problems(draw, taking):
    kernel = draw(
        st.sampled_from([size for size in range(1, 9) if fitting(taking, ConvProblem(1, 1, 24, 24, 1, size))])
    )
    height, width = draw(st.integers(kernel, kernel + 20)), draw(st.integers(kernel, kernel + 40))
    return ConvProblem(
        draw(st.integers(1, 5)), draw(st.integers(1, 5)), height, width, draw(st.integers(1, 40)), kernel
    )


def arrays(problem, seed=0):
    random = np.random.RandomState(seed)
    return random.randn(*problem.x_shape).astype(np.float32), random.randn(*problem.w_shape).astype(np.float32)


def run(kernel, problem, x, w, threads=2):
    out = np.full(problem.y_shape, np.nan, np.float32)
    kernel.run(problem, x, w, out, min(threads, problem.batch))
    return out


@each_kernel
@settings(max_examples=15, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
def test_random_shapes(kernel, data, seed):
    problem = fitting(kernel, data.draw(problems(kernel)))
    assume(problem is not None)
    x, w = arrays(problem, seed)
    found = compare(run(kernel, problem, x, w), x, w, kernel)
    assert found.passed, f"{problem}: {found}"


SHAPES = {
    "2017": (3, 1, 28, 28, 50, 5),
    "2018sp-2": (3, 6, 30, 30, 16, 5),
    "2018fa-2": (2, 12, 33, 33, 24, 7),
    "one pixel": (1, 1, 1, 1, 1, 1),
    "kernel is the image": (2, 3, 9, 9, 5, 9),
    "one column": (2, 2, 40, 3, 3, 3),
    "one row": (2, 2, 3, 70, 3, 3),
    "kernel 1": (3, 5, 6, 7, 65, 1),
    "large kernel": (1, 2, 24, 31, 3, 20),
    "many channels, in passes": (2, 64, 40, 60, 9, 5),
    "channels in passes of two sizes": (2, 25, 56, 46, 22, 3),
    "rows in bands": (1, 2, 150, 200, 3, 7),
    "passes and a few vectors": (2, 300, 12, 13, 5, 9),
    "wide": (1, 2, 5, 700, 3, 3),
    "filters in lanes": (3, 16, 40, 61, 32, 8),
    "blocks of filters in lanes": (2, 33, 41, 43, 112, 3),
}


#: Shapes that every instruction set is tested with by default; this CPU's best one is tested with all.
SHORT = ("2017", "2018sp-2", "one pixel", "one column", "large kernel", "passes and a few vectors", "filters in lanes")
EACH_LEVEL = [
    pytest.param(shape, level, id=f"{name}-{level}", marks=() if short else pytest.mark.exhaustive)
    for name, shape in SHAPES.items()
    for level in LEVELS
    for short in [level == LEVELS[-1] or name in SHORT]
]


@each_kernel
@pytest.mark.parametrize(("shape", "level"), EACH_LEVEL)
def test_chosen_shapes_with_each_instruction_set(kernel, shape, level, monkeypatch):
    monkeypatch.setenv("ECE408_SIMD", level)
    problem = fitting_or_skip(kernel, ConvProblem(*shape))
    x, w = arrays(problem)
    found = compare(run(kernel, problem, x, w), x, w, kernel)
    assert found.passed, f"{problem}: {found}"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "shape", [(1, 28, 28, 50, 5), (2, 8, 10, 3, 3), (64, 62, 34, 5, 3), (1, 66, 35, 2, 4), (2, 150, 134, 3, 7)], ids=str
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


@each_kernel
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "w"])
def test_not_finite_values_reach_their_outputs_and_no_others(kernel, special, where):
    problem = fitting_or_skip(kernel, ConvProblem(2, 2, 19, 23, 7, 3))
    x, w = arrays(problem)
    if where == "x":
        x[1, 0, 18, 22] = x[0, 1, 9, 0] = special
    else:
        w[3, 1, 2, 0] = special
    found = compare(run(kernel, problem, x, w), x, w, kernel)
    assert found.passed, str(found)


@each_kernel
def test_infinity_times_zero_is_not_a_number(kernel):
    problem = fitting_or_skip(kernel, ConvProblem(1, 1, 6, 20, 2, 3))
    x, w = arrays(problem)
    x[0, 0, 2, 5], w[1] = np.inf, 0
    out = run(kernel, problem, x, w)
    assert np.isnan(out[0, 1]).sum() == 9
    assert not np.isnan(out[0, 0]).any()


@each_kernel
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_threads_change_no_bit(kernel, threads):
    problem = fitting_or_skip(kernel, ConvProblem(29, 2, 12, 20, 6, 3))
    x, w = arrays(problem)
    np.testing.assert_array_equal(run(kernel, problem, x, w, threads), run(kernel, problem, x, w, 1))


@each_kernel
def test_nothing_is_written_around_an_output_at_any_alignment(kernel):
    problem = fitting_or_skip(kernel, ConvProblem(3, 2, 9, 19, 5, 3))
    x, w = arrays(problem)
    size = int(np.prod(problem.y_shape))
    for start in range(1, 17):
        around = np.full(size + 64, 7.0, np.float32)
        out = around[start : start + size].reshape(problem.y_shape)
        out[...] = np.nan
        shifted = np.empty(x.size + start, np.float32)[start:].reshape(x.shape)
        shifted[...] = x
        kernel.run(problem, shifted, w, out, 2)
        assert compare(out, x, w, kernel).passed
        assert (around[:start] == 7).all()
        assert (around[start + size :] == 7).all()


GUARDED = """
import ctypes, mmap, sys
import numpy as np
from ece408_op.core.reference import convolve
from ece408_op.kernels import KERNELS
from ece408_op.problem import ConvProblem

libc = ctypes.CDLL(None)

def guarded(shape, at_end):
    # an array with a forbidden page right behind it, or right before it
    size = int(np.prod(shape)) * 4
    pages = -(-size // mmap.PAGESIZE) + 2
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
    whole = np.frombuffer(memory, np.uint8)
    for page in (0, pages - 1):
        start = ctypes.c_void_p(whole.ctypes.data + page * mmap.PAGESIZE)
        assert libc.mprotect(start, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    first = (pages - 1) * mmap.PAGESIZE - size if at_end else mmap.PAGESIZE
    array = whole[first : first + size].view(np.float32).reshape(shape)
    array[...] = 1
    return array

# Units of two sizes, bands, and filters in lanes among them.
SIZES = [(2, 1, 28, 28, 5, 5), (1, 3, 7, 4, 2, 2), (2, 2, 20, 33, 3, 3), (1, 1, 1, 1, 1, 1), (1, 2, 9, 18, 4, 9)]
SIZES += [(1, 15, 30, 77, 4, 8), (1, 2, 150, 200, 3, 7), (1, 16, 40, 61, 32, 8)]
# Several images in a vector.
SIZES += [(19, 3, 20, 27, 5, 5), (16, 2, 18, 19, 3, 4)]
# Filters of one column, read in place; strides, padding, dilation, groups; a plane of less than a vector.
SIZES += [(2, 5, 9, 11, 25, 1), (2, 64, 40, 60, 9, 1), (2, 3, 17, 20, 6, 3, 1, (1, 1), (1, 0))]
SIZES += [(2, 16, 40, 61, 32, 3, 3, (1, 1), (1, 1)), (2, 3, 23, 22, 5, 5, 3, (2, 2), (2, 1))]
SIZES += [(2, 4, 15, 18, 8, 3, 2, (3, 1), (0, 1), (1, 3), 2), (2, 6, 12, 13, 6, 3, 3, (1, 1), (1, 1), (1, 1), 6)]
SIZES += [(2, 2, 3, 3, 4, 2), (3, 9, 7, 7, 20, 3, 3, (1, 1), (1, 1)), (2, 3, 4, 105, 9, 3, 3, (1, 1), (2, 0))]
ran = 0
for problem in (result for sizes in SIZES for one in [ConvProblem(*sizes)]
                for result in (one, one.data_gradient, one.weight_gradient)):
    expected = convolve(*(np.ones(shape) for shape in problem.shapes[:2]), problem)
    for kernel in KERNELS:
        if kernel.device == "cpu" and not kernel.not_supported_reasons(problem):
            for at_end in (True, False):
                a, b, out = (guarded(shape, at_end) for shape in problem.shapes)
                kernel.run(problem, a, b, out, problem.batch)
                assert (out == expected).all(), (kernel.name, problem)
                ran += 1
assert ran > 250, ran
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
@pytest.mark.parametrize("level", LEVELS)
def test_no_byte_outside_the_arrays_is_touched(level):
    done = subprocess.run(
        [sys.executable, "-c", GUARDED],
        capture_output=True,
        text=True,
        env={**os.environ, "ECE408_SIMD": level},
        check=False,
    )
    assert done.stdout == "done\n", f"exit status {done.returncode}: {done.stderr}"
