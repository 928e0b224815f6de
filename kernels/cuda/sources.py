"""The paths of the CUDA sources."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def sources(*names: str) -> tuple[Path, ...]:
    """Return layer.cuh and the files of those names, such as "ladder/naive.cu"."""
    return tuple(_FOLDER / name for name in ("layer.cuh", *names))
