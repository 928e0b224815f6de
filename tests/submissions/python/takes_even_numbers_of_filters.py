"""expected: unsupported. It says itself what it does not take."""

from ece408_op.core.kernel import CpuKernel


def reasons(problem):
    return ["filters: expected an even number of them"] if problem.filters % 2 else []


def run(problem, x, w, out, threads):
    out[...] = 0


KERNEL = CpuKernel("even", "a kernel", run, limits=reasons)
