"""Joins the package to MXNet, once, right after MXNet has been imported."""

from __future__ import annotations

import atexit
import sys

import mxnet as mx

from . import default_layout, imperative, mxnet_errors, operator


def connect() -> None:
    """Register the operator, bring its errors' reasons to callers, keep its inputs in the default layout."""
    mxnet_errors.install()
    operator.register()
    default_layout.install()
    imperative.install()
    atexit.register(_finish_pending)


def _finish_pending() -> None:
    """Wait for what is still pending: Custom operators that run while the interpreter ends abort the process."""
    try:
        mx.nd.waitall()
    except mx.MXNetError as error:
        print(f"an operator failed and nobody looked at its result: {error}", file=sys.stderr)
