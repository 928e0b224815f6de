"""expected: crashed. An exception during a call."""

from ece408_op.core.kernel import CpuKernel


def run(problem, x, w, out, threads):
    rows = 0
    # The line that the reason names.
    out[...] = 1 / rows


KERNEL = CpuKernel("mine", "a kernel", run)
