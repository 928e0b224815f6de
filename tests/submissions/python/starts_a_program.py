"""expected: crashed. No other program can be started."""

import subprocess

from ece408_op.core.kernel import CpuKernel


def run(problem, x, w, out, threads):
    subprocess.run(["/bin/true"], check=True)
    out[...] = 0


KERNEL = CpuKernel("mine", "a kernel", run)
