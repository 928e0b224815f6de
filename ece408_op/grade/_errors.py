"""The exception that ends the command."""

from __future__ import annotations

from ece408_op.errors import Ece408Error


class SpecError(Ece408Error, ValueError):
    """The command or the grader's file cannot be used; the message names the option or the key: exit code 2."""
