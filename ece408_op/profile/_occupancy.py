"""How many warps a multiprocessor can hold of a kernel: the arithmetic of CUDA's occupancy calculator."""

from __future__ import annotations

from math import prod

from ece408_op.runtime.launch import Triple, ceil_div, round_up

from ._activity import Limits

WARP = 32
#: Registers are given to a warp in units of so many, warps in units of four (compute capability 3.0 and later).
_REGISTER_UNIT = 256
_WARP_UNIT = 4
#: From 8.0 on shared memory comes in smaller units, and each block costs 1 KB more.
_SMALL_UNITS = (8, 0)
_BLOCK_COST = 1024


def blocks_held(limits: Limits, block: Triple, registers: int, shared: int) -> int:
    """Blocks that one multiprocessor holds at a time; 0 where not even one fits.

    block: threads in x, y, z; registers of a thread; shared: bytes of a block, static and dynamic.
    """
    warps = ceil_div(prod(block), WARP)
    most = [limits.blocks, limits.warps // warps]
    if registers:
        a_warp = round_up(registers * WARP, _REGISTER_UNIT)
        held = limits.registers // a_warp // _WARP_UNIT * _WARP_UNIT
        most.append(held // warps)
    new = limits.capability >= _SMALL_UNITS
    bytes_ = round_up(shared, 128 if new else 256) + (_BLOCK_COST if new else 0)
    if bytes_:
        most.append(limits.shared // bytes_)
    return min(most)


def occupancy(limits: Limits, block: Triple, registers: int, shared: int) -> float:
    """The share of a multiprocessor's warps that the kernel can fill, 0 to 1: an upper bound of what a run reaches."""
    return blocks_held(limits, block, registers, shared) * ceil_div(prod(block), WARP) / limits.warps
