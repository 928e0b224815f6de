"""The computation of a training step's nodes on the GPU.

The package's kernels compute convolutions and their gradients; cuBLAS replaces some of them for 1 x 1 filters.
``pooling.cu`` and ``training.cu`` compute pooling, BatchNorm and the gradients of activations, ``passes.cu`` a sum with
its relu. The operators' own methods compute all others with CuPy and cuBLAS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ece408_op.graph.symbol_graph import Node
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import ceil_div

from ._blas import GpuArrays
from ._data_parallel import Rank
from ._definition import Operator, Trained
from ._elementwise import Activation, Function
from ._gpu import Chooser
from ._layers import BatchNorm, Convolution, Deconvolution, Pooling, channels_second
from ._passes import DERIVATIVES, affine, argmax_type, launch, pool, pool_gradient

#: The values of RELU in training.cu.
_NO_RELU, _RELU, _GRADIENT = 0, 1, 2
#: Blocks per launch, enough to fill a GPU.
_FILLING = 2048


class GpuOperators(GpuArrays):
    """Computes nodes on one GPU, with CuPy on the current device and stream.

    rank: that of the GPU's share of a batch; BatchNorm exchanges its sums with the other ranks.
    """

    def __init__(self, chooser: Chooser, rank: Rank | None = None) -> None:
        self.chooser, self.rank = chooser, rank if rank and rank.size > 1 else None

    def train(self, node: Node, inputs: Sequence[Any], out: Any, seed: int) -> Any:
        """Fill ``out`` with the node's output after its epilogue; return the data for ``gradients``."""
        operator = node.operator
        if isinstance(operator, Convolution):
            return self._convolve(node, inputs, out)
        if isinstance(operator, Pooling):
            return self.pool(operator, node.epilogue, inputs[0], out)
        if isinstance(operator, BatchNorm) and not operator.use_global_stats:
            return self.batch_norm(operator, bool(node.epilogue), inputs, out)
        if isinstance(operator, Function) and node.epilogue:
            return self.sum_relu(inputs, out)
        return operator.train(self, inputs, out, seed)

    def _convolve(self, node: Node, inputs: Sequence[Any], out: Any) -> None:
        (x, w, *bias), operator = inputs, node.operator
        problem = operator.problem(x.shape)
        kernel = self.chooser.kernel(node, problem)
        if self.chooser.may_use_cublas(node, kernel) and operator.kernel == (1, 1) and not problem.needs:
            operator.multiply(self, x, w, out)
        else:
            kernel.run(problem, x, w, out)
        if bias:
            self.xp.add(out, bias[0].reshape(1, -1, 1, 1), out=out)

    def gradients(self, node: Node, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        """Return the gradients to the node's inputs as ``Operator.gradients``; ``given.out`` is after the epilogue."""
        operator = node.operator
        if isinstance(operator, Activation):
            return [self.activation_gradient(operator.activation, gradient, given.out)]
        if isinstance(operator, Pooling):
            return [self.pool_gradient(operator, node.epilogue, given, gradient)]
        if isinstance(operator, BatchNorm):
            return self.batch_norm_gradients(operator, bool(node.epilogue), given, gradient, wanted[0])
        if isinstance(operator, Convolution):
            return self._convolution_gradients(node, given, gradient, wanted)
        if node.epilogue:
            gradient = self.activation_gradient(node.epilogue.activation, gradient, given.out)
        return operator.gradients(self, given, gradient, wanted)

    def _convolution_gradients(
        self, node: Node, given: Trained, gradient: Any, wanted: Sequence[bool]
    ) -> Sequence[Any]:
        (x, w, *bias), problem = given.inputs, node.operator.problem(given.inputs[0].shape)
        to_data, images = problem.data_gradient, (x, gradient)
        if isinstance(node.operator, Deconvolution):
            to_data, images = problem.convolution, (gradient, x)
        runs = ((to_data, (gradient, w), x), (problem.weight_gradient, images, w))
        found: list[Any] = [None] * len(wanted)
        for number, (one, operands, like) in enumerate(runs):
            if wanted[number]:
                found[number] = self.xp.empty(like.shape, np.float32)
                self.chooser.kernel(node, one).run(one, *operands, found[number])
        if bias and wanted[2]:
            found[2] = self.bias_gradient(gradient)
        return found

    def vector(self, inner: int, *arrays: Any) -> int:
        """Return the elements per load, 4 or 1, for arrays with ``inner`` consecutive elements per channel."""
        return 4 if inner % 4 == 0 and cuda.alignment(*(array.data.ptr for array in arrays)) == 16 else 1

    def bias_gradient(self, gradient: Any) -> Any:
        """Return the sum of each channel of (B, M, OH, OW) as float32 (M,), accumulated in float64."""
        x = channels_second(gradient, 1)
        sums = self.xp.empty((2, x.shape[1]), np.float64)
        self._sum_parts(self._partial_sums(x, x, self.xp.zeros(x.shape[1], np.float64)), sums)
        return sums[0].astype(np.float32)

    def _partial_sums(self, x: Any, y: Any, center: Any, relu: Any = None) -> Any:
        """Return the partial sums of x and of x (y - center), (parts, 2, channels) float64, for x (n, channels, m).

        relu: if x is the gradient to a BatchNorm's relu, the BatchNorm's factors, with which the kernel masks x.
        """
        n, channels, inner = x.shape
        parts, vector = min(n, ceil_div(_FILLING, channels)), self.vector(inner, x, y)
        partial = self.xp.empty((parts, 2, channels), np.float64)
        mode, factors = (_NO_RELU, center) if relu is None else (_GRADIENT, relu)
        arrays = {"x": x, "y": y, "center": center, "relu": factors, "partial": partial}
        numbers = np.int32(n), np.int32(channels), np.int32(inner // vector), np.int32(parts)
        # One block per channel and part, without the limit of the other grids, because a block computes only one pair.
        launch("channel_sums", arrays, numbers, x.size, vector, (parts * channels, 1), RELU=mode)
        return partial

    def _sum_parts(self, partial: Any, sums: Any) -> None:
        parts, _, channels = partial.shape
        numbers = np.int32(channels), np.int32(parts)
        launch("sum_parts", {"partial": partial, "sums": sums}, numbers, 2 * channels)

    def _of_batch(self, partial: Any, count: int, rank: Rank | None) -> tuple[Any, int]:
        """Return the whole batch's partial sums and elements per channel, given those of this GPU's share."""
        if rank is None:
            return partial, count
        sums = self.xp.empty((rank.size, *partial.shape[1:]), np.float64)
        self._sum_parts(partial, sums[rank.number])
        rank.all_gather(sums)
        return sums, rank.of_batch(count)

    def _mix(self, factors: Any, x: Any, y: Any, out: Any, mode: int = _NO_RELU, relu: Any = None) -> None:
        """Fill out with a x + b (y - c) + d for (n, channels, m); the rows of ``factors`` are a, b, c and d."""
        _, channels, inner = x.shape
        vector = self.vector(inner, x, y, out)
        arrays = {"x": x, "y": y, "factors": factors, "relu": factors if relu is None else relu, "out": out}
        numbers = np.int32(channels), np.int32(inner // vector), np.int64(x.size // vector)
        launch("channel_mix", arrays, numbers, x.size, vector, RELU=mode)

    def sum_relu(self, inputs: Sequence[Any], out: Any) -> None:
        """Fill out with the relu of the sum of two arrays."""
        inner = self.vector(out.size, *inputs, out)
        one = affine(1, inner, out.size, Activation("relu"), shifted=False, residual=True)
        cuda.execute(one, 1, {"x": inputs[0], "residual": inputs[1], "y": out}, None)

    def batch_norm(self, norm: BatchNorm, relu: bool, inputs: Sequence[Any], out: Any) -> Any:
        """Fill ``out``, with a relu if asked, and return the data that ``batch_norm_gradients`` and new states need.

        That is (mean, variance, new moving mean, new moving variance, statistics, factors). ``statistics`` (2,
        channels) has mean and variance of the whole batch in one array; ``factors`` (4, channels) are the output's in
        ``_mix``.
        """
        (x, gamma, beta, *moving), cp = inputs, self.xp
        x, out = (channels_second(array, norm.axis) for array in (x, out))
        channels = x.shape[1]
        partial = self._partial_sums(x, x, cp.zeros(channels, np.float64))
        partial, count = self._of_batch(partial, x.size // channels, self.rank)
        statistics = cp.empty((2, channels), np.float64)
        factors, new = (cp.empty((rows, channels), np.float32) for rows in (4, 2))
        arrays = {"partial": partial, "gamma": gamma, "beta": beta, "old_mean": moving[0], "old_variance": moving[1]}
        arrays |= {"bias": moving[-1], "statistics": statistics, "factors": factors, "moving": new}
        numbers, defines = _norm_arguments(norm, partial, count)
        launch("norm_factors", arrays, (*numbers, np.float64(norm.momentum)), channels, **defines)
        self._mix(factors, x, x, out, _RELU if relu else _NO_RELU)
        return (*statistics, *new, statistics, factors)

    def batch_norm_gradients(
        self, norm: BatchNorm, relu: bool, given: Trained, gradient: Any, to_data: bool
    ) -> Sequence[Any]:
        """Return the gradients to data, if ``to_data``, and to gamma and beta; the latter are for a sum over all GPUs.

        The gradient to data needs sums over the whole batch, and these are the gradients to gamma and beta. So the
        first GPU returns them, and the others return zeros. Without ``to_data`` or with stored statistics, each GPU
        returns the gradients of its share. Stored statistics do not depend on x: an infinite ``count`` removes the
        terms for that dependence.
        """
        (x, gamma, _, *moving), cp = given.inputs, self.xp
        if norm.use_global_stats:
            statistics, output_factors = cp.stack(moving).astype(np.float64), None
        else:
            *_, statistics, output_factors = given.saved
        mode, factors_of_relu = (_GRADIENT, output_factors) if relu else (_NO_RELU, None)
        found = cp.empty(x.shape, np.float32) if to_data else None
        x, dy = (channels_second(array, norm.axis) for array in (x, gradient))
        channels = x.shape[1]
        rank = self.rank if to_data and not norm.use_global_stats else None
        partial = self._partial_sums(dy, x, statistics[0], factors_of_relu)
        partial, count = self._of_batch(partial, x.size // channels, rank)
        factors, gradients = (cp.empty((rows, channels), np.float32) for rows in (4, 2))
        arrays = {"partial": partial, "statistics": statistics, "gamma": gamma, "gradients": gradients}
        arrays |= {"factors": factors}
        numbers, defines = _norm_arguments(norm, partial, np.inf if norm.use_global_stats else count)
        launch("norm_gradient_factors", arrays, numbers, channels, **defines)
        if to_data:
            self._mix(factors, dy, x, channels_second(found, norm.axis), mode, factors_of_relu)
        if rank and rank.number:
            gradients.fill(0)
        return [found, *gradients, None, None, *([cp.zeros(channels, np.float32)] if norm.bias else [])]

    def activation_gradient(self, activation: str, gradient: Any, y: Any) -> Any:
        """Return the gradient times the activation's derivative, which is computed from the activation's output y."""
        out, vector = self.xp.empty(y.shape, np.float32), self.vector(y.size, gradient, y)
        arrays, numbers = {"x": gradient, "y": y, "out": out}, (np.int64(out.size // vector),)
        defines: dict[str, Any] = {"DERIVATIVE(y)": DERIVATIVES[activation]}
        launch("activation_gradient", arrays, numbers, out.size, vector, **defines)
        return out

    def pool(self, operator: Pooling, activation: Operator | None, x: Any, out: Any) -> Any:
        """Fill ``out`` from x (B, C, H, W) and activate it; return the maxima's indices in the windows, else None."""
        arrays, is_maximum = {"x": x, "y": out}, operator.is_maximum
        if is_maximum:
            arrays["argmax"] = self.xp.empty(out.shape, argmax_type(operator.fitted(x.shape)))
        cuda.execute(pool(operator, x.shape, out.shape, activation, save_argmax=is_maximum), 1, arrays, None)
        return arrays.get("argmax")

    def pool_gradient(self, operator: Pooling, activation: Operator | None, given: Trained, gradient: Any) -> Any:
        """Return the gradient to x (B, C, H, W)."""
        x, y = given.inputs[0], given.out
        out = self.xp.empty(x.shape, np.float32)
        arrays = {"argmax": given.saved if operator.is_maximum else y, "y": y, "dy": gradient, "out": out}
        cuda.execute(pool_gradient(operator, x.shape, y.shape, activation), 1, arrays, None)
        return out


def _norm_arguments(norm: BatchNorm, partial: Any, count: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the last arguments and the constants of the kernels that turn BatchNorm's sums into factors.

    partial: the partial sums (parts, 2, channels). count: elements per channel of the whole batch.
    """
    parts, _, channels = partial.shape
    numbers = np.int32(channels), np.int32(parts), np.float64(count), np.float64(norm.eps)
    return numbers, {"FIXED": int(norm.fix_gamma), "BIASED": int(norm.bias)}
