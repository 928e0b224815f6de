"""Bring the reason of an error inside a Custom operator to the Python caller.

When a method of a Custom operator raises, MXNet prints the traceback to stdout and raises an MXNetError in the caller's
thread that names a line of custom.cc instead of the reason. Every MXNetError passes through get_last_ffi_error, which
``install`` replaces by a function that adds the reason.

Methods of a Prop fail in the caller's thread, for which this module keeps the reason. ``forward`` and ``backward`` fail
in one of MXNet's threads, and a wait for an output raises the error, maybe much later and after other operators have
failed. MXNet's message does not tell which operator failed, and MXNet loses some failures when several operators fail
at the same time. So the failing method returns normally, after it has queued a second operator that writes the output
and fails: a Crop with an impossible offset. MXNet's message contains the offset, which is the number of the reason. (A
Crop, because other operators that fail at run time share a resource, such as the random number generator's state,
through which the failure spreads.)
"""

from __future__ import annotations

import builtins
import copy
import functools
import inspect
import itertools
import re
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from typing import Any, Callable, TypeVar

from ece408_op.errors import DeviceError, Ece408Error, GraphError
from ece408_op.runtime.bounded_dict import BoundedDict

Method = TypeVar("Method", bound=Callable[..., Any])

#: ``reason``: the last failure in this thread.
_here = threading.local()

#: The reasons of failed calls of forward and backward, by number. A number is also an offset that no image has.
_failures: BoundedDict[int, Exception] = BoundedDict(4096)
_numbers = itertools.count(408_000_000)
_SECOND_DERIVATIVE = "Operator _backward_Custom is non-differentiable"
_FROM_FILE = "Operator New is not registered"
_SOURCE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
_FAILED = re.compile(r"param_\.offset\[0\] .*\((\d+) vs\. 0\)")


class OperatorError(Ece408Error, RuntimeError):
    """An unforeseen error inside the operator: a defect of a kernel or of this package."""


def reported_at_once(method: Method) -> Method:
    """Decorate a method of a Prop, so that its failure is raised with its reason in the caller's thread."""

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            _here.reason = _explained(error)
            raise _here.reason from error

    return guarded  # type: ignore[return-value]


def reported_with_outputs(method: Method) -> Method:
    """Decorate ``forward`` or ``backward``: on failure, a wait for the first array that it writes raises the reason."""

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            given = inspect.signature(method).bind(*args, **kwargs).arguments
            written = zip(given.get("in_grad", given["out_data"]), given["req"])
            target = next((array for array, req in written if req != "null" and array.size), None)
            if target is None:
                raise _explained(error) from error
            fail(target, error)

    return guarded  # type: ignore[return-value]


def fail(target: Any, error: Exception) -> None:
    """Make a wait for ``target``, which is not empty, raise ``error``; with the NaiveEngine, raise it at once."""
    import mxnet as mx

    reason = _explained(error)
    number = next(_numbers)
    _failures[number] = copy.copy(reason)  # without the traceback, whose frames keep the call's arrays alive
    try:
        failing = mx.nd.Crop(mx.nd.zeros((1, 1, 1, 1), mx.cpu()), offset=(number, 0), h_w=(1, 1), num_args=1)
        failing.reshape((1,)).copyto(target.reshape((-1,))[0:1])
    except mx.MXNetError:  # the NaiveEngine runs the Crop in this thread, which is the caller's
        _here.reason = reason
        raise reason from None


def install() -> None:
    """Replace MXNet's get_last_ffi_error, and stop MXNet from printing this package's errors; once per process."""
    from mxnet import base, operator
    from mxnet._ffi._ctypes import function
    from mxnet.symbol import symbol

    original = base.get_last_ffi_error

    @functools.wraps(original)
    def get_last_ffi_error() -> Exception:
        error = original()
        reason = _reason_of(str(error))
        return error if reason is None else _with_reason(error, reason)

    for module in (base, function):
        module.get_last_ffi_error = get_last_ffi_error
    for module in (operator, symbol):
        module.print = _print_unless_ours


def sentence_of(error: Exception) -> str:
    """Return the message of an MXNet error in one line, without positions in MXNet's source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    reason = ([line for line in lines if line.startswith("MXNetError:")] or lines)[-1]
    return _SOURCE.sub("", reason.replace("MXNetError: ", "", 1))


def _explained(error: Exception) -> Ece408Error:
    """Return an error of this package's as it is, and wrap any other in an OperatorError.

    The OperatorError names the innermost file and line outside libraries.
    """
    if isinstance(error, Ece408Error):
        return error
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not one.filename.startswith(libraries) or "ece408_op" in Path(one.filename).parts]
    place = f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
    return OperatorError(f"{type(error).__name__}: {error}{place}")


def _reason_of(message: str) -> Exception | None:
    """Return the reason for MXNet's message, which has a failure's number or a line of custom.cc; None if unknown."""
    failed = _FAILED.search(message)
    if failed is not None:
        return _failures.get(int(failed[1]))
    if _SECOND_DERIVATIVE in message:
        return DeviceError("there is no second derivative; pass create_graph=False, or use MXNet's own operators")
    if _FROM_FILE in message:
        return GraphError("MXNet cannot load New from a file of the course; use ece408_op.load_checkpoint")
    if "custom" not in message:
        return None
    reason = getattr(_here, "reason", None)
    _here.reason = None
    return reason


def _with_reason(error: Exception, reason: Exception) -> Exception:
    """Return the error to raise: of a class derived from the reason's class and MXNetError, with the reason's text."""
    combined = type(f"MXNet{type(reason).__name__}", (type(reason), type(error)), {"__module__": __name__})
    explained: Exception = combined(f"in a Custom operator: {reason}")
    explained.__cause__ = reason
    return explained


def _print_unless_ours(*args: Any, **kwargs: Any) -> None:
    error = sys.exc_info()[1]
    if isinstance(error, Ece408Error):
        return
    if error is not None:
        _here.reason = None  # this is the failure of an operator of another package
    builtins.print(*args, **kwargs)
