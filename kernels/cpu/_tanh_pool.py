"""tanh of 2 x 2 maxima, which follow a convolution in the course's networks, as LLVM IR.

tanh increases monotonically, so the maximum of four tanhs is the tanh of the maximum, and three of four are saved.

    tanh(x) = t / (t + 2) with the sign of x, where t = exp(z) - 1 and z = 2 |x|, at most 20

z = n ln 2 + r with n an integer, and exp(r) - 1 = r + r^2 q(r), q of degree 4 (a weighted least-squares fit on
|r| <= ln 2 / 2, reweighted towards the smallest largest error: 1.4e-8 of exp(r) - 1). So t = 2^n (exp(r) - 1) + 2^n - 1
loses nothing for small x, where n = 0. The largest error over all float32 from 0 to 22, above which tanh is 1, was
2.52 ulp with fused multiply-adds.
Source of the reduction: J.-M. Muller, Elementary Functions, 2016, on Cody and Waite's method.
"""

from __future__ import annotations

import math

from ece408_op.problem import Pair, PooledProblem
from ece408_op.runtime.launch import ceil_div, round_up
from ece408_op.runtime.llvm import Function, Module, Value

from ._ir import deinterleaved, store_first

#: q, with the constant term first.
_Q = (0.5, 0.1666654348373413, 0.04166628047823906, 0.00836661085486412, 0.0013946493854746222)
_LOG2_E = 1.4426950408889634
#: ln 2 in two parts; the first has few enough bits that n times it is exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
#: Added to a number below 2^22, it leaves the nearest integer in the low bits.
_ROUNDING = 12582912.0
_ROUNDING_BITS = 0x4B400000
#: tanh is 1 in float32 from 9.02 on.
_LARGEST = 20.0


def scratch(problem: PooledProblem, lanes: int) -> Pair:
    """Return the floats of an image's convolution, and of its maxima, including those that are used beyond them."""
    size = problem.filters * problem.output_height * problem.output_width
    return round_up(size, lanes) + 4 * lanes, round_up(math.prod(problem.y_shape[1:]), lanes) + 2 * lanes


def tanh(x: Value) -> Value:
    """Emit the tanh of a number or of a vector; NaN stays NaN."""

    def multiply_add(a: Value, factor: Value | float, total: Value | float) -> Value:
        return a.fma(x.like(factor), x.like(total))

    size = (x.bits() & 0x7FFFFFFF).bits()
    z = size + size
    z = (z > _LARGEST).select(_LARGEST, z)
    shifted = multiply_add(z, _LOG2_E, _ROUNDING)
    n = shifted - _ROUNDING
    r = multiply_add(n, -_LN2_HIGH, z)
    r = multiply_add(n, -_LN2_LOW, r)
    q = x.like(_Q[-1])
    for coefficient in _Q[-2::-1]:
        q = multiply_add(q, r, coefficient)
    less_one = multiply_add(r * r, q, r)
    scale = (shifted.bits() + (127 - _ROUNDING_BITS & 0xFFFFFFFF)).shifted_left(23).bits()
    t = multiply_add(scale, less_one, scale - 1.0)
    return ((t / (t + 2.0)).bits() | x.bits() & -0x80000000).bits()


def _larger(one: Value, other: Value) -> Value:
    """Return the larger of two numbers; if one number is NaN, return the other, as max-pooling does."""
    return other.equals(other).select((one > other).select(one, other), one)


def build(module: Module, problem: PooledProblem) -> Function:
    """Build (stage, y), which computes tanh of the maxima of the convolution of one image.

    ``stage`` has the floats of ``scratch`` and begins with the convolution; y gets filters x rows x columns.
    """
    (_, filters, rows, columns), lanes = problem.y_shape, module.target.lanes
    height, width, size = problem.output_height, problem.output_width, filters * rows * columns
    with Function(module, "tanh_pool", "stage y") as f:
        stage, y = f.arguments
        maxima = stage[scratch(problem, lanes)[0]]
        with f.range(filters) as m, f.range(rows) as row:
            top = stage[m * (height * width) + row * (2 * width)]
            bottom = stage[m * (height * width) + (row * 2 + 1).min(height - 1) * width]
            to = maxima[m * (rows * columns) + row * columns]
            # A row's last vector is stored beyond the row; the next row overwrites that part.
            with f.range(ceil_div(columns, lanes)) as part:
                above, below = top[part * (2 * lanes)], bottom[part * (2 * lanes)]
                left, right = (_larger(above[n].load(lanes), below[n].load(lanes)) for n in (0, lanes))
                to[part * lanes].store(_larger(deinterleaved(left, right, 0), deinterleaved(left, right, 1)))
            if 2 * columns > width:  # the last column has no neighbour
                to[columns - 1].store(_larger(*(each[width - 1].load() for each in (top, bottom))))
        with f.range(ceil_div(size, lanes)) as many:
            start = (many * lanes).min(max(size - lanes, 0))
            store_first(tanh(maxima[start].load(lanes)), y[start], min(size, lanes))
    return f
