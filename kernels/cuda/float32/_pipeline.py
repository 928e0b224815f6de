"""The cost model of the direct gradient kernels: a multiprocessor computes one step while it copies the next."""

from __future__ import annotations

from ece408_op.runtime.launch import ceil_div

#: Shared memory of a multiprocessor of sm_90, in bytes.
MULTIPROCESSOR_SHARED = 227 * 1024
#: A multiprocessor's share of an H200's memory bandwidth, in bytes per cycle, and the latency of a copy in cycles.
_BYTES_PER_CYCLE, _LATENCY = 17, 1500


def odd_vectors(floats: int) -> int:
    """Return ``floats`` rounded up to an odd number of 16-byte vectors: with this pitch, rows begin in other banks."""
    return 4 * (ceil_div(floats, 4) | 1)


def step_cycles(compute: float, copied: float, stages: int) -> float:
    """Return the predicted cycles of a pipeline step: the longest of arithmetic, copying and waiting for its copies.

    A step's copies arrive after the copying and the latency, spread over ``stages`` - 1 steps. A fifth of the shorter
    of arithmetic and copying is added.

    Args:
        compute: the cycles of the arithmetic.
        copied: the bytes that the step copies.
        stages: the stages of the pipeline; all but one are being copied.
    """
    memory = copied / _BYTES_PER_CYCLE
    return max(compute, memory, (memory + _LATENCY) / (stages - 1)) + 0.2 * min(compute, memory)
