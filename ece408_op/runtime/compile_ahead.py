"""Compiling all programs of a network at once: NVRTC uses one core per program, and a new network has dozens."""

from __future__ import annotations

import os
from collections.abc import Callable

from . import cuda
from .thread_pool import parallel_for

#: NVRTC takes some hundred megabytes of memory in each thread.
_MOST_THREADS = 8


def compile_ahead(work: Callable[[], object], device: int) -> None:
    """Compile what ``work`` launches on ``device``, the current one, in several threads.

    ``work`` is called once; meanwhile ``cuda.execute`` and ``cuda.prepared_launch`` launch nothing, so no array
    changes. Raises DeviceError if a program does not compile.
    """
    programs: list[cuda.Program] = []
    token = cuda.listed.set(programs)
    try:
        work()
    finally:
        cuda.listed.reset(token)

    different = list({(one.source, one.options): one for one in programs if one.source}.values())

    def compile_one(number: int) -> None:
        program = different[number]
        with cuda.cupy().cuda.Device(device), cuda.reported(program.name):
            cuda.compiled(program, device)

    if different:
        parallel_for(compile_one, len(different), min(_MOST_THREADS, len(os.sched_getaffinity(0))))
