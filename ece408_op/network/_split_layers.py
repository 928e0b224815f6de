"""Layers that compute split activations: the preparation of their parameters, and their launches.

The kernels and the format are those of ``kernels.cuda.split_precision``; ``_formats`` decides which nodes use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from ece408_op.core import dispatch
from ece408_op.core.kernel import CudaKernel
from ece408_op.graph.symbol_graph import Node
from ece408_op.kernels.cuda.split_precision import split_form, split_passes, wide
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.cuda import Program
from ece408_op.runtime.launch import SCRATCH_ALIGNMENT, Chip, round_up

from ._definition import INPUT, ONE, Arrays, Operator, Shape
from ._elementwise import Elementwise, is_prelu
from ._formats import SCALE_BYTES, Conversion, SplitArray, SplitUse, image_shape, split_bytes
from ._fusion import Combination, is_unary
from ._layers import BatchNorm, Convolution, Deconvolution, FullyConnected, Pooling, Weighted
from ._passes import expression
from ._schedule import Call, Computation, ProgramComputation, Timed, arrays_of, in_order
from ._shaping import Concat

#: fp16x3_general: split-form convolutions need the same GPU and compiler, and ``op_times`` reports its name for them.
_KERNEL: CudaKernel = wide.FP16X3[1]
#: The fewest filters and channels per group, and the smallest reduction length, that pay for splitting the input.
_FEWEST_FILTERS, _FEWEST_CHANNELS, _FEWEST_PRODUCTS = 24, 24, 64


def accepts(chip: Chip, node: Node, inputs: Sequence[Shape], output: Shape) -> SplitUse | None:
    """Return how a node can compute split activations, or None: see ``_formats.Accepts``."""
    operator, x = node.operator, inputs[0]
    if not _KERNEL.runs_on(chip) or chip.compiler < _KERNEL.compiler or not prod(output):
        return None
    following = operator if is_unary(node) else node.epilogue
    if (following and not _keeps_limits(following)) or len(output) not in (2, 4) or len(x) not in (2, 4):
        return None
    if isinstance(operator, Deconvolution) or split_passes.reasons(image_shape(x), image_shape(output)):
        return None
    if isinstance(operator, Weighted):
        problem = problem_of(operator, x)
        if problem is None or operator.impl != dispatch.AUTO:
            return None
        if is_depthwise(operator, x):
            return SplitUse.BETWEEN
        if split_form.reasons(problem):
            return None
        if isinstance(operator, FullyConnected) or problem.filters // problem.groups < _FEWEST_FILTERS:
            return SplitUse.BETWEEN
        small = split_passes.unfolded(problem)
        if small and not operator.residual:
            return None if split_form.reasons(small) or split_passes.reasons(small.x_shape) else SplitUse.FROM_FLOAT32
        enough = x[1] // problem.groups >= _FEWEST_CHANNELS and problem.products >= _FEWEST_PRODUCTS
        return SplitUse.PROFITABLE if enough else SplitUse.BETWEEN
    if isinstance(operator, BatchNorm):
        return SplitUse.BETWEEN if operator.axis == 1 else None
    if isinstance(operator, Concat):
        whole = len(inputs) <= split_passes.MOST_INPUTS and all(shape[1] % 8 == 0 for shape in inputs)
        return SplitUse.BETWEEN if whole and operator.dim == 1 and len(output) == 4 else None
    if isinstance(operator, Combination):
        fits = x == output and (not operator.has_factor or inputs[1] == (*x[:2], 1, 1)[: len(x)])
        return SplitUse.BETWEEN if fits and (not operator.residual or inputs[-1] == x) else None
    others = isinstance(operator, Pooling) or is_prelu(operator) or is_unary(node)
    return SplitUse.BETWEEN if others else None


def _keeps_limits(operator: Elementwise) -> bool:
    """Return whether the output limits stay valid, and padded channels zero: x softsign(1 / x) is NaN there."""
    if not operator.bounds(INPUT).gain <= ONE:
        return False
    value = np.zeros(1, np.float32)
    with np.errstate(all="ignore"):
        operator.compute(Arrays(), [value.copy()], value)
    return not value.any()


def is_depthwise(operator: Operator, x: Shape) -> bool:
    """Return whether a layer is a convolution with one channel and filter per group that split_passes supports."""
    return (
        isinstance(operator, Convolution)
        and operator.num_group == x[1] == operator.num_filter
        and operator.dilate == (1, 1)
        and not operator.residual
    )


def problem_of(operator: Operator, x: Shape) -> ConvProblem | None:
    """Return a layer as a convolution problem, with filters of the images' size for a FullyConnected.

    None for a FullyConnected that does not flatten its input.
    """
    batch, channels, height, width = image_shape(x)
    if isinstance(operator, Convolution):
        return operator.problem(x)
    assert isinstance(operator, FullyConnected)
    if not operator.flatten and len(x) > 2:
        return None
    return ConvProblem(batch, channels, height, width, operator.num_hidden, height, width)


def choose(chip: Chip, node: Node, inputs: Sequence[Shape], output: Shape, first: bool) -> Computation:
    """Return the computation of a conversion, or of a node that ``accepts`` took. first: the node reads float32."""
    operator, x, following = node.operator, image_shape(inputs[0]), expression(node.epilogue)
    if isinstance(operator, Weighted):
        if is_depthwise(operator, x):
            return _Depthwise(node, x, output)
        problem = problem_of(operator, x)
        assert problem, "accepts took it"
        return (_UnfoldedConvolution if first else _SplitConvolution)(chip, node, problem)
    if isinstance(operator, Conversion):
        if operator.op == "join":
            return ProgramComputation(split_passes.join(x))
        named = lambda inputs, out: {"x": inputs[0], "split_x": out.values, "x_scales": out.scales}  # noqa: E731
        return ProgramComputation(split_form.split_activations(x, chip), named)
    if isinstance(operator, Concat):
        return ProgramComputation(split_passes.concat(list(inputs), following))
    if isinstance(operator, Combination):
        return ProgramComputation(split_passes.combine(x, operator.has_factor, operator.residual, following), _combined)
    if isinstance(operator, Pooling):
        fitted = operator.fitted(x)
        windows = fitted.kernel, fitted.stride, fitted.pad
        counted = fitted.count_include_pad
        return ProgramComputation(split_passes.pool(x, output, *windows, fitted.pool_type, counted, following))
    return _Depthwise(node, x, image_shape(output))


def _combined(inputs: Sequence[Any], out: SplitArray) -> dict[str, Any]:
    """Return the arrays of split_passes.combine; x takes the place of a missing factor or residual."""
    factors = [one for one in inputs[1:] if not isinstance(one, SplitArray)]
    x, y = arrays_of([inputs[0]], out), inputs[-1] if isinstance(inputs[-1], SplitArray) else inputs[0]
    return {
        **x,
        "factor": factors[0] if factors else inputs[0].values,
        "residual": y.values,
        "residual_scales": y.scales,
    }


class _SplitLayer(Timed):
    """A layer that one program computes, with the arrays that ``prepare`` makes from the layer's parameters."""

    def __init__(self, node: Node, program: Program, batch: int) -> None:
        super().__init__(node)
        self._program, self._batch = program, batch
        self._parameters: Mapping[str, Any] = {}

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        arrays = {**arrays_of(inputs[:1], out), **self._parameters}
        if isinstance(self.node.operator, Weighted) and self.node.operator.residual:
            arrays.update(residual=inputs[-1].values, residual_scales=inputs[-1].scales)
        return self.timed(cuda.prepared_launch(self._program, self._batch, arrays))


class _Depthwise(_SplitLayer):
    """A depthwise convolution or, with windows of one pixel, a BatchNorm, a PReLU or an activation."""

    name = "split_depthwise"

    def __init__(self, node: Node, x: Shape, output: Shape) -> None:
        operator = node.operator
        windows = (1, 1), (1, 1), (0, 0)
        if isinstance(operator, Convolution):
            windows = operator.kernel, operator.stride, operator.pad
        following = expression(operator if is_unary(node) else node.epilogue)
        program = split_passes.depthwise(x, output, *windows, following, is_prelu(operator))
        super().__init__(node, program, x[0])
        self._channels = x[1]

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Make the filters, tap by tap with channels innermost, and the bias; those of an activation change nothing."""
        cp, operator = cuda.cupy(), self.node.operator
        taps, bias = cp.ones(self._channels, np.float32), None
        if isinstance(operator, BatchNorm):
            taps, bias = (each.astype(np.float32) for each in operator.factors(inputs[1:]))
        elif isinstance(operator, Convolution):
            taps, bias = operator.folded(inputs)
        elif is_prelu(operator):
            taps = taps * inputs[1]
        taps = taps.reshape(self._channels, -1)
        bias = cp.zeros(self._channels, np.float32) if bias is None else bias
        # A PReLU leaves the values above zero as they are.
        limits = split_form.output_limits(cp.maximum(abs(taps), 1) if is_prelu(operator) else taps, bias)
        self._parameters = {"w": cp.ascontiguousarray(_padded(taps).T), "bias": _padded(bias), "limits": limits}


class _SplitConvolution(_SplitLayer):
    """A Convolution or FullyConnected with bias, folded BatchNorm, addition and activation."""

    name = _KERNEL.name

    def __init__(self, chip: Chip, node: Node, problem: ConvProblem) -> None:
        operator, following = node.operator, expression(node.epilogue)
        options = {"bias": not operator.no_bias or operator.norm is not None, "residual": operator.residual}
        super().__init__(node, split_form.convolution(problem, chip, **options, activation=following), problem.batch)
        self._problem = problem

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Fold the BatchNorm into filters and bias, and split the filters."""
        self._parameters = self._converted(*self.node.operator.folded(inputs))

    def _converted(self, w: Any, bias: Any) -> Mapping[str, Any]:
        cp, problem = cuda.cupy(), self._problem
        w = w.reshape(problem.w_shape)
        split_w = cp.empty(split_form.split_weight_bytes(problem) // ITEM_BYTES, np.float32)
        exponents = cp.empty(problem.filters, np.int32)
        program = split_form.split_weights(self._program, problem)
        cuda.execute(program, 1, {"x": w, "w": w, "split_w": split_w, "w_exponents": exponents}, None)
        given = {"w": w, "split_w": split_w, "w_exponents": exponents, "limits": split_form.output_limits(w, bias)}
        return given if bias is None else {**given, "bias": bias}


class _UnfoldedConvolution(_SplitConvolution):
    """A convolution of float32 images with few channels: the columns of each window become channels."""

    def __init__(self, chip: Chip, node: Node, problem: ConvProblem) -> None:
        unfolded = split_passes.unfolded(problem)
        assert unfolded, "accepts took it"
        super().__init__(chip, node, unfolded)
        self._unfold = split_passes.unfold(problem)
        self._values = round_up(split_bytes(unfolded.x_shape), SCRATCH_ALIGNMENT)
        self.scratch = self._values + SCALE_BYTES * problem.batch

    def _converted(self, w: Any, bias: Any) -> Mapping[str, Any]:
        return super()._converted(split_passes.unfolded_filters(w, self._problem), bias)

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        values, scales = scratch[: self._values // ITEM_BYTES], scratch[self._values // ITEM_BYTES :]
        unfold = cuda.prepared_launch(self._unfold, self._batch, {"x": inputs[0], "y": values, "y_scales": scales})
        convolve = super().bind([SplitArray(values, scales, self._problem.x_shape)], out, None)
        return in_order(lambda: cuda.fill_with_zeros(scales, None), unfold, convolve)


def _padded(values: Any) -> Any:
    """Return the array padded with zeros to a multiple of eight along its first axis."""
    cp = cuda.cupy()
    padded = cp.zeros((round_up(len(values), 8), *values.shape[1:]), np.float32)
    padded[: len(values)] = values
    return padded
