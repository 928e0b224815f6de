"""Joins the package to MXNet, once, right after MXNet has been imported."""

from __future__ import annotations

import atexit
import sys

import mxnet as mx

from . import at_once, fresh_outputs, mxnet_errors, operator, plain_layout
from .network import operator as network


def connect() -> None:
    """Register the operators, bring their errors' reasons to callers, keep their inputs plain, and end cleanly."""
    mxnet_errors.install()
    operator.register()
    network.register()
    plain_layout.install()
    fresh_outputs.install()
    at_once.install()
    atexit.register(_finish_pending)


def _finish_pending() -> None:
    """Wait for what is still pending: Custom operators that run while the interpreter ends abort the process."""
    try:
        mx.nd.waitall()
    except mx.MXNetError as error:
        print(f"an operator failed and nobody looked at its result: {error}", file=sys.stderr)
