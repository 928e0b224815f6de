"""Copies of an image in which each filter element's pixels are contiguous, for every stride and padding.

    copies[c][q][r % S][r // S][j] = x[c][r - P][j S + q D - P]            S stride, P padding, D dilation

So element (p, q) multiplies the OH*OW floats from [c][q][p D % S][p D // S][0] on, in the order of the output's pixels.
"""

from __future__ import annotations

import numpy as np

from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.llvm import Function, Module

from ._ir import copy_rows, windows_inside


class Copies:
    """The layout of the copies of one layer's images; ``lanes`` floats fit a vector.

    pixels   pixels of an output plane
    rows     rows of a copy, for each remainder of the row index by the stride
    copy     floats of one copy of a channel
    channel  floats of all copies of a channel, one for each column of the filters
    """

    def __init__(self, layer: ConvProblem, lanes: int) -> None:
        self.layer, self.lanes = layer, lanes
        self.pixels = layer.output_height * layer.output_width
        self.rows = ceil_div(layer.height + 2 * layer.pad[0], layer.stride[0])
        self.copy = layer.stride[0] * self.rows * layer.output_width
        self.channel = layer.kernel_width * self.copy

    def offsets(self) -> np.ndarray:
        """Return the offset of each element's pixels in the copies of a group, shape (C / G * K * L,)."""
        layer = self.layer
        c, p, q = np.indices((layer.channels // layer.groups, layer.kernel, layer.kernel_width)).reshape(3, -1)
        down, stride = p * layer.dilate[0], layer.stride[0]
        row = down % stride * self.rows + down // stride
        return np.ascontiguousarray(c * self.channel + q * self.copy + row * layer.output_width, np.int64)

    def build(self, module: Module) -> Function:
        """Build (x, copies, channels), which fills the copies except the padding; the padding must be zeros already."""
        layer = self.layer
        (top, left), (sh, sw), dw = layer.pad, layer.stride, layer.dilate[1]
        with Function(module, "copy", "x copies", "channels") as f:
            x, copies, channels = f.arguments
            with f.range(channels) as c, f.range(layer.height) as r:
                source = x[c * (layer.height * layer.width) + r * layer.width]
                row = (r + top) % sh * self.rows + (r + top) // sh
                to = copies[c * self.channel + row * layer.output_width]
                for q in range(layer.kernel_width):
                    start = q * dw - left
                    first, count = windows_inside(layer.width, layer.output_width, sw, start)
                    read, write = source[first * sw + start], to[q * self.copy + first]
                    if count > 0 and sw == 1:
                        copy_rows(self.lanes, count, (read, 0), (write, 0), 1)
                    elif count > 0:
                        with f.range(count) as j:
                            write[j].store(read[j * sw].load())
        return f
