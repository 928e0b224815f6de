"""expected: crashed. NumPy refuses to write to x."""

from ece408_op.core.kernel import CpuKernel


def run(problem, x, w, out, threads):
    x[0, 0, 0, 0] = 0
    out[...] = 0


KERNEL = CpuKernel("mine", "a kernel", run)
