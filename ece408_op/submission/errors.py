"""Exceptions that end a submission's run, and those that end the harness."""

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
