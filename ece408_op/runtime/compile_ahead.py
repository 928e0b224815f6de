"""Compiling all programs of a network at once: NVRTC uses one core per program, and a new network has dozens."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from . import cuda

#: NVRTC takes some hundred megabytes of memory in each thread.
_MOST_THREADS = 8


def compile_ahead(work: Callable[[], object], device: int) -> None:
    """Compile what ``work`` launches on ``device``, the current one, in several threads.

    ``work`` is called once; meanwhile ``cuda.execute`` and ``cuda.prepared_launch`` launch nothing, so that arrays keep
    any values. Raises DeviceError if a program does not compile.
    """
    programs: list[cuda.Program] = []
    token = cuda.listed.set(programs)
    try:
        work()
    finally:
        cuda.listed.reset(token)

    def compile_one(program: cuda.Program) -> None:
        with cuda.cupy().cuda.Device(device), cuda.reported(program.name):
            cuda.compiled(program, device)

    different = {(one.source, one.options): one for one in programs if one.source}
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, different.values()))
