"""Time fp16x3_general on activations that stay split, NHWC, as they do between layers of gpu_network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ece408_op.core import timer
from ece408_op.kernels.cuda.split_precision import split_form, split_passes, wide
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

NAME = "auto, split NHWC"


class SplitLayer:
    """A layer whose input is split already, and whose output stays split.

    If the input has few channels, it is float32 images instead, and the call splits them too.

    x (B, C, H, W) and w (M, C / groups, K, K) are CuPy arrays of float32. precision is "float32" (two fp16 components
    per value), or "tf32" or "fp16" (one). Raises UnsupportedError for a layer that has no split form.
    """

    def __init__(self, problem: ConvProblem, x: Any, w: Any, precision: str) -> None:
        cp, chip = cuda.cupy(), cuda.chip()
        components = 2 if precision == "float32" else 1
        unfolded = split_passes.unfolded(problem)
        self._filters = problem.filters
        self._y, self._y_scales = _arrays(problem.y_shape, components)
        self._evict = timer.eviction(self._y)
        #: The error bound: the kernel's, plus the roundings of x and y to split values, as a share of sum |x||w|.
        self.bound = wide.bound(components, problem) + 2 * 2.0 ** (-22 if components == 2 else -11)
        small = unfolded or problem
        split_x, x_scales = _arrays(small.x_shape, components)
        self._unfold: Callable[[], None] = lambda: None
        if unfolded:
            w = split_passes.unfolded_filters(w, unfolded)
            images = {"x": x, "y": split_x, "y_scales": x_scales}
            self._unfold = cuda.prepared_launch(split_passes.unfold(problem, components), problem.batch, images)
        else:
            images = {"x": x, "split_x": split_x, "x_scales": x_scales}
            cuda.execute(split_form.split_activations(problem.x_shape, chip, components), problem.batch, images, None)
        program = split_form.convolution(small, chip, components)
        split_w = cp.empty(split_form.split_weight_bytes(small, components) // 4, np.float32)
        filters = {"w": w, "split_w": split_w, "w_exponents": cp.empty(problem.filters, np.int32)}
        cuda.execute(split_form.split_weights(program, small), 1, {"x": w, **filters}, None)
        arrays = {"x": split_x, "x_scales": x_scales, "limits": split_form.output_limits(w), **filters}
        arrays |= {"y": self._y, "y_scales": self._y_scales}
        self._convolve: Callable[[], None] = cuda.prepared_launch(program, problem.batch, arrays)
        # Keep the arrays, because the launches have their addresses.
        self._arrays = images, arrays
        self._zeroed = [self._y_scales, x_scales] if unfolded else [self._y_scales]

    def prepare(self) -> None:
        """Evict L2, poison the output, and reset its scales, which a network resets for all layers together."""
        self._evict()
        for scales in self._zeroed:
            scales.fill(0)

    def __call__(self) -> Any:
        """Queue the convolution; returns the split output."""
        self._unfold()
        self._convolve()
        return self._y

    def values(self, output: Any) -> Any:
        """Return the values of an output in float32, NCHW."""
        cp = cuda.cupy()
        high, *low = output[..., : self._filters].astype(np.float32)
        exponents = self._y_scales[:, 0, None, None, None]
        return cp.moveaxis(cp.ldexp(high + low[0] / 2048 if low else high, -exponents), 3, 1)


def _arrays(shape: tuple[int, int, int, int], components: int) -> tuple[Any, Any]:
    """Return an empty split array, and its scales, for values of a shape (B, C, H, W)."""
    cp = cuda.cupy()
    values = cp.empty(split_form.activation_shape(*shape, components=components), np.float16)
    return values, cp.zeros((shape[0], 2), np.int32)
