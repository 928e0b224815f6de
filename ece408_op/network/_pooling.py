"""Pooling: maximum, mean or sum of windows, and of whole images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ._definition import Operator, Shape, Unsupported, choice, flag, pair


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

    @property
    def is_maximum(self) -> bool:
        """Whether each output is a maximum of elements of the input."""
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

    def check_shapes(self, shapes: Sequence[Shape], output: Shape) -> None:
        x = shapes[0]
        if len(x) != 4:
            raise Unsupported(f"data: expected 4 dimensions, got shape {x}")
        fitted = self.fitted(x)
        # MXNet's maximum of no element is the lowest float32.
        lasts = [(count - 1) * s - pad for count, s, pad in zip(output[2:], fitted.stride, fitted.pad)]
        if any(last >= length for last, length in zip(lasts, x[2:])):
            raise Unsupported(f"pooling_convention: expected windows that touch the image, got one at {tuple(lasts)}")
