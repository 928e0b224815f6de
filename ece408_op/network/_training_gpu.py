"""What computes a training step's nodes on the GPU: convolutions and their gradients by our kernels, pooling, BatchNorm
and activations by ``pooling.cu`` and ``training.cu``, other operators by their own methods with CuPy and cuBLAS.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from ece408_op.graph.symbol_graph import Node
from ece408_op.runtime import cuda

from ._data_parallel import Rank
from ._definition import Trained
from ._elementwise import Activation, Arithmetic
from ._gpu import Chooser
from ._layers import BatchNorm, Convolution, Deconvolution
from ._passes import pool
from ._pooling import Pooling
from ._training_passes import TrainingArrays


class GpuOperators:
    """What computes the nodes on one GPU, on the current stream."""

    def __init__(self, chooser: Chooser) -> None:
        self.arrays: TrainingArrays = TrainingArrays(chooser.device)
        self._chooser = chooser
        self._rank: Rank | None = None

    def of(self, rank: Rank) -> GpuOperators:
        """Return operators for one GPU's share of a batch: BatchNorm exchanges its sums with the other ranks."""
        found = copy(self)
        found._rank = rank if rank.size > 1 else None
        return found

    def train(self, node: Node, inputs: Sequence[Any], out: Any, seed: int) -> Any:
        """Fill the node's output as ``Operator.train``, with its epilogue."""
        operator = node.operator
        if isinstance(operator, Convolution):
            return self._convolve(node, inputs, out)
        if isinstance(operator, Pooling) and operator.is_maximum:
            return self.arrays.max_pool(operator, node.epilogue, inputs[0], out)
        if isinstance(operator, Pooling):
            cuda.execute(pool(operator, inputs[0].shape, out.shape, None), 1, {"x": inputs[0], "y": out}, None)
            return None
        if isinstance(operator, BatchNorm) and not operator.use_global_stats:
            return self.arrays.batch_norm(operator, node.epilogue == "relu", inputs, out, self._rank)
        if isinstance(operator, Arithmetic) and node.epilogue:
            return self.arrays.sum_relu(inputs, out)
        return operator.train(self.arrays, inputs, out, seed)

    def _convolve(self, node: Node, inputs: Sequence[Any], out: Any) -> None:
        (x, w, *bias), operator = inputs, node.operator
        problem = operator.problem(x.shape)
        kernel = self._chooser.kernel(node, problem)
        if self._chooser.is_free(node, kernel) and operator.kernel == (1, 1) and not problem.needs:
            batch, filters = out.shape[:2]
            matrix = w.reshape(1, filters, -1)
            self.arrays.matmul(matrix, x.reshape(batch, x.shape[1], -1), out.reshape(batch, filters, -1))
        else:
            kernel.run(problem, x, w, out)
        if bias:
            self.arrays.xp.add(out, bias[0].reshape(1, -1, 1, 1), out=out)

    def gradients(self, node: Node, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        """Return the gradients to the node's inputs as ``Operator.gradients``; ``given.out`` is the epilogue's."""
        operator = node.operator
        if isinstance(operator, Activation):
            return [self.arrays.activation_gradient(operator.activation, gradient, given.out)]
        if isinstance(operator, Pooling):
            return [self.arrays.pool_gradient(operator, node.epilogue, given, gradient)]
        if isinstance(operator, BatchNorm):
            relu = node.epilogue == "relu"
            return self.arrays.batch_norm_gradients(operator, relu, given, gradient, wanted[0], self._rank)
        if isinstance(operator, Convolution):
            return self._convolution_gradients(node, given, gradient, wanted)
        if node.epilogue:
            gradient = self.arrays.activation_gradient(node.epilogue, gradient, given.out)
        return operator.gradients(self.arrays, given, gradient, wanted)

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
                found[number] = self.arrays.xp.empty(like.shape, np.float32)
                self._chooser.kernel(node, one).run(one, *operands, found[number])
        if bias and wanted[2]:
            found[2] = self.arrays.bias_gradient(gradient)
        return found
