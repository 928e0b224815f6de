"""The emulator's exceptions."""

from __future__ import annotations

from ece408_op.errors import Ece408Error


class CompileError(Ece408Error):
    """The source does not compile.

    Attributes:
        lines: pairs of the source's line, or None, and the compiler's message.
    """

    def __init__(self, lines: tuple[tuple[int | None, str], ...]) -> None:
        super().__init__("\n".join(f"line {line}: {text}" if line else text for line, text in lines))
        self.lines = lines


class UnsupportedCodeError(CompileError):
    """The source uses a part of CUDA that the emulator lacks."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(((line, message),))
