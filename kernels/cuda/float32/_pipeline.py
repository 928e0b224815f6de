"""The cost model of the direct gradient kernels: a multiprocessor computes one step while it copies the next.

``ece408-bench layers --context gpu --gradient data --impl data_gradient_tiles`` times its constants, and so does
``--gradient weight --impl weight_gradient_rows``.
"""

from __future__ import annotations

from ece408_op.runtime.launch import REGISTERS, ceil_div

#: Bytes of shared memory: the most of a block on sm_90 (a multiprocessor has 1 KiB more), and what each block reserves.
_SHARED_BYTES, _RESERVED_BYTES = 227 * 1024, 1024
#: A multiprocessor's share of an H200's memory bandwidth, in bytes per cycle, and the latency of a copy in cycles.
_BYTES_PER_CYCLE, _LATENCY = 17, 1500


def odd_vectors(floats: int) -> int:
    """Return ``floats`` rounded up to an odd number of 16-byte vectors: with this pitch, rows begin in other banks."""
    return 4 * (ceil_div(floats, 4) | 1)


def resident_blocks(threads: int, registers: int, shared: int) -> int:
    """Return the blocks that fit a multiprocessor: registers per thread, and bytes of shared memory per block."""
    # Each of a multiprocessor's four schedulers holds whole warps.
    return min(_SHARED_BYTES // (shared + _RESERVED_BYTES), 128 * (REGISTERS // (128 * registers)) // threads)


def step_cycles(issued: float, threads: int, copied: float, stages: int) -> float:
    """Return the predicted cycles of a pipeline step: the longest of arithmetic, copying and waiting for its copies.

    A step's copies arrive after the copying and the latency, spread over ``stages`` - 1 steps. A fifth of the shorter
    of arithmetic and copying is added.

    Args:
        issued: the issue cycles of one warp.
        threads: the multiprocessor's resident threads.
        copied: the bytes that the step copies.
        stages: the stages of the pipeline; all but one are being copied.
    """
    # The warps of the busiest scheduler: with one warp it waits for each read, with four it hardly ever waits.
    warps = ceil_div(threads, 128)
    compute, memory = issued * warps * (1 + 0.8 / warps), copied / _BYTES_PER_CYCLE
    return max(compute, memory, (memory + _LATENCY) / (stages - 1)) + 0.2 * min(compute, memory)
