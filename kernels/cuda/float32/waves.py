"""Grids in waves of shrinking shares, as waves.cuh divides them."""

from __future__ import annotations

#: Items per resident block from which waves pay.
_ITEMS_IN_WAVES = 8


def blocks_in_waves(items: int, resident_blocks: int, waves: int) -> int:
    """Return how many blocks share the items: as many as the chip holds at a time, or ``waves`` times as many."""
    if items < _ITEMS_IN_WAVES * resident_blocks:
        return min(items, resident_blocks)
    return waves * resident_blocks
