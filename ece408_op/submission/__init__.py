"""A course submission or a user's own file: compiled as it is, and called in a process of its own.

Who does what:

    harness (Python)                  the buffers x, w and y, the clock, commands; for the grader also the verdict
    supervisor (native/worker)        process 1 of the sandbox: limits; reports how the worker ends
    worker (native/worker)            maps the buffers, loads the submission, calls forward

A submission can write to all memory of its worker, and the harness believes nothing: "done" only stops its clock.

Public modules: runner (a user's own file, without a sandbox: for m2.py to m4.py and ``ece408-lab``), build, sources,
arrays, worker, python_worker, sandbox. headers/ replaces MXNet's.
"""

from __future__ import annotations

from ece408_op.errors import DeviceError, Ece408Error


class HarnessError(DeviceError):
    """This machine lacks something that the harness needs: exit code 3."""


class StoppedError(HarnessError):
    """The grading was interrupted: no further program starts."""


class EndedError(Ece408Error):
    """A submission ended, or may not go on: the status that this means, and the reason in words."""

    def __init__(self, status: str, reason: str = "") -> None:
        super().__init__(f"{status}: {reason}" if reason else status)
        self.status, self.reason = status, reason
