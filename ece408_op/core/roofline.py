"""The memory roofline of a GPU, and the rooflines of its arithmetic units.

A layer's roofline is the larger of two times: its bytes over the memory's rate, and its arithmetic over the rate of the
units that a kernel uses (S. Williams, A. Waterman, D. Patterson, Roofline, 2009). A kernel on tensor cores beats the
FP32 roofline, so that one is no lower limit for it. The memory's rate is measured, by filling an array far larger than
the caches. The units' rates are the chip's figures: multiprocessors x operations per cycle x clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

from . import timer

#: Bytes to fill: many times the largest L2.
_FILL_BYTES = 1 << 30

#: Float32 lanes in a multiprocessor, by compute capability (CUDA C++ Programming Guide, arithmetic throughput).
_LANES = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_LANES_ELSEWHERE = 128

#: Operations of a multiprocessor's tensor cores per cycle: dense fp16 products, float32 sums (NVIDIA's architecture
#: white papers). A chip of a newer kind counts as the fastest known one.
_TENSOR_FLOPS = {(7, 0): 1024, (7, 2): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 1024, (8, 7): 2048, (8, 9): 1024,
                 (9, 0): 4096, (10, 0): 8192, (10, 3): 8192, (12, 0): 1024, (12, 1): 1024}  # fmt: skip
_TENSOR_FLOPS_ELSEWHERE = 8192

#: fp16 tensor-core products per product of the convolution, by a kernel's ``arithmetic``. tf32 runs at half the rate.
PRODUCTS = {"fp32": 0, "fp16": 1, "tf32": 2, "fp16x1": 1, "fp16x3": 3}

_WARMING_FILLS = 200

_CLOCK_KILOHERTZ = 13  # cudaDevAttrClockRate


@dataclass(frozen=True)
class Ceilings:
    """Rates of a device: bytes written per second, float32 and tensor-core fp16 operations per second (0: none)."""

    bytes_per_second: float
    flops_per_second: float
    tensor_flops_per_second: float = 0.0

    def memory_seconds(self, problem: ConvProblem) -> float:
        """Return the memory roofline: the time to move the layer's input, filters and output once."""
        return problem.bytes / self.bytes_per_second

    def arithmetic_seconds(self, problem: ConvProblem, arithmetic: str = "fp32") -> float:
        """Return the roofline of the units that do this arithmetic, a key of PRODUCTS: by default the FP32 roofline."""
        return problem.flops / self.rate(arithmetic)

    def rate(self, arithmetic: str) -> float:
        """Return the convolution's operations per second by the units that do this arithmetic, a key of PRODUCTS."""
        products = PRODUCTS[arithmetic]
        return self.tensor_flops_per_second / products if products else self.flops_per_second

    def roofline_seconds(self, problem: ConvProblem, arithmetic: str = "fp32") -> float:
        """Return the larger of the memory roofline and the roofline of the units used."""
        return max(self.memory_seconds(problem), self.arithmetic_seconds(problem, arithmetic))


@cache
def measure(device: int = 0) -> Ceilings:
    """Return the rates of the GPU of that number, measured once; raises DeviceError where there is none."""
    chip = cuda.chip(device)
    cupy = cuda.cupy()
    cycles = chip.multiprocessors * 1000.0 * cupy.cuda.runtime.deviceGetAttribute(_CLOCK_KILOHERTZ, device)
    lanes = _LANES.get(chip.capability, _LANES_ELSEWHERE)
    tensor_flops = 0 if chip.capability < (7, 0) else _TENSOR_FLOPS.get(chip.capability, _TENSOR_FLOPS_ELSEWHERE)
    with cupy.cuda.Device(device):
        block = cupy.empty(_FILL_BYTES, cupy.uint8)
        stream = cupy.cuda.get_current_stream()

        def fill() -> None:
            block.data.memset_async(1, _FILL_BYTES, stream)

        for _ in range(_WARMING_FILLS):  # an idle GPU's clocks are low at first
            fill()
        seconds = timer.measure(fill, timer.gpu_clock("fill")).median
    # A fused multiply-add is two operations.
    return Ceilings(_FILL_BYTES / seconds, 2 * lanes * cycles, tensor_flops * cycles)
