"""The launches of ``training.cu``, and the arrays that a training step computes with on the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Launch, ceil_div

from ._definition import Shape
from ._dense import GpuArrays
from ._passes import program
from ._pooling import Pooling
from ._updates import Adam, Sgd, Update

_THREADS = 256
#: The largest grid; each thread computes further elements in turn.
_BLOCKS = 1 << 20
#: Blocks that update a parameter.
_UPDATE_BLOCKS = 64
#: Blocks that fill a GPU.
_FILLING = 2048

#: The derivatives of the activations in CUDA C++, from the output y.
_DERIVATIVES = {
    "relu": "((y) > 0.f ? 1.f : 0.f)",
    "sigmoid": "((y) * (1.f - (y)))",
    "tanh": "(1.f - (y) * (y))",
    "softrelu": "(-expm1f(-(y)))",
    "softsign": "((1.f - fabsf(y)) * (1.f - fabsf(y)))",
}


class TrainingArrays(GpuArrays):
    """CuPy on the current device and stream, with passes of our own where CuPy needs several."""

    def channel_sums(self, x: Any, y: Any, center: Any) -> tuple[Any, Any]:
        """Return sum x and sum x (y - center) for each channel, in float64: see ``Arrays``."""
        cp, (n, channels, inner) = self.xp, x.shape
        if not x.size:
            return super().channel_sums(x, y, center)
        parts = min(n, ceil_div(_FILLING, channels))
        partial, sums = (cp.empty((2, *shape), np.float64) for shape in ((parts, channels), (channels,)))
        programs = sums_programs(x.shape, parts, _vector(inner, x, y))
        for one, arrays in zip(programs, ({"x": x, "y": y, "center": center}, {"x": sums})):
            cuda.execute(one, 1, {**arrays, "partial": partial}, None)
        return sums[0], sums[1]

    def channel_mix(self, factors: Sequence[Any], x: Any, y: Any, out: Any) -> None:
        """Fill out with a x + b (y - c) + d: see ``Arrays``."""
        if out.size:
            stacked = self.xp.stack(factors).astype(np.float32)
            one = mix_program(x.shape, _vector(x.shape[2], x, y, out))
            cuda.execute(one, 1, {"x": x, "y": y, "factors": stacked, "out": out}, None)

    def activation_gradient(self, activation: str, gradient: Any, y: Any) -> Any:
        """Return the gradient times the activation's derivative, from its output y."""
        out = self.xp.empty(y.shape, np.float32)
        if out.size:
            one = activation_program(activation, out.size, _vector(out.size, gradient, y))
            cuda.execute(one, 1, {"x": gradient, "y": y, "out": out}, None)
        return out

    def pool_gradient(self, operator: Pooling, gradient: Any, x: Any, y: Any) -> Any:
        """Return the gradient to x (B, C, H, W)."""
        out = self.xp.empty(x.shape, np.float32)
        if out.size:
            arrays = {"x": x, "y": y, "dy": gradient, "out": out}
            cuda.execute(pool_gradient_program(operator, x.shape, y.shape), 1, arrays, None)
        return out


def _program(
    entry: str, elements: int, args: tuple[Any, ...], vector: int = 1, defines: Mapping[str, int | str] | None = None
) -> cuda.Program:
    index = "unsigned long long" if elements >= 1 << 31 else "unsigned int"
    blocks = max(1, min(_BLOCKS, ceil_div(elements // vector, _THREADS)))
    launch = Launch(entry, (blocks, 1, 1), (_THREADS, 1, 1), args)
    return program("training.cu", launch, {"INDEX": index, "VECTOR": vector, **(defines or {})})


def _vector(inner: int, *arrays: Any) -> int:
    """Return how many elements a thread reads at a time, of arrays whose channels have ``inner`` in a row."""
    return 4 if inner % 4 == 0 and cuda.alignment(*(array.data.ptr for array in arrays)) == 16 else 1


@lru_cache(maxsize=1024)
def sums_programs(shape: Shape, parts: int, vector: int) -> tuple[cuda.Program, cuda.Program]:
    """Return the sums of ``parts`` parts, arrays x, y, center and partial, and their sum, arrays partial and x."""
    n, channels, inner = shape
    sizes = np.int32(channels), np.int32(parts)
    numbers = (np.int32(n), np.int32(channels), np.int32(inner // vector), np.int32(parts))
    # One block for each channel and part.
    blocks = parts * channels * _THREADS * vector
    index = {"INDEX": "unsigned long long"} if prod(shape) >= 1 << 31 else {}
    first = _program("channel_sums", blocks, ("x", "y", "center", "partial", *numbers), vector, index)
    return first, _program("sum_parts", 2 * channels, ("partial", "x", *sizes))


@lru_cache(maxsize=1024)
def mix_program(shape: Shape, vector: int) -> cuda.Program:
    """Return the mixture per channel; arrays x, y, factors and out."""
    _, channels, inner = shape
    count = prod(shape)
    numbers = (np.int32(channels), np.int32(inner // vector), np.int64(count // vector))
    return _program("channel_mix", count, ("x", "y", "factors", "out", *numbers), vector)


@lru_cache(maxsize=1024)
def activation_program(activation: str, count: int, vector: int) -> cuda.Program:
    """Return the gradient of an activation; arrays x, the gradient, y and out."""
    defines = {"DERIVATIVE(y)": _DERIVATIVES[activation]}
    return _program("activation_gradient", count, ("x", "y", "out", np.int64(count // vector)), vector, defines)


@lru_cache(maxsize=1024)
def pool_gradient_program(operator: Pooling, x: Shape, y: Shape) -> cuda.Program:
    """Return the gradient of pooling; arrays x, y, dy and out."""
    fitted = operator.fitted(x)
    defines: dict[str, int | str] = {
        "MAXIMUM": int(operator.is_maximum),
        "MEAN": int(operator.pool_type == "avg"),
        "COUNT_PAD": int(operator.count_include_pad),
    }
    sizes = (*x[2:], *y[2:], *fitted.kernel, *fitted.stride, *fitted.pad)
    args = ("x", "y", "dy", "out", *map(np.int32, sizes), np.int64(prod(x)))
    return _program("pool_gradient", prod(x), args, 1, defines)


def row_of(one: Update) -> list[int]:
    """Return a parameter's row for the update: the addresses, the number of elements, and the two factors' bits."""
    arrays = [one.parameter, one.gradient, *one.states][:4]
    addresses = [array.data.ptr for array in arrays] + [0] * (4 - len(arrays))
    (factors,) = np.array([one.rate, one.decay], np.float32).view(np.int64)
    return [*addresses, one.parameter.size, int(factors)]


@lru_cache(maxsize=64)
def update_program(rule: Sgd | Adam, count: int) -> cuda.Program:
    """Return the update of ``count`` parameters by a rule; array x has their rows."""
    numbers = [rule.scale, rule.clip]
    numbers += [rule.beta1, rule.beta2, rule.epsilon] if isinstance(rule, Adam) else [rule.momentum, 0, 0]
    args: list[Any] = ["x", *map(np.float32, numbers)]
    launch = Launch("update", (_UPDATE_BLOCKS, count, 1), (_THREADS, 1, 1), tuple(args))
    defines: dict[str, int | str] = {"INDEX": "unsigned long long", "VECTOR": 1, "ADAM": int(isinstance(rule, Adam))}
    return program("training.cu", launch, defines)
