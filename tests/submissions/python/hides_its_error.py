"""expected: crashed. The name of its exception cannot be read."""

from ece408_op.core.kernel import CpuKernel


class Nameless(type):
    @property
    def __name__(cls):
        raise ValueError


class HiddenError(Exception, metaclass=Nameless):
    pass


def run(problem, x, w, out, threads):
    raise HiddenError


KERNEL = CpuKernel("mine", "a kernel", run)
