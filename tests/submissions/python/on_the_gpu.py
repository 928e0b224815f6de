"""expected: passed. A kernel for the GPU whose source lies beside it."""

from pathlib import Path

from ece408_op.core.kernel import CudaKernel
from ece408_op.runtime.launch import Launch, Plan, ceil_div, layer_defines

THREADS = 256


def plan(problem, chip, aligned):
    blocks = ceil_div(problem.filters * problem.output_height * problem.output_width, THREADS)

    def steps(images):
        return (Launch("convolve", (blocks, images, 1), (THREADS, 1, 1), ("x", "w", "y", "first")),)

    return Plan(layer_defines(problem), 32768, steps)


KERNEL = CudaKernel("mine", "one thread an output", (Path(__file__).with_name("on_the_gpu.cu"),), plan)
