"""The choice of each node's implementation on the GPU, made once per batch size, and the layers on float32 values."""

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
from ece408_op.kernels.cuda.split_precision import dense
from ece408_op.problem import ITEM_BYTES, PAD, ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.cuda import Program
from ece408_op.runtime.launch import SCRATCH_ALIGNMENT, Chip, round_up

from . import _passes, _split_layers
from ._blas import GpuArrays
from ._definition import Shape
from ._elementwise import Elementwise
from ._formats import SplitUse
from ._layers import BatchNorm, Convolution, FullyConnected, Pooling, Weighted
from ._network import described
from ._schedule import ArrayComputation, Call, Computation, ProgramComputation, Timed, in_order
from ._softmax import SoftmaxAlongAxis

CUDNN = cudnn.KERNEL.name
#: The fewest channels of a 1 x 1 convolution in float32 for which cuBLAS is used. On an H200, the package's kernel took
#: 0.5 to 0.9 times as long as cuBLAS with up to 32 channels, and 3 times as long with 256.
_CUBLAS_CHANNELS = 64
#: The compute capability, and the fewest rows, columns and GEMM K, with which split precision is faster than cuBLAS.
_CAPABILITY, _PROFITABLE = (9, 0), (128, 64, 1024)

#: Returns the call that computes a convolution or a product, given x, w, output and scratch.
Bind = Callable[[Any, Any, Any, Any], Call]


class Chooser:
    """Chooses the computations of a network on one GPU. Nothing here needs the GPU itself, except cuDNN's plans.

    impl: "auto" or "cudnn". precision: that of kernels chosen by "auto". A ``New`` node's own values override both.
    """

    def __init__(self, impl: str, precision: str, chip: Chip) -> None:
        self.impl, self.precision, self.chip = impl, precision, chip
        if impl == CUDNN:
            cudnn.library()
        self.arrays = GpuArrays()

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
        length = operator.row_length(output) if isinstance(operator, SoftmaxAlongAxis) else None
        if length is not None:
            options = operator.temperature, operator.logarithm
            return ProgramComputation(_passes.softmax(prod(output) // length, length, *options))
        if isinstance(operator, Elementwise) and len(inputs) <= _passes.MOST_OPERANDS:
            return ProgramComputation(_passes.elementwise(operator, inputs, output, node.epilogue))
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


class WeightedComputation(Timed):
    """A Convolution or FullyConnected and, in one pass after it, its bias, addition and activation.

    ``prepare`` folds a BatchNorm after the layer into the weights and the bias. name: the implementation's.
    """

    def __init__(
        self, node: Node, output: Shape, bind: Bind, name: str, scratch: int = 0, repeatable: bool = True
    ) -> None:
        super().__init__(node)
        self._bind, self.name, self.scratch, self.repeatable = bind, name, scratch, repeatable
        operator: Weighted = node.operator
        axis = len(output) - 1 if isinstance(operator, FullyConnected) else 1
        options = {"shifted": not operator.no_bias or operator.norm is not None, "residual": operator.residual}
        #: The pass after the layer, None if there is nothing to do.
        self._after: Program | None = None
        if node.epilogue or any(options.values()):
            inner = prod(output[axis + 1 :])
            self._after = _passes.affine(output[axis], inner, prod(output), node.epilogue, **options)
        #: The weights and the bias with the BatchNorm folded in, None without a BatchNorm.
        self._folded: tuple[Any, Any] | None = None

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Fold the BatchNorm into weights and bias."""
        operator = self.node.operator
        self._folded = operator.folded(inputs) if operator.norm else None

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        """Return the layer, which can be timed, and the pass after it."""
        operator = self.node.operator
        w, shift = self._folded or operator.folded(inputs)
        compute = self.timed(self._bind(inputs[0], w, out, scratch))
        if self._after is None:
            return compute
        given = {"x": out, "shift": shift, "residual": inputs[-1] if operator.residual else None, "y": out}
        arrays = {name: array for name, array in given.items() if array is not None}
        return in_order(compute, cuda.prepared_launch(self._after, 1, arrays))


def _convolution(chooser: Chooser, node: Node, x: Shape, output: Shape) -> Computation:
    """Return the computation by a tensor-core or named kernel, else cuBLAS for 1 x 1 filters, else a float32 kernel."""
    operator, problem = node.operator, node.operator.problem(x)
    kernel = chooser.kernel(node, problem)
    if chooser.may_use_cublas(node, kernel):
        if operator.kernel == (1, 1) and not problem.needs and x[1] >= _CUBLAS_CHANNELS:
            return WeightedComputation(node, output, _by_cublas(chooser, node), "cublas")
        if problem.needs == {PAD}:
            # Copy the data with a border of zeros: more kernels support convolutions without padding.
            rows, columns = operator.pad
            plain = replace(problem, height=x[2] + 2 * rows, width=x[3] + 2 * columns, pad=(0, 0))
            border = _passes.border(operator.pad, x)
            return _by_kernel(chooser.chip, node, output, chooser.kernel(node, plain), plain, border)
    return _by_kernel(chooser.chip, node, output, kernel, problem)


def _by_kernel(
    chip: Chip, node: Node, output: Shape, kernel: CudaKernel, problem: ConvProblem, border: Program | None = None
) -> WeightedComputation:
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
    return WeightedComputation(node, output, bind, kernel.name, scratch, plan.repeatable)


def _by_cublas(chooser: Chooser, node: Node) -> Bind:
    """Return the call by cuBLAS of a FullyConnected or a 1 x 1 convolution."""
    return lambda x, w, out, scratch: lambda: node.operator.multiply(chooser.arrays, x, w, out)


def _fully_connected(chooser: Chooser, node: Node, w: Shape, output: Shape) -> Computation:
    """Return the computation by cuBLAS or, on Hopper where that is faster, in split precision."""
    (columns, length), chip, bind = w, chooser.chip, _by_cublas(chooser, node)
    sizes = prod(output) // columns, columns, length
    is_large = all(size >= least for size, least in zip(sizes, _PROFITABLE))
    if chooser.impl != CUDNN and chip.capability == _CAPABILITY and is_large:
        return _SplitFullyConnected(node, output, bind, sizes, chip)
    return WeightedComputation(node, output, bind, "cublas")


class _SplitFullyConnected(WeightedComputation):
    """FullyConnected in split precision, or in float32 by cuBLAS.

    cuBLAS computes it if the range of the weights is too wide for split precision, if the weights are not
    parameters, or if the input is not aligned to 16 bytes.
    """

    def __init__(self, node: Node, output: Shape, bind: Bind, sizes: tuple[int, int, int], chip: Chip) -> None:
        options = chip, not node.operator.no_bias, _passes.expression(node.epilogue)
        self._program, self._split, self._bytes = dense.multiply(*sizes, *options)
        super().__init__(node, output, bind, "split_fully_connected", self._program.plan.scratch_bytes)
        self._parameters: dict[str, Any] | None = None

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Split the weights, if they are parameters and their range allows it."""
        w, cp = inputs[1], cuda.cupy()
        self._parameters = None
        if w is None:
            return
        split = {name: cp.zeros(size // ITEM_BYTES, np.int32) for name, size in self._bytes.items()}
        cuda.execute(self._split, 1, {"w": w, **split}, None)
        if not bool((split["w_exponents"] == dense.UNSPLITTABLE).any()):
            self._parameters = split

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        """Return the split-precision launches, or cuBLAS's call where split precision cannot be used."""
        if self._parameters is None or inputs[0].data.ptr % dense.ALIGNMENT:
            return super().bind(inputs, out, scratch)
        arrays = {**dict(zip(("x", "w", "bias"), inputs)), **self._parameters, "y": out}
        return cuda.prepared_launch(self._program, 1, arrays, scratch)


class _Norm(ProgramComputation):
    """BatchNorm at inference: a scale and a shift per channel, which ``prepare`` computes from the parameters."""

    def __init__(self, chooser: Chooser, node: Node, output: Shape) -> None:
        axis = node.operator.axis % len(output)
        inner = prod(output[axis + 1 :])
        super().__init__(_passes.affine(output[axis], inner, prod(output), node.epilogue, scaled=True))
        self._operator, self._plain = node.operator, ArrayComputation(chooser.arrays, node)

    def prepare(self, inputs: Sequence[Any]) -> None:
        # The operator's own method allocates memory, which a CUDA graph would use after others have it.
        self.repeatable = all(array is not None for array in inputs[1:])
        factors = [each.astype(np.float32) for each in self._operator.factors(inputs[1:])] if self.repeatable else []
        self._parameters = dict(zip(("scale", "shift"), factors))

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        """Return the launch, or the operator's own method if other nodes compute its parameters."""
        if not self._parameters:
            return self._plain.bind(inputs, out, scratch)
        return super().bind(inputs, out, scratch)
