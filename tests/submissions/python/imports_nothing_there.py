"""expected: compile_error. An import that fails."""

from ece408_op.core.kernel import CpuKernel

# The line that the reason names.
import no_such_package  # isort: skip


def run(problem, x, w, out, threads):
    no_such_package.convolve(x, w, out)


KERNEL = CpuKernel("mine", "a kernel", run)
