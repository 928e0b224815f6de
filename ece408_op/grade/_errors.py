"""What ends the harness itself, beside what ends a submission."""

from __future__ import annotations

from ece408_op.errors import DeviceError, Ece408Error


class HarnessError(DeviceError):
    """This machine lacks what the harness needs: exit code 3."""


class SpecError(Ece408Error, ValueError):
    """A grader's file that cannot be used; the message names the file and the key: exit code 2."""
