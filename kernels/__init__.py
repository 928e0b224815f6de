"""The one list of kernels, in order of preference: dispatch, tests, benchmarks and tables read it.

A kernel is added by one file in this folder and one line in ``KERNELS``.
"""

from __future__ import annotations

from ece408_op.kernel import Kernel

from . import direct, im2col, loops, naive

KERNELS: tuple[Kernel, ...] = (
    direct.KERNEL,
    im2col.KERNEL,
    loops.KERNEL,
    naive.NAIVE,
    naive.BLOCK1024,
    naive.IMAGE_BLOCK,
    naive.GLOBAL_SUM,
)
