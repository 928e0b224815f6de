"""Copies of an image in which the pixels that a filter's element meets are contiguous, for every stride and padding.

    copies[c][q][r % S][r // S][j] = x[c][r - P][j S + q D - P]            S stride, P padding, D dilation

So element (p, q) meets the OH*OW floats from [c][q][p D % S][p D // S][0] on, in the order of the output's pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from ece408_op.problem import ConvProblem
from ece408_op.runtime.llvm import F32_PTR, I64, const, element, for_range, new_function, offset

from ._direct_tile import copy_rows


@dataclass(frozen=True)
class Copies:
    """The layout of the copies of one layer's images; ``lanes`` floats fit a vector."""

    layer: ConvProblem
    lanes: int

    @property
    def pixels(self) -> int:
        """Pixels of an output plane."""
        return self.layer.output_height * self.layer.output_width

    @property
    def rows(self) -> int:
        """Rows of a copy for each remainder of the rows' numbers by the stride."""
        return -(-(self.layer.height + 2 * self.layer.pad[0]) // self.layer.stride[0])

    @property
    def copy(self) -> int:
        """Floats of one copy of a channel."""
        return self.layer.stride[0] * self.rows * self.layer.output_width

    @property
    def channel(self) -> int:
        """Floats of all copies of a channel, one for each column of the filters."""
        return self.layer.kernel_width * self.copy

    def offsets(self) -> np.ndarray:
        """Return where the pixels of each element begin in the copies of a group, shape (C / G * K * L,)."""
        layer = self.layer
        c, p, q = np.indices((layer.channels // layer.groups, layer.kernel, layer.kernel_width)).reshape(3, -1)
        down, stride = p * layer.dilate[0], layer.stride[0]
        row = down % stride * self.rows + down // stride
        return np.ascontiguousarray(c * self.channel + q * self.copy + row * layer.output_width, np.int64)

    def build(self, module: ir.Module) -> ir.Function:
        """Build (x, copies, channels), which fills what is not padding; the padding must be zeros already."""
        layer = self.layer
        (top, left), (sh, sw), dw = layer.pad, layer.stride, layer.dilate[1]
        arguments = {"x": F32_PTR, "copies": F32_PTR, "channels": I64}
        b, (x, copies, channels) = new_function(module, "copy", arguments, internal=True)
        with for_range(b, channels) as c, for_range(b, layer.height) as r:
            source = element(b, x, offset(b, (c.index, layer.height * layer.width), (r.index, layer.width)))
            row = b.add(r.index, const(top))
            row = offset(b, (b.urem(row, const(sh)), self.rows), (b.udiv(row, const(sh)), 1))
            to = element(b, copies, offset(b, (c.index, self.channel), (row, layer.output_width)))
            for q in range(layer.kernel_width):
                start = q * dw - left
                first = max(0, -(start // sw))
                count = min(layer.output_width - 1, (layer.width - 1 - start) // sw) - first + 1
                read, write = element(b, source, first * sw + start), element(b, to, q * self.copy + first)
                if count > 0 and sw == 1:
                    copy_rows(b, self.lanes, count, (read, 0), (write, 0), 1)
                elif count > 0:
                    with for_range(b, count) as j:
                        value = b.load(element(b, read, offset(b, (j.index, sw))), align=4)
                        b.store(value, element(b, write, j.index), align=4)
        b.ret_void()
        return b.function
