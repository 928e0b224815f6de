"""The parent's kernels for a GPU: compiled by NVRTC, and run as plain C++, one thread, against NumPy."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import nvrtc
import pytest

from ece408_op.core import reference
from ece408_op.core.kernel import float32_bound
from ece408_op.grade import _judge
from ece408_op.problem import ConvProblem

SOURCE = Path(_judge.__file__).parent / "native" / "gpu_side.cu"
#: CUDA's words in C++: a grid of one thread.
SHIM = """
#include <cmath>
#include <cstring>
using std::fabs; using std::isfinite;
#define __global__
#define __device__
struct { unsigned x; } blockIdx = {0}, threadIdx = {0}, blockDim = {1}, gridDim = {1};
static void atomicAdd(unsigned long long* at, unsigned long long value) { *at += value; }
static float __int_as_float(int bits) { float value; std::memcpy(&value, &bits, 4); return value; }
"""
PROBLEM = ConvProblem(3, 4, 9, 8, 5, 3)
SIZES = (4, 9, 8, 5, 3)


@pytest.mark.parametrize("architecture", [60, 90])
def test_it_compiles(architecture: int) -> None:
    if nvrtc.missing():
        pytest.skip(f"NVRTC of the test extra is missing: {nvrtc.missing()}")
    kernels = nvrtc.compile_text(SOURCE.read_text(), architecture)
    assert set(kernels) == {
        "draw",
        "sprinkle",
        "differ",
        "unlike",
        "digest",
        "judge",
        "traces",
        "convolve",
        "thermometer",
    }
    assert all(report.spill_bytes == 0 for report in kernels.values())


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("side")
    (folder / "side.cpp").write_text(SHIM + SOURCE.read_text())
    command = ["g++", "-O2", "-shared", "-fPIC", "-o", str(folder / "side.so"), str(folder / "side.cpp")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "side.so"))


def at(array: np.ndarray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def long(value: int) -> ctypes.c_ulonglong:
    return ctypes.c_ulonglong(value)


def drawn(kernels: ctypes.CDLL, count: int, seed: int, kind: int) -> np.ndarray:
    to = np.full(count, np.nan, np.float32)
    kernels.draw(at(to), long(count), long(seed), kind)
    return to


def test_real_numbers_are_uniform_and_another_seed_gives_others(kernels: ctypes.CDLL) -> None:
    x = drawn(kernels, 100_000, 7, 0)
    assert (x >= -1).all() and (x < 1).all()
    # The mean of n uniform numbers has a standard deviation of 1 / sqrt(3 n): six of them.
    assert abs(x.mean()) < 6 / np.sqrt(3 * x.size)
    assert abs(np.corrcoef(x[1:], x[:-1])[0, 1]) < 6 / np.sqrt(x.size)
    assert (drawn(kernels, 1000, 8, 0) != x[:1000]).mean() > 0.99


def test_whole_numbers(kernels: ctypes.CDLL) -> None:
    assert set(drawn(kernels, 1000, 3, 1)) == {-2, -1, 1, 2}
    assert set(drawn(kernels, 1000, 3, 2)) == {-1, 1}


def test_a_sprinkle_changes_every_image_and_few_elements(kernels: ctypes.CDLL) -> None:
    before = drawn(kernels, 64 * 700, 1, 0)
    after = before.copy()
    kernels.sprinkle(at(after), long(after.size), long(700), long(9))
    changed = (before != after).reshape(64, 700)
    assert changed.any(axis=1).all()
    assert changed.mean() < 0.01


@pytest.mark.parametrize("kind", [_judge.REAL, _judge.WHOLE])
@pytest.mark.parametrize("spoilt", [False, True])
def test_it_judges_as_numpy_does(kernels: ctypes.CDLL, kind: str, spoilt: bool) -> None:
    x, w = _judge.draw(PROBLEM, kind, np.random.default_rng(5))
    y = np.zeros(PROBLEM.y_shape, np.float32)
    for p in range(3):
        for q in range(3):
            y += np.einsum("bcij,mc->bmij", x[:, :, p : p + 7, q : q + 6], w[:, :, p, q])
    if spoilt:
        y[2, 4, 6, 5] += 1
        y[0, 1, 2, 3] = np.nan
    share, scaled = np.full((2, y.size), np.nan, np.float32)
    bound, least = float32_bound(PROBLEM), PROBLEM.products * float(np.finfo(np.float32).smallest_subnormal)
    ends = (ctypes.c_double(bound), ctypes.c_double(least), at(share), at(scaled))
    kernels.judge(at(y), at(x), at(w), long(y.size), *SIZES, *ends)
    expected = _judge.judge(y, x, w, kind).comparison
    assert int((share > 1).sum()) == expected.wrong == 2 * spoilt
    assert float(share.max()) == pytest.approx(expected.worst, rel=1e-6)
    assert float(scaled.max()) == pytest.approx(expected.scaled, rel=1e-6)
    assert np.unravel_index(int(share.argmax()), y.shape) == expected.index


@pytest.mark.parametrize("accumulates", [False, True])
def test_it_counts_traces_as_numpy_does(kernels: ctypes.CDLL, accumulates: bool) -> None:
    x, w = _judge.draw(PROBLEM, _judge.WHOLE, np.random.default_rng(6))
    y = np.zeros(PROBLEM.y_shape, np.float32)
    for p in range(3):
        for q in range(3):
            y += np.einsum("bcij,mc->bmij", x[:, :, p : p + 7, q : q + 6], w[:, :, p, q])
    y += _judge.PATTERN * accumulates
    y[1, 2, 3] = _judge.PATTERN
    y[0, 0, 0, 0] = 0.3
    counts = np.zeros(5, np.uint64)
    ends = (ctypes.c_float(_judge.PATTERN), ctypes.c_double(_judge.NEAR), at(counts))
    kernels.traces(at(y), at(x), at(w), long(y.size), *SIZES, *ends)
    found = _judge.traces(y, x, w)
    assert _judge.Traces(*map(int, counts)) == found
    # The row of six, but for sums of zero.
    expected = reference.convolve(x, w)[1, 2, 3]
    assert found.skipped == int((expected != 0).sum()) > 0
    assert (found.accumulated > found.written) == accumulates


def test_the_thermometer_ends_at_its_known_value(kernels: ctypes.CDLL) -> None:
    to = np.zeros(1, np.float32)
    kernels.thermometer(at(to), 16384)
    assert to[0] == 2


def test_it_convolves_as_numpy_does(kernels: ctypes.CDLL) -> None:
    x, w = _judge.draw(PROBLEM, _judge.REAL, np.random.default_rng(7))
    y = np.full(PROBLEM.y_shape, np.nan, np.float32)
    kernels.convolve(at(y), at(x), at(w), long(y.size), *SIZES)
    np.testing.assert_allclose(y, reference.convolve(x, w), rtol=1e-6, atol=1e-6)


def test_counts(kernels: ctypes.CDLL) -> None:
    a, b = np.arange(100, dtype=np.uint32), np.arange(100, dtype=np.uint32)
    b[[3, 99]] += 1
    count = np.zeros(1, np.uint64)
    kernels.differ(at(a), at(b), long(100), at(count))
    assert count[0] == 2
    count[:] = 0
    kernels.unlike(at(a), long(100), ctypes.c_uint(7), at(count))
    assert count[0] == 99
    sums = np.zeros((2, 1), np.uint64)
    kernels.digest(at(a), long(100), at(sums[0]))
    kernels.digest(at(b), long(100), at(sums[1]))
    assert sums[0] != sums[1]
