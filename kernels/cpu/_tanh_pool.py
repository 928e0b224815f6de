"""tanh of 2 x 2 maxima, which follow a convolution in the course's networks, as LLVM IR.

tanh increases monotonically, so the maximum of four tanhs is the tanh of the maximum: a quarter of the tanhs.

    tanh(x) = t / (t + 2) with the sign of x, where t = exp(z) - 1 and z = 2 |x|, at most 20

z = n ln 2 + r with n an integer, and exp(r) - 1 = r + r^2 q(r), q of degree 4 (a weighted least-squares fit on
|r| <= ln 2 / 2, reweighted towards the smallest largest error: 1.4e-8 of exp(r) - 1). So t = 2^n (exp(r) - 1) + 2^n - 1
loses nothing for small x, where n = 0. The largest error over all float32 from 0 to 22, above which tanh is 1, was
2.52 ulp with fused multiply-adds.
Source of the reduction: J.-M. Muller, Elementary Functions, 2016, on Cody and Waite's method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ece408_op.problem import ConvProblem
from ece408_op.runtime.llvm import I32, Cpu, const, element, fma, for_range, offset

from ._ir import function, load, minimum, store

#: The error bound of tanh, in units in the last place of the result.
TANH_ULPS = 3

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


@dataclass(frozen=True)
class Pooling:
    """The maxima of 2 x 2 outputs of a layer, two apart; with ``full``, also those of the outputs at an odd edge."""

    layer: ConvProblem
    full: bool

    @property
    def rows(self) -> int:
        """Rows of the result."""
        return (self.layer.output_height + self.full) // 2

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return (self.layer.output_width + self.full) // 2

    @property
    def size(self) -> int:
        """Floats of the result for one image."""
        return self.layer.filters * self.rows * self.columns

    def scratch(self, lanes: int) -> int:
        """Return the floats of scratch: an image's convolution, its maxima, and what is read beyond each."""
        return self.stage(lanes) + -(-self.size // lanes) * lanes + 2 * lanes

    def stage(self, lanes: int) -> int:
        """Return the floats of an image's convolution, and of what is read beyond it."""
        size = self.layer.filters * self.layer.output_height * self.layer.output_width
        return -(-size // lanes) * lanes + 4 * lanes


def tanh(b: ir.IRBuilder, target: Cpu, x: Any) -> Any:
    """Emit the tanh of a number or of a vector; NaN stays NaN."""
    count = x.type.count if isinstance(x.type, ir.VectorType) else 0
    whole = ir.VectorType(I32, count) if count else I32

    def number(value: float) -> Any:
        return ir.Constant(x.type, [value] * count if count else value)

    def integer(value: int) -> Any:
        return ir.Constant(whole, [value] * count if count else value)

    bits = b.bitcast(x, whole)
    size = b.bitcast(b.and_(bits, integer(0x7FFFFFFF)), x.type)
    z = b.fadd(size, size)
    z = b.select(b.fcmp_ordered(">", z, number(_LARGEST)), number(_LARGEST), z)
    shifted = fma(b, target, z, number(_LOG2_E), number(_ROUNDING))
    n = b.fsub(shifted, number(_ROUNDING))
    r = fma(b, target, n, number(-_LN2_HIGH), z)
    r = fma(b, target, n, number(-_LN2_LOW), r)
    q = number(_Q[-1])
    for coefficient in _Q[-2::-1]:
        q = fma(b, target, q, r, number(coefficient))
    less_one = fma(b, target, b.fmul(r, r), q, r)
    power = b.add(b.bitcast(shifted, whole), integer(127 - _ROUNDING_BITS & 0xFFFFFFFF))
    scale = b.bitcast(b.shl(power, integer(23)), x.type)
    t = fma(b, target, scale, less_one, b.fsub(scale, number(1.0)))
    result = b.bitcast(b.fdiv(t, b.fadd(t, number(2.0))), whole)
    return b.bitcast(b.or_(result, b.and_(bits, integer(-0x80000000))), x.type)


def _larger(b: ir.IRBuilder, one: Any, other: Any) -> Any:
    """Return the larger of two numbers; if one of them is NaN, the other one, as max-pooling does."""
    larger = b.select(b.fcmp_ordered(">", one, other), one, other)
    return b.select(b.fcmp_unordered("uno", other, other), one, larger)


def build(module: ir.Module, pooling: Pooling, target: Cpu) -> ir.Function:
    """Build (stage, y), which computes tanh of the maxima of the convolution of one image.

    ``stage`` has pooling.scratch floats and begins with the convolution; y gets filters x rows x columns.
    """
    layer, lanes = pooling.layer, target.lanes
    plane, columns = layer.output_height * layer.output_width, layer.output_width
    b, (stage, y) = function(module, "tanh_pool", "stage y")
    maxima = element(b, stage, pooling.stage(lanes))

    def every_second(one: Any, other: Any, first: int) -> Any:
        lanes_of_both = ir.Constant(ir.VectorType(I32, lanes), list(range(first, 2 * lanes, 2)))
        return b.shuffle_vector(one, other, lanes_of_both)

    with for_range(b, layer.filters) as m, for_range(b, pooling.rows) as row:
        top = element(b, stage, offset(b, (m.index, plane), (row.index, 2 * columns)))
        below = minimum(b, b.add(offset(b, (row.index, 2)), const(1)), layer.output_height - 1)
        bottom = element(b, stage, offset(b, (m.index, plane), (below, columns)))
        to = element(b, maxima, offset(b, (m.index, pooling.rows * pooling.columns), (row.index, pooling.columns)))
        # The next row overwrites what a row's last vector holds beyond the row.
        with for_range(b, -(-pooling.columns // lanes)) as part:
            pair = [element(b, pointer, offset(b, (part.index, 2 * lanes))) for pointer in (top, bottom)]
            left, right = (
                _larger(b, *(load(b, element(b, pointer, start), lanes) for pointer in pair)) for start in (0, lanes)
            )
            largest = _larger(b, every_second(left, right, 0), every_second(left, right, 1))
            store(b, largest, element(b, to, offset(b, (part.index, lanes))))
        if 2 * pooling.columns > columns:  # the last column has no neighbour
            alone = [b.load(element(b, pointer, columns - 1), align=4) for pointer in (top, bottom)]
            b.store(_larger(b, *alone), element(b, to, pooling.columns - 1), align=4)
    if pooling.size < lanes:
        with for_range(b, pooling.size) as each:
            value = tanh(b, target, b.load(element(b, maxima, each.index), align=4))
            b.store(value, element(b, y, each.index), align=4)
    else:
        with for_range(b, -(-pooling.size // lanes)) as many:
            start = minimum(b, offset(b, (many.index, lanes)), pooling.size - lanes)
            value = tanh(b, target, load(b, element(b, element(b, maxima, start), 0), lanes))
            store(b, value, element(b, y, start))
    b.ret_void()
    return b.function
