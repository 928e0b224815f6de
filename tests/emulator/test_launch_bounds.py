"""Kernels with __launch_bounds__: the emulator's check of a block's threads, and where it has none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import one_body
import pytest
from one_body import SOURCE

from ece408_op import emulator
from ece408_op.emulator._rewrite import rewrite


def run(kernel: str, host: str, programs: Path) -> emulator.Report:
    source = SOURCE.replace("__global__ void run", f"{kernel}\n__global__ void run")
    return one_body.run("y[i] = 0;", programs, f"{host} return;", source=source)


def test_a_block_of_more_threads_than_the_launch_bounds_is_found(programs: Path) -> None:
    bounded = """template <int most>
__global__ void __launch_bounds__(most / 2,
                                  1) bounded(float *y) {{ y[threadIdx.x] = 1; }}"""
    report = run(bounded, "bounded<128><<<2, 64>>>(y.dptr_); bounded<126><<<2, 64>>>(y.dptr_ + 64);", programs)
    ((kind, line, message),) = [(one.kind, one.line, one.message) for one in report.findings]
    assert (kind, line, message.partition("threads, and ")[2]) == ("call", 12, "__launch_bounds__ allows 63")
    assert (report.y.reshape(-1)[:128] == np.repeat([1, 0], 64)).all()


def test_a_parameter_with_the_name_of_the_bounds_is_not_taken_for_them(programs: Path) -> None:
    bounded = """const int most = 64;
__global__ void __launch_bounds__(most) bounded(float *y, const int most) {{ y[threadIdx.x] = most; }}"""
    report = run(bounded, "bounded<<<1, 64>>>(y.dptr_, 2);", programs)
    assert report.findings == ()
    np.testing.assert_array_equal(report.y.reshape(-1)[:64], 2)


@pytest.mark.parametrize(
    "text",
    [
        "void f(int a) {}\n__global__ void __launch_bounds__(64 k(float *y) {}\n",
        "{}\n__global__ void __launch_bounds__(64) k(float *y {}\n",
        "#define BOUNDS(n) __launch_bounds__(n)\nvoid f(int a) {}\n",
        "#define BOUNDS(n) \\\n    __launch_bounds__(n)\nvoid f(int a) {}\n",
    ],
    ids=["open bounds", "open parameters", "macro", "macro of two lines"],
)
def test_bounds_without_a_kernel_behind_them_stay(text: str) -> None:
    assert rewrite(text) == text
