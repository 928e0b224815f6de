"""A class on many machines, through Dask's distributed scheduler: ``ece408-grade --scheduler ADDRESS``.

Start the workers with ``dask worker ADDRESS --nthreads 1`` on machines that have this package: one per GPU, or as many
as submissions are to run at a time. Each submission is one task and carries its sources. The scheduler gives the tasks
of a worker that dies to others.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ece408_op.errors import DeviceError
from ece408_op.runtime import cuda
from ece408_op.runtime.install_hint import command

from . import _sources, _tools
from ._class import Record, Runner
from ._errors import HarnessError
from ._grading import Grader, for_cpu, for_gpus
from ._spec import Spec
from ._submission import Submission

if TYPE_CHECKING:
    from distributed import Client

#: Seconds to reach the scheduler, and to see a first worker.
_REACH_SECONDS, _WORKER_SECONDS = 15.0, 60.0


#: A submission with the names and bytes of its files.
Task = tuple[Submission, tuple[tuple[str, bytes], ...]]


def connect(address: str) -> Client:
    """The scheduler at that address; raises HarnessError where it or its workers cannot be had."""
    try:
        from distributed import Client
    except ImportError as error:
        raise HarnessError(f"--scheduler: expected Dask, got {error}; {command('dask')}") from error
    try:
        client = Client(address, timeout=_REACH_SECONDS)
        client.wait_for_workers(1, timeout=_WORKER_SECONDS)
    except (OSError, ValueError) as error:
        raise HarnessError(f"--scheduler: expected a Dask scheduler with workers at {address}, got {error}") from error
    return client


def gpu_there(client: Client) -> bool:
    """Has one of the workers a GPU?"""
    return any(client.run(gpu_here).values())


def gpu_here() -> bool:
    """Has this machine a GPU?"""
    try:
        return cuda.device_count() > 0
    except DeviceError:
        return False


def on_workers(client: Client, rules: Spec) -> Runner:
    """Grades on the scheduler's workers."""

    def run(waiting: dict[str, Submission]) -> Iterator[tuple[str, Record]]:
        from distributed import as_completed

        futures = {
            client.submit(grade, packed(one), rules, pure=False, key=f"ece408-grade-{name}"): name
            for name, one in waiting.items()
        }
        try:
            for future in as_completed(list(futures)):
                yield futures[future], future.result()
        finally:
            client.cancel(list(futures))

    return run


def packed(one: Submission) -> Task:
    """The submission with what a worker elsewhere needs of it."""
    if one.source is None:
        return one, ()
    with _tools.new_folder("pack") as name:
        _sources.copy(one.source, Path(name))
        inside = sorted(path for path in Path(name).rglob("*") if path.is_file())
        return one, tuple((str(path.relative_to(name)), path.read_bytes()) for path in inside)


def grade(task: Task, rules: Spec) -> Record:
    """One submission's record; runs in a worker. Raises HarnessError where its machine cannot."""
    (one, files), grader = task, _machine(task[0].context == "gpu")
    grader = replace(grader, bench=replace(grader.bench, spec=rules))
    if one.source is None:
        return grader.grade(one)
    with _tools.new_folder("task") as name:
        for path, content in files:
            (Path(name) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(name) / path).write_bytes(content)
        return {**grader.grade(replace(one, source=Path(name) / one.source.name)), "source": str(one.source)}


@cache
def _machine(gpu: bool) -> Grader:
    folder = _tools.new_folder("tools")
    atexit.register(folder.cleanup)
    tools = _tools.build(Path(folder.name), [(gpu, False), (gpu, True)])
    return (for_gpus if gpu else for_cpu)(tools, Spec())
