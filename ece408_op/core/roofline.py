"""The least time that a layer can take on a GPU: its bytes over the memory's rate, its products over the lanes'.

The memory's rate is measured on the spot, by filling an array far larger than the caches. The lanes' rate is
the chip's figure: multiprocessors x lanes x clock, a fused multiply-add (two operations) a lane and cycle.
"""

from __future__ import annotations

from dataclasses import dataclass

from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

#: Bytes that are filled: many times the largest second-level cache.
_FILL_BYTES = 1 << 30

#: Float32 lanes in a multiprocessor, by compute capability (CUDA C++ Programming Guide, arithmetic throughput).
_LANES = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_LANES_ELSEWHERE = 128

_WARMING_FILLS = 200

_CLOCK_KILOHERTZ = 13  # cudaDevAttrClockRate


@dataclass(frozen=True)
class Ceilings:
    """What a GPU can do: bytes written in a second, float32 operations in a second."""

    bytes_per_second: float
    flops_per_second: float

    def memory_seconds(self, problem: ConvProblem) -> float:
        """Time to move the layer's input, filters and output once."""
        return problem.bytes / self.bytes_per_second

    def arithmetic_seconds(self, problem: ConvProblem) -> float:
        """Time to multiply and add in float32 all that the layer's definition does."""
        return problem.flops / self.flops_per_second

    def roofline_seconds(self, problem: ConvProblem) -> float:
        """The larger of both."""
        return max(self.memory_seconds(problem), self.arithmetic_seconds(problem))


def measure(device: int = 0) -> Ceilings:
    """The ceilings of the GPU of that number; raises DeviceError where there is none."""
    chip = cuda.chip(device)
    cupy = cuda.cupy()
    clock = 1000 * cupy.cuda.runtime.deviceGetAttribute(_CLOCK_KILOHERTZ, device)
    lanes = chip.multiprocessors * _LANES.get(chip.capability, _LANES_ELSEWHERE)
    with cupy.cuda.Device(device):
        block = cupy.empty(_FILL_BYTES, cupy.uint8)
        stream = cupy.cuda.get_current_stream()

        def fill() -> None:
            block.data.memset_async(1, _FILL_BYTES, stream)

        for _ in range(_WARMING_FILLS):  # an idle GPU's clocks are low at first
            fill()
        milliseconds = cuda.median_milliseconds(fill, "fill")
    return Ceilings(_FILL_BYTES / (milliseconds / 1000), 2.0 * lanes * clock)
