"""The one list of kernels, in order of preference: dispatch, tests, benchmarks and tables read it.

A kernel is added by one file in this folder and one line in ``KERNELS``.
"""

from __future__ import annotations

from ece408_op.kernel import CpuKernel

from . import direct, im2col, loops

KERNELS: tuple[CpuKernel, ...] = (
    direct.KERNEL,
    im2col.KERNEL,
    loops.KERNEL,
)
