"""What the direct kernels of the gradients expect of a multiprocessor that computes one step and copies the next."""

from __future__ import annotations

from ece408_op.runtime.launch import ceil_div

#: Shared memory of a multiprocessor of sm_90, in bytes.
MULTIPROCESSOR_SHARED = 227 * 1024
#: A multiprocessor's share of an H200's memory bandwidth, in bytes per cycle, and the latency of a copy in cycles.
_BYTES_PER_CYCLE, _LATENCY = 17, 1500


def odd_vectors(floats: int) -> int:
    """Return a pitch of an odd number of 16-byte vectors: rows then begin in different banks of shared memory."""
    return 4 * (ceil_div(floats, 4) | 1)


def step_cycles(compute: float, copied: float, stages: int) -> float:
    """Return the cycles of a step of a pipeline: of its arithmetic, its copies, or a share of their latency.

    Args:
        compute: the cycles of the arithmetic.
        copied: the bytes that the step copies.
        stages: the stages of the pipeline; all but one are being copied.
    """
    memory = copied / _BYTES_PER_CYCLE
    return max(compute, memory, (memory + _LATENCY) / (stages - 1)) + 0.2 * min(compute, memory)
