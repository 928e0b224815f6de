"""The launches of ``training.cu``, and the arrays that a training step computes with on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from ece408_op.runtime import cuda
from ece408_op.runtime.launch import ceil_div

from ._data_parallel import Rank
from ._definition import Shape, Trained
from ._dense import GpuArrays
from ._layers import BatchNorm, channels_second
from ._passes import DERIVATIVES, maxima_type, pool, pool_gradient, program
from ._pooling import Pooling
from ._updates import Adam, Sgd, Update

#: RELU in training.cu.
_NO_RELU, _RELU, _GRADIENT = 0, 1, 2
#: Blocks that update a parameter.
_UPDATE_BLOCKS = 64
#: Blocks that fill a GPU.
_FILLING = 2048


class TrainingArrays(GpuArrays):
    """CuPy on the current device and stream, with passes of our own where CuPy needs several."""

    def vector(self, inner: int, *arrays: Any) -> int:
        """Return how many elements a thread reads at a time, of arrays whose channels have ``inner`` in a row."""
        return 4 if inner % 4 == 0 and cuda.alignment(*(array.data.ptr for array in arrays)) == 16 else 1

    def bias_gradient(self, gradient: Any) -> Any:
        """Return the sums of each channel of (B, M, OH, OW), summed in float64."""
        x = channels_second(gradient, 1)
        sums = self.xp.empty((2, x.shape[1]), np.float64)
        self._sum_parts(self._partial_sums(x, x, self.xp.zeros(x.shape[1], np.float64)), sums)
        return sums[0].astype(np.float32)

    def _partial_sums(self, x: Any, y: Any, center: Any, relu: Any = None) -> Any:
        """Return both sums, (parts, 2, channels), in parts; relu: the factors of a relu that x is the gradient to."""
        n, channels, inner = x.shape
        parts = min(n, ceil_div(_FILLING, channels))
        partial = self.xp.empty((parts, 2, channels), np.float64)
        one = sums_program(x.shape, parts, self.vector(inner, x, y), _NO_RELU if relu is None else _GRADIENT)
        arrays = {"x": x, "y": y, "center": center, "partial": partial}
        cuda.execute(one, 1, {**arrays, "relu": center if relu is None else relu}, None)
        return partial

    def _sum_parts(self, partial: Any, sums: Any) -> None:
        parts, _, channels = partial.shape
        cuda.execute(parts_program(channels, parts), 1, {"partial": partial, "sums": sums}, None)

    def _of_batch(self, partial: Any, count: int, rank: Rank | None) -> tuple[Any, int]:
        """Return the sums in parts, and the elements per channel, of the batch that this GPU has a share of."""
        if rank is None:
            return partial, count
        sums = self.xp.empty((rank.size, *partial.shape[1:]), np.float64)
        self._sum_parts(partial, sums[rank.number])
        rank.all_gather(sums)
        return sums, rank.of_batch(count)

    def _mix(self, factors: Any, x: Any, y: Any, out: Any, mode: int = _NO_RELU, relu: Any = None) -> None:
        """Fill out with a x + b (y - c) + d for (n, channels, m); the rows of ``factors`` are a, b, c and d."""
        one = mix_program(x.shape, self.vector(x.shape[2], x, y, out), mode)
        arrays = {"x": x, "y": y, "factors": factors, "out": out}
        cuda.execute(one, 1, {**arrays, "relu": factors if relu is None else relu}, None)

    def sum_relu(self, inputs: Sequence[Any], out: Any) -> None:
        """Fill out with the relu of the sum of two arrays."""
        x, y, out = (array.reshape(1, 1, -1) for array in (*inputs, out))
        self._mix(self._ones, x, y, out, _RELU)

    @cached_property
    def _ones(self) -> Any:
        """The factors of a sum."""
        factors = self.xp.zeros((4, 1), np.float32)
        factors[:2] = 1
        return factors

    def batch_norm(self, norm: BatchNorm, relu: bool, inputs: Sequence[Any], out: Any, rank: Rank | None = None) -> Any:
        """Fill ``out``, with a relu if asked, and return what ``batch_norm_gradients`` needs.

        That is the batch's mean and variance, the new moving ones, both of the first, and the factors of the output.
        rank: of the GPUs that share the batch. The statistics are those of the whole batch.
        """
        (x, gamma, beta, *moving), cp = inputs, self.xp
        x, out = (channels_second(array, norm.axis) for array in (x, out))
        channels = x.shape[1]
        partial = self._partial_sums(x, x, cp.zeros(channels, np.float64))
        partial, count = self._of_batch(partial, x.size // channels, rank)
        statistics = cp.empty((2, channels), np.float64)
        factors, new = (cp.empty((rows, channels), np.float32) for rows in (4, 2))
        arrays = {"partial": partial, "gamma": gamma, "beta": beta, "old_mean": moving[0], "old_variance": moving[1]}
        arrays |= {"bias": moving[-1], "statistics": statistics, "factors": factors, "moving": new}
        cuda.execute(norm_programs(norm, channels, len(partial), count)[0], 1, arrays, None)
        self._mix(factors, x, x, out, _RELU if relu else _NO_RELU)
        return (*statistics, *new, statistics, factors)

    def batch_norm_gradients(
        self, norm: BatchNorm, relu: bool, given: Trained, gradient: Any, to_data: bool, rank: Rank | None = None
    ) -> Sequence[Any]:
        """Return the gradients of ``batch_norm``, to data if wanted; those to parameters have yet to be summed.

        The gradient to data reads the sums over the whole batch, which are the gradients to gamma and beta: the first
        GPU returns these, and the others zeros. Otherwise each returns those of its share. Stored statistics are those
        of an infinite batch.
        """
        (x, gamma, _, *moving), cp = given.inputs, self.xp
        if norm.use_global_stats:
            statistics, kept, rank = cp.stack(moving).astype(np.float64), None, None
        else:
            *_, statistics, kept = given.saved
        mode, factors_of_relu = (_GRADIENT, kept) if relu else (_NO_RELU, None)
        found = cp.empty(x.shape, np.float32) if to_data else None
        x, dy = (channels_second(array, norm.axis) for array in (x, gradient))
        channels = x.shape[1]
        rank = rank if to_data else None
        partial = self._partial_sums(dy, x, statistics[0], factors_of_relu)
        partial, count = self._of_batch(partial, x.size // channels, rank)
        factors, gradients = (cp.empty((rows, channels), np.float32) for rows in (4, 2))
        arrays = {"partial": partial, "statistics": statistics, "gamma": gamma, "gradients": gradients}
        arrays |= {"factors": factors}
        whole = np.inf if norm.use_global_stats else count
        cuda.execute(norm_programs(norm, channels, len(partial), whole)[1], 1, arrays, None)
        if to_data:
            self._mix(factors, dy, x, channels_second(found, norm.axis), mode, factors_of_relu)
        if rank and rank.number:
            gradients.fill(0)
        return [found, *gradients, None, None, *([cp.zeros(channels, np.float32)] if norm.bias else [])]

    def activation_gradient(self, activation: str, gradient: Any, y: Any) -> Any:
        """Return the gradient times the activation's derivative, from its output y."""
        out = self.xp.empty(y.shape, np.float32)
        one = activation_program(activation, out.size, self.vector(out.size, gradient, y))
        cuda.execute(one, 1, {"x": gradient, "y": y, "out": out}, None)
        return out

    def max_pool(self, operator: Pooling, activation: str | None, x: Any, out: Any) -> Any:
        """Fill ``out`` with the maxima of x (B, C, H, W), activated, and return where they are in their windows."""
        maxima = self.xp.empty(out.shape, maxima_type(operator.fitted(x.shape)))
        one = pool(operator, x.shape, out.shape, activation, kept=True)
        cuda.execute(one, 1, {"x": x, "y": out, "maxima": maxima}, None)
        return maxima

    def pool_gradient(self, operator: Pooling, activation: str | None, given: Trained, gradient: Any) -> Any:
        """Return the gradient to x (B, C, H, W)."""
        x, y = given.inputs[0], given.out
        out = self.xp.empty(x.shape, np.float32)
        arrays = {"maxima": given.saved if operator.is_maximum else y, "y": y, "dy": gradient, "out": out}
        cuda.execute(pool_gradient(operator, x.shape, y.shape, activation), 1, arrays, None)
        return out


@lru_cache(maxsize=1024)
def sums_program(shape: Shape, parts: int, vector: int, relu: int = 0) -> cuda.Program:
    """Return the sums of ``parts`` parts; arrays x, y, center, relu and partial."""
    n, channels, inner = shape
    numbers = (np.int32(n), np.int32(channels), np.int32(inner // vector), np.int32(parts))
    args = ("x", "y", "center", "relu", "partial", *numbers)
    # One block for each channel and part, without the limit of the other grids: blocks do not loop over them.
    grid = parts * channels, 1
    return program("training.cu", "channel_sums", args, prod(shape), {"RELU": relu}, vector=vector, grid=grid)


@lru_cache(maxsize=1024)
def parts_program(channels: int, parts: int) -> cuda.Program:
    """Return the sum of the parts; arrays partial and sums."""
    args = ("partial", "sums", np.int32(channels), np.int32(parts))
    return program("training.cu", "sum_parts", args, 2 * channels, {})


@lru_cache(maxsize=1024)
def norm_programs(norm: BatchNorm, channels: int, parts: int, count: float) -> tuple[cuda.Program, cuda.Program]:
    """Return what BatchNorm computes between sums and mixture, forward and backward.

    parts: those of the sums in partial. count: elements per channel.
    """
    numbers = np.int32(channels), np.int32(parts), np.float64(count)
    fixed = {"FIXED": int(norm.fix_gamma), "BIASED": int(norm.bias)}
    eps, momentum = np.float64(norm.eps), np.float64(norm.momentum)
    given = ("partial", "gamma", "beta", "old_mean", "old_variance", "bias", "statistics", "factors", "moving")
    forward = program("training.cu", "norm_factors", (*given, *numbers, eps, momentum), channels, fixed)
    back = ("partial", "statistics", "gamma", "gradients", "factors", *numbers, eps)
    return forward, program("training.cu", "norm_gradient_factors", back, channels, fixed)


@lru_cache(maxsize=1024)
def mix_program(shape: Shape, vector: int, relu: int = 0) -> cuda.Program:
    """Return the mixture per channel; arrays x, y, factors, relu and out."""
    _, channels, inner = shape
    count = prod(shape)
    numbers = (np.int32(channels), np.int32(inner // vector), np.int64(count // vector))
    args = ("x", "y", "factors", "relu", "out", *numbers)
    return program("training.cu", "channel_mix", args, count, {"RELU": relu}, vector=vector)


@lru_cache(maxsize=1024)
def activation_program(activation: str, count: int, vector: int) -> cuda.Program:
    """Return the gradient of an activation; arrays x, the gradient, y and out."""
    args, defines = ("x", "y", "out", np.int64(count // vector)), {"DERIVATIVE(y)": DERIVATIVES[activation]}
    return program("training.cu", "activation_gradient", args, count, defines, vector=vector)


def rows_of(updates: Sequence[Update]) -> np.ndarray:
    """Return the parameters' rows for the update: the addresses, the numbers of elements, and both factors' bits."""
    factors = np.array([(one.rate, one.decay) for one in updates], np.float32).view(np.int64)
    rows = np.zeros((len(updates), 6), np.int64)
    addresses = [[array.data.ptr for array in (one.parameter, one.gradient, *one.states)] for one in updates]
    rows[:, : len(addresses[0])] = addresses
    rows[:, 4], rows[:, 5:] = [one.parameter.size for one in updates], factors
    return rows


def update(rule: Sgd | Adam, updates: Sequence[Update]) -> None:
    """Update all parameters in one launch, on the current device and stream."""
    rows = cuda.cupy().asarray(rows_of(updates))
    cuda.execute(update_program(rule, len(rows)), 1, {"x": rows}, None)


@lru_cache(maxsize=64)
def update_program(rule: Sgd | Adam, count: int) -> cuda.Program:
    """Return the update of ``count`` parameters by a rule; array x has their rows."""
    numbers = [rule.scale, rule.clip]
    if isinstance(rule, Adam):
        numbers += [rule.beta1, rule.beta2, 1 - rule.beta1, 1 - rule.beta2, rule.epsilon]
    else:
        numbers += [rule.momentum, 0, 0, 0, 0]
    args, defines = ("x", *map(np.float32, numbers)), {"ADAM": int(isinstance(rule, Adam))}
    # A parameter may have any number of elements.
    return program("training.cu", "update", args, 1 << 31, defines, grid=(_UPDATE_BLOCKS, count))
