"""Brings the reason of an error inside a Custom operator to the Python caller.

When a method of a Custom operator raises, MXNet prints the traceback to stdout and raises, in the
caller's thread and maybe much later, an MXNetError that names a line of custom.cc. Here the reason is
kept, the printing is left out for this package's own errors, and the MXNetError that reaches the
caller says the reason. Other operators' errors go the way they always went; MXNet tells of them in the same
words, so they are noted too.
"""

from __future__ import annotations

import builtins
import functools
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from typing import Any, Callable, TypeVar

from ece408_op.errors import Ece408Error

F = TypeVar("F", bound=Callable[..., Any])

#: Reasons of failed shape or type inferences, which MXNet reports in the thread that asked.
_here = threading.local()

#: The reason of the last forward or backward that failed, which MXNet reports to whoever waits for the result.
_elsewhere: list[Exception | None] = [None]

#: How MXNet's printing about methods that run asynchronously begins.
_ASYNCHRONOUS = ("Error in CustomOp.forward", "Error in CustomOp.backward")


class OperatorError(Ece408Error, RuntimeError):
    """Something unforeseen inside the operator: a defect of a kernel or of this package."""


def keeps_reason(asynchronous: bool) -> Callable[[F], F]:
    """Decorate a method that MXNet calls back: what it raises is kept for the caller.

    asynchronous: MXNet reports the failure when a result is waited for, in any thread, and not at once.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                reason = error if isinstance(error, Ece408Error) else _unforeseen(error)
                _note(reason, asynchronous)
                if reason is error:
                    raise
                raise reason from error

        return guarded  # type: ignore[return-value]

    return decorate


def install() -> None:
    """Wrap MXNet's error door and silence its printing of our errors; once a process."""
    from mxnet import base, operator
    from mxnet._ffi._ctypes import function
    from mxnet.symbol import symbol

    plain = base.get_last_ffi_error
    if getattr(plain, "says_reason", False):
        return

    @functools.wraps(plain)
    def get_last_ffi_error() -> Exception:
        error = plain()
        reason = _reason_of(str(error))
        return error if reason is None else _with_reason(error, reason)

    get_last_ffi_error.says_reason = True  # type: ignore[attr-defined]
    for module in (base, function):
        module.get_last_ffi_error = get_last_ffi_error
    for module in (operator, symbol):
        module.print = _print_unless_ours


def _unforeseen(error: Exception) -> OperatorError:
    """The error with the file and line that raised it: the innermost ones that are in no library."""
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not one.filename.startswith(libraries) or "ece408_op" in Path(one.filename).parts]
    place = f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
    return OperatorError(f"{type(error).__name__}: {error}{place}")


def _reason_of(message: str) -> Exception | None:
    """The kept reason behind MXNet's message, which names the failed callback of custom.cc."""
    if "custom" not in message:
        return None
    if "CustomOpFBFunc" in message:
        return _elsewhere[0]
    reason = getattr(_here, "reason", None)
    _here.reason = None
    return reason


def _with_reason(error: Exception, reason: Exception) -> Exception:
    """The MXNetError to raise: an error of our own tree as well, and with our words."""
    combined = type(f"MXNet{type(reason).__name__}", (type(reason), type(error)), {"__module__": __name__})
    explained: Exception = combined(f"in a Custom operator: {reason}")
    explained.__cause__ = reason
    return explained


def _note(reason: Exception | None, asynchronous: bool) -> None:
    """Keep the reason of the latest failure; None where it is another operator's."""
    if asynchronous:
        _elsewhere[0] = reason
    else:
        _here.reason = reason


def _print_unless_ours(*args: Any, **kwargs: Any) -> None:
    error = sys.exc_info()[1]
    if isinstance(error, Ece408Error):
        return
    if error is not None:
        _note(None, asynchronous=bool(args) and str(args[0]).startswith(_ASYNCHRONOUS))
    builtins.print(*args, **kwargs)
