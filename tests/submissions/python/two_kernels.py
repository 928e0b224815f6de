"""expected: compile_error. Two kernels, neither of them called KERNEL."""

from ece408_op.core.kernel import CpuKernel


def run(problem, x, w, out, threads):
    out[...] = 0


FIRST = CpuKernel("first", "a kernel", run)
SECOND = CpuKernel("second", "another", run)
