"""Where ``direct`` leaves an image's outputs: in y, or in scratch for the maxima that go to y."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from ece408_op.problem import ConvProblem
from ece408_op.runtime.llvm import Cpu, element, offset

from . import _tanh_pool
from ._direct_images import Conv
from ._tanh_pool import Pooling


class Outputs:
    """The outputs of a layer, with ``pooling`` behind it or None; scratch is free from float ``place`` on."""

    def __init__(self, module: ir.Module, layer: ConvProblem, target: Cpu, pooling: Pooling | None, place: int) -> None:
        self._size = pooling.size if pooling else math.prod(layer.y_shape[1:])
        self._pool = _tanh_pool.build(module, pooling, target) if pooling else None
        self._place = place

    def of(self, conv: Conv, image: Any) -> Any:
        """Where the convolution of an image goes: filters x rows x columns."""
        return element(conv.b, conv.scratch, self._place) if self._pool else self._y(conv, image)

    def done(self, conv: Conv, image: Any) -> None:
        """What remains to do when the convolution of an image is there."""
        if self._pool:
            conv.b.call(self._pool, [self.of(conv, image), self._y(conv, image)])

    def _y(self, conv: Conv, image: Any) -> Any:
        return element(conv.b, conv.y, offset(conv.b, (image, self._size)))
