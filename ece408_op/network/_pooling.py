"""Pooling: maximum, mean or sum of windows, and of whole images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from ece408_op.runtime.launch import ceil_div

from ._definition import Arrays, Operator, Shape, Trained, Unsupported, choice, flag, pair
from ._elementwise import ACTIVATIONS, DERIVATIVES


@dataclass(frozen=True)
class Pooling(Operator):
    """Pooling of x (B, C, H, W).

    With the convention ``full`` there is one more output where the last window reaches over the edge.
    """

    names = ("Pooling",)
    accepted = ("p_value",)
    takes_epilogue = True
    kernel: tuple[int, int] = pair(1)
    pool_type: str = choice("max", "avg", "sum")
    stride: tuple[int, int] = pair(1)
    pad: tuple[int, int] = pair(0)
    pooling_convention: str = choice("valid", "full")
    global_pool: bool = flag(False)
    count_include_pad: bool = flag(True)
    layout: str = choice("NCHW")
    #: What fusion adds in training: an activation of the maxima, which are then those of the activation's values.
    applied: str | None = None

    @property
    def is_maximum(self) -> bool:
        return self.pool_type == "max"

    def check(self) -> None:
        if min(*self.kernel, *self.stride) < 1 or min(self.pad) < 0:
            raise Unsupported(f"expected positive sizes, got {self}")
        if not self.global_pool and any(pad >= size for pad, size in zip(self.pad, self.kernel)):
            raise Unsupported(f"pad: expected less than the window's {self.kernel}, got {self.pad}")

    def fitted(self, x: Sequence[int]) -> Pooling:
        """Return the same pooling for images (B, C, H, W) with the window's size, if that is the whole image."""
        if not self.global_pool:
            return self
        whole = (x[2], x[3])
        return replace(self, kernel=whole, stride=(1, 1), pad=(0, 0), pooling_convention="valid", global_pool=False)

    def infer(self, shapes: Sequence[Shape]) -> Shape:
        x = shapes[0]
        if len(x) != 4:
            raise Unsupported(f"data: expected 4 dimensions, got shape {x}")
        fitted = self.fitted(x)
        spans = [length + 2 * pad - size for length, pad, size in zip(x[2:], fitted.pad, fitted.kernel)]
        if min(spans) < 0:
            raise Unsupported(f"kernel: expected at most the image's {x[2]} x {x[3]} with padding, got {fitted.kernel}")
        full = fitted.pooling_convention == "full"
        rows, columns = (
            1 + (ceil_div(span, stride) if full else span // stride) for span, stride in zip(spans, fitted.stride)
        )
        # MXNet's maximum of no element is the lowest float32.
        lasts = [(count - 1) * s - pad for count, s, pad in zip((rows, columns), fitted.stride, fitted.pad)]
        if any(last >= length for last, length in zip(lasts, x[2:])):
            raise Unsupported(f"pooling_convention: expected windows that touch the image, got one at {tuple(lasts)}")
        return x[0], x[1], rows, columns

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        self._pool(arrays, inputs[0], out)
        if self.applied:
            ACTIVATIONS[self.applied](arrays, out, out)

    def _pool(self, arrays: Arrays, x: Any, out: Any) -> None:
        xp, fitted = arrays.xp, self.fitted(x.shape)
        out[...] = -np.inf if self.is_maximum else 0
        for p, q in product(*map(range, fitted.kernel)):
            rows, from_rows = fitted._span(0, p, x.shape[2], out.shape[2])
            columns, from_columns = fitted._span(1, q, x.shape[3], out.shape[3])
            part = out[:, :, rows, columns]
            (xp.maximum if self.is_maximum else xp.add)(part, x[:, :, from_rows, from_columns], out=part)
        if self.pool_type == "avg":
            xp.divide(out, xp.asarray(self._all_counts(x.shape, out.shape)), out=out)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        """Add each window's gradient to its first maximum, or to all its elements."""
        xp, x, maxima = arrays.xp, given.inputs[0], given.out
        if self.applied:
            gradient = gradient * DERIVATIVES[self.applied](xp, given.out)
            maxima = xp.empty(given.out.shape, np.float32)
            self._pool(arrays, x, maxima)
        fitted, found = self.fitted(x.shape), xp.zeros(x.shape, np.float32)
        left = xp.ones(gradient.shape, bool)  # windows whose maximum has not been found yet
        if self.pool_type == "avg":
            gradient = gradient / xp.asarray(self._all_counts(x.shape, gradient.shape))
        for p, q in product(*map(range, fitted.kernel)):
            rows, from_rows = fitted._span(0, p, x.shape[2], gradient.shape[2])
            columns, from_columns = fitted._span(1, q, x.shape[3], gradient.shape[3])
            part, under = gradient[:, :, rows, columns], (slice(None), slice(None), from_rows, from_columns)
            if self.is_maximum:
                here = left[:, :, rows, columns] & (x[under] == maxima[:, :, rows, columns])
                left[:, :, rows, columns] ^= here
                part = xp.where(here, part, np.float32(0))
            found[under] += part
        return [found]

    def _all_counts(self, x: Shape, output: Shape) -> np.ndarray:
        """Return how many elements each window's mean has."""
        fitted = self.fitted(x)
        return np.outer(*(fitted._counts(axis, x[2 + axis], output[2 + axis]) for axis in (0, 1)))

    def _span(self, axis: int, tap: int, length: int, outputs: int) -> tuple[slice, slice]:
        """Return the outputs whose windows have that tap inside the image, and the inputs under it."""
        offset, stride = tap - self.pad[axis], self.stride[axis]
        first = max(0, ceil_div(-offset, stride))
        last = max(first, min(outputs, (length - 1 - offset) // stride + 1))
        start = first * stride + offset
        return slice(first, last), slice(start, start + (last - first) * stride, stride)

    def _counts(self, axis: int, length: int, outputs: int) -> np.ndarray:
        """Return how many elements along an axis each window's mean has."""
        start = np.arange(outputs) * self.stride[axis] - self.pad[axis]
        stop = np.minimum(start + self.kernel[axis], length + self.pad[axis])
        if not self.count_include_pad:
            start, stop = np.maximum(start, 0), np.minimum(stop, length)
        return (stop - start).astype(np.float32)
