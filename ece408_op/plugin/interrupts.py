"""Ctrl-C while MXNet's library calls back into Python: a KeyboardInterrupt in a callback would end the process.

KeyboardInterrupt is raised after the library's call instead, as Python does for Ctrl-C during any C function. Commands
have a handler of their own (``ece408_op.commands``), which this module leaves alone.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any

import mxnet as mx

#: The functions of MXNet's library that make Custom operators, or ask them for names, shapes, types or storage types.
_CALLING_BACK = (
    "MXAutogradBackwardEx", "MXInvokeCachedOpEx", "MXExecutorSimpleBindEx", "MXExecutorBindEX", "MXExecutorReshapeEx",
    "MXSymbolCreateAtomicSymbol", "MXSymbolCreateFromFile", "MXSymbolCreateFromJSON", "NNSymbolCompose",
    "MXSymbolInferShapeEx", "MXSymbolInferShapeEx64", "MXSymbolInferShapePartialEx", "MXSymbolInferShapePartialEx64",
    "MXSymbolInferType", "MXSymbolInferTypePartial",
)  # fmt: skip


def install() -> None:
    """Wrap the functions above; once per process."""
    for name in _CALLING_BACK:
        setattr(mx.base._LIB, name, with_deferred_interrupts(getattr(mx.base._LIB, name)))


def with_deferred_interrupts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with Ctrl-C deferred to its end, if Ctrl-C raises KeyboardInterrupt in this thread."""

    @functools.wraps(function, assigned=("__name__",))
    def call(*args: Any, **kwargs: Any) -> Any:
        own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not own or threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        interrupts: list[int] = []
        signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
        try:
            return function(*args, **kwargs)
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if interrupts:
                raise KeyboardInterrupt

    return call
