"""The choice of the implementation of each node on the GPU, made once per batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ece408_op.core import dispatch
from ece408_op.core.kernel import CudaKernel
from ece408_op.errors import UnsupportedError
from ece408_op.graph.symbol_graph import Node
from ece408_op.kernels.cuda import cudnn
from ece408_op.problem import ITEM_BYTES, PAD, ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.cuda import Program
from ece408_op.runtime.launch import SCRATCH_ALIGNMENT, Chip, round_up

from . import _passes, _split_layers
from ._definition import Shape
from ._dense import BlasFullyConnected, GpuArrays, SplitFullyConnected, blas, is_profitable
from ._formats import SplitUse
from ._layers import BatchNorm, Convolution, FullyConnected, Pooling
from ._network import described
from ._schedule import ArrayComputation, Call, Computation, ProgramComputation, Timed, in_order
from ._shaping import Softmax, SoftmaxOutput

CUDNN = cudnn.KERNEL.name
#: The fewest channels of a 1 x 1 convolution in float32 for which cuBLAS is used. On an H200, the package's kernel took
#: 0.5 to 0.9 times as long as cuBLAS with up to 32 channels, and 3 times as long with 256.
_CUBLAS_CHANNELS = 64

#: Returns the call that computes a convolution, given x, w, output and scratch.
Bind = Callable[[Any, Any, Any, Any], Call]


class Chooser:
    """Chooses the computations of a network on one GPU. Nothing here needs the GPU itself, except cuDNN's plans.

    impl: "auto" or "cudnn". precision: that of kernels chosen by "auto". A ``New`` node's own values override both.
    """

    def __init__(self, impl: str, precision: str, device: int, chip: Chip) -> None:
        self.impl, self.precision, self.device, self.chip = impl, precision, device, chip
        if impl == CUDNN:
            cudnn.library()
        self.arrays = GpuArrays(device)

    def accepts(self, node: Node, inputs: Sequence[Shape], output: Shape) -> SplitUse | None:
        """Return how a node may compute split activations, or None: see ``_formats.Accepts``."""
        return None if self.impl == CUDNN else _split_layers.accepts(self.chip, node, inputs, output)

    def choose(
        self, node: Node, inputs: Sequence[Shape], output: Shape, reads_split: bool, computes_split: bool
    ) -> Computation:
        """Return the computation of a node, given the shapes of the values that it reads and of its output.

        Raises UnsupportedError if the implementation that the node names cannot compute it.
        """
        if reads_split or computes_split:
            return _split_layers.choose(self.chip, node, inputs, output, not reads_split)
        operator, x = node.operator, inputs[0]
        if isinstance(operator, Convolution):
            return _convolution(self, node, x, output)
        if isinstance(operator, FullyConnected):
            return _fully_connected(self, node, inputs[1], output)
        if isinstance(operator, BatchNorm):
            return _Norm(self, node, output)
        if isinstance(operator, Pooling):
            return ProgramComputation(_passes.pool(operator, x, output, node.epilogue))
        length = operator.row_length(output) if isinstance(operator, (Softmax, SoftmaxOutput)) else None
        if length is not None:
            options = operator.temperature, operator.logarithm
            return ProgramComputation(_passes.softmax(prod(output) // length, length, *options))
        return ArrayComputation(self.arrays, node)

    def kernel(self, node: Node, problem: ConvProblem) -> CudaKernel:
        """Return the kernel for a convolution node, or for a gradient of it; blocked_gemm supports every problem.

        Raises UnsupportedError if the node names an implementation that does not support the problem.
        """
        operator = node.operator
        impl = operator.impl if operator.impl != dispatch.AUTO else self.impl
        precision = self.precision if operator.precision == "float32" else operator.precision
        try:
            kernel = dispatch.select_with_gradients(problem, "gpu", impl, precision, self.chip)
        except UnsupportedError as error:
            raise UnsupportedError(f"{described(node)}: impl: {error}") from error
        assert isinstance(kernel, CudaKernel), "an implementation for the CPU is refused when the graph is read"
        return kernel

    def may_use_cublas(self, node: Node, kernel: CudaKernel) -> bool:
        """Return whether cuBLAS may replace the kernel: it is a float32 kernel, and "auto" has chosen it."""
        return node.operator.impl == self.impl == dispatch.AUTO and kernel.arithmetic == "fp32"


class ConvolutionComputation(Timed):
    """A convolution and, in one pass after it, its bias, addition and activation; ``name`` is the implementation's.

    ``prepare`` folds a BatchNorm after the convolution into the filters and the bias.
    """

    def __init__(
        self, node: Node, output: Shape, bind: Bind, name: str, scratch: int = 0, repeatable: bool = True
    ) -> None:
        super().__init__(node)
        self._bind, self.name, self.scratch, self.repeatable = bind, name, scratch, repeatable
        operator, inner = node.operator, prod(output[2:])
        shifted = not operator.no_bias or operator.norm is not None
        self._after = _passes.Epilogue(shifted, operator.residual, node.epilogue, output[1], inner, prod(output))
        #: The filters and the bias with the BatchNorm folded in, None without a BatchNorm.
        self._folded: tuple[Any, Any] | None = None

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Fold the BatchNorm into filters and bias."""
        operator = self._node.operator
        self._folded = operator.folded(inputs) if operator.norm else None

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        """Return the convolution, which can be timed, and the pass after it."""
        operator = self._node.operator
        w, shift = self._folded or (inputs[1], None if operator.no_bias else inputs[2])
        residual = inputs[-1] if operator.residual else None
        convolve = self._bind(inputs[0], w, out, scratch)
        return in_order(self.timed(convolve), self._after.bind(out, shift, residual))


def _convolution(chooser: Chooser, node: Node, x: Shape, output: Shape) -> Computation:
    """Return the computation by a tensor-core or named kernel, else cuBLAS for 1 x 1 filters, else a float32 kernel."""
    operator, problem = node.operator, node.operator.problem(x)
    kernel = chooser.kernel(node, problem)
    if chooser.may_use_cublas(node, kernel):
        if operator.kernel == (1, 1) and not problem.needs and x[1] >= _CUBLAS_CHANNELS:
            bind = _pointwise(chooser.device, x, output)
            return ConvolutionComputation(node, output, bind, "cublas")
        if problem.needs == {PAD}:
            # Copy the data with a border of zeros: more kernels support convolutions without padding.
            rows, columns = operator.pad
            plain = replace(problem, height=x[2] + 2 * rows, width=x[3] + 2 * columns, pad=(0, 0))
            border = _passes.border(operator.pad, x)
            return _by_kernel(chooser.chip, node, output, chooser.kernel(node, plain), plain, border)
    return _by_kernel(chooser.chip, node, output, kernel, problem)


def _by_kernel(
    chip: Chip, node: Node, output: Shape, kernel: CudaKernel, problem: ConvProblem, border: Program | None = None
) -> ConvolutionComputation:
    """Return the convolution by a kernel, which reads a copy of the images with a border of zeros if ``border``."""
    plan = kernel.plan(problem, chip, 16)  # bytes: the largest alignment that a plan uses
    copied = round_up(ITEM_BYTES * prod(problem.x_shape), SCRATCH_ALIGNMENT) if border else 0

    def bind(x: Any, w: Any, out: Any, scratch: Any) -> Call:
        rest = scratch[copied // ITEM_BYTES :] if plan.scratch and plan.repeatable else None
        if border is None:
            return kernel.prepare_launch(problem, x, w, out, rest)
        padded = scratch[: prod(problem.x_shape)].reshape(problem.x_shape)
        add_border = cuda.prepared_launch(border, 1, {"x": x, "y": padded})
        return in_order(add_border, kernel.prepare_launch(problem, padded, w, out, rest))

    scratch = copied + (plan.scratch_bytes if plan.repeatable else 0)
    return ConvolutionComputation(node, output, bind, kernel.name, scratch, plan.repeatable)


def _pointwise(device: int, x: Shape, y: Shape) -> Bind:
    """Return the call by cuBLAS of a 1 x 1 convolution: per image, filters (M, C) times pixels (C, H W)."""
    pixels = y[2] * y[3]
    sizes, strides = (y[1], pixels, x[1]), (0, x[1] * pixels, y[1] * pixels)

    def bind(x_array: Any, w: Any, out: Any, scratch: Any) -> Call:
        library, addresses = blas(device), (w.data.ptr, x_array.data.ptr, out.data.ptr)
        return lambda: library.multiply(*addresses, sizes, strides, y[0])

    return bind


def _fully_connected(chooser: Chooser, node: Node, w: Shape, output: Shape) -> Computation:
    columns, length = w
    rows = prod(output) // columns
    layer = (node, rows, length, chooser.device)
    if chooser.impl != CUDNN and is_profitable(rows, columns, length, chooser.chip):
        return SplitFullyConnected(*layer, chooser.chip)
    return BlasFullyConnected(*layer)


class _Norm(Computation):
    """BatchNorm at inference: a scale and a shift per channel, which ``prepare`` computes from the parameters."""

    def __init__(self, chooser: Chooser, node: Node, output: Shape) -> None:
        axis = node.operator.axis % len(output)
        inner = prod(output[axis + 1 :])
        self._launch = _passes.affine(output[axis], inner, prod(output), node.epilogue, scaled=True)
        self._operator, self._plain = node.operator, ArrayComputation(chooser.arrays, node)
        self._factors: tuple[Any, Any] | None = None

    def prepare(self, inputs: Sequence[Any]) -> None:
        known = all(array is not None for array in inputs[1:])
        factors = self._operator.factors(inputs[1:]) if known else None
        self._factors = factors and (factors[0].astype(np.float32), factors[1].astype(np.float32))

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        """Return the launch, or the operator's own method if other nodes compute its parameters."""
        if self._factors is None:
            return self._plain.bind(inputs, out, scratch)
        arrays = {"x": inputs[0], "scale": self._factors[0], "shift": self._factors[1], "y": out}
        return cuda.prepared_launch(self._launch, 1, arrays)
