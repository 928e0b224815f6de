"""Pooling: maximum, mean or sum of windows, and of whole images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ece408_op.runtime.launch import ceil_div

from ._op_attributes import Refused, Settings
from ._op_definition import Arrays, Kind, Shape, rank

MAXIMUM, MEAN, SUM = "max", "avg", "sum"


@dataclass(frozen=True)
class Pooling:
    """Settings of Pooling; ``full``: an output more where a last window is cut off by the edge."""

    kind: str
    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]
    full: bool
    whole: bool
    count_pad: bool

    def fitted(self, x: Sequence[int]) -> Pooling:
        """The same for images of that shape (B, C, H, W), where the window may be the whole image."""
        if not self.whole:
            return self
        return Pooling(self.kind, (x[2], x[3]), (1, 1), (0, 0), False, False, self.count_pad)

    def output(self, axis: int, length: int) -> int:
        """Rows (axis 0) or columns (1) of the output."""
        span = length + 2 * self.pad[axis] - self.kernel[axis]
        return 1 + (ceil_div(span, self.stride[axis]) if self.full else span // self.stride[axis])

    def counts(self, axis: int, length: int, outputs: int) -> np.ndarray:
        """Along an axis, the elements that each window's mean is over."""
        start = np.arange(outputs) * self.stride[axis] - self.pad[axis]
        stop = np.minimum(start + self.kernel[axis], length + self.pad[axis])
        if self.count_pad:
            return (stop - start).astype(np.float32)
        return (np.minimum(stop, length) - np.maximum(start, 0)).astype(np.float32)


def _read(settings: Settings) -> Pooling:
    settings.only("layout", "NCHW")
    settings.text("p_value", "2")
    kind = settings.one_of("pool_type", (MAXIMUM, MEAN, SUM), MAXIMUM)
    whole = settings.flag("global_pool", False)
    kernel = settings.pair("kernel", 1 if whole else None)
    convention = settings.one_of("pooling_convention", ("valid", "full"), "valid")
    found = Pooling(
        kind,
        kernel,
        settings.pair("stride", 1),
        settings.pair("pad", 0),
        convention == "full",
        whole,
        settings.flag("count_include_pad", True),
    )
    if min(*found.kernel, *found.stride) < 1 or min(found.pad) < 0:
        raise Refused(f"expected positive sizes, got {found}")
    if not whole and any(pad >= size for pad, size in zip(found.pad, found.kernel)):
        raise Refused(f"pad: expected less than the window's {found.kernel}, got {found.pad}")
    if found.full and any(stride > size for stride, size in zip(found.stride, found.kernel)):
        raise Refused(f"stride: expected at most the window's {found.kernel} with convention full, got {found.stride}")
    return found


def _infer(settings: Pooling, shapes: Sequence[Shape]) -> Shape:
    x = shapes[0]
    rank("data", 4, x)
    fitted = settings.fitted(x)
    if any(size > length + 2 * pad for size, length, pad in zip(fitted.kernel, x[2:], fitted.pad)):
        raise Refused(f"kernel: expected at most the image's {x[2]} x {x[3]} with its padding, got {fitted.kernel}")
    return x[0], x[1], fitted.output(0, x[2]), fitted.output(1, x[3])


def _span(settings: Pooling, axis: int, tap: int, length: int, outputs: int) -> tuple[slice, slice]:
    """The outputs whose windows have that tap inside the image, and the inputs that it falls on."""
    offset, stride = tap - settings.pad[axis], settings.stride[axis]
    first = max(0, ceil_div(-offset, stride))
    last = min(outputs, (length - 1 - offset) // stride + 1)
    if last <= first:
        return slice(0, 0), slice(0, 0)
    start = first * stride + offset
    return slice(first, last), slice(start, start + (last - first - 1) * stride + 1, stride)


def _pool(arrays: Arrays, settings: Pooling, inputs: Sequence[Any], out: Any) -> None:
    x, xp = inputs[0], arrays.xp
    settings = settings.fitted(x.shape)
    maximum = settings.kind == MAXIMUM
    out[...] = -np.inf if maximum else 0
    for p, q in product(*map(range, settings.kernel)):
        rows, from_rows = _span(settings, 0, p, x.shape[2], out.shape[2])
        columns, from_columns = _span(settings, 1, q, x.shape[3], out.shape[3])
        part = out[:, :, rows, columns]
        (xp.maximum if maximum else xp.add)(part, x[:, :, from_rows, from_columns], out=part)
    if settings.kind == MEAN:
        counts = [settings.counts(axis, x.shape[2 + axis], out.shape[2 + axis]) for axis in (0, 1)]
        xp.divide(out, xp.asarray(np.outer(*counts)), out=out)


POOLING = Kind(("Pooling",), ("data",), _read, _infer, _pool)
