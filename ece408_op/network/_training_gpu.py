"""What computes a training step's nodes on the GPU: convolutions and their gradients by our kernels, other operators by
their own methods, with cuBLAS for matrix products and ``training.cu`` for passes over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from ece408_op.core import dispatch
from ece408_op.graph.symbol_graph import Node
from ece408_op.runtime import cuda

from ._definition import Shape, Trained
from ._elementwise import Activation, Arithmetic
from ._gpu import Chooser
from ._layers import BatchNorm, Convolution
from ._meeting import Member
from ._passes import Pass, pool
from ._pooling import Pooling
from ._training import Operators
from ._training_passes import TrainingArrays, rows_of, update_program
from ._updates import Adam, Sgd, Update


class GpuOperators(Operators):
    """What computes the nodes on one GPU, on the current stream."""

    def __init__(self, chooser: Chooser) -> None:
        self.arrays: TrainingArrays = TrainingArrays(chooser.device)
        self._chooser = chooser
        self._member: Member | None = None

    def of(self, member: Member | None) -> GpuOperators:
        """Return operators for one GPU's share of a batch: BatchNorm exchanges its sums with the other members."""
        found = copy(self)
        found._member = member
        return found

    def train(self, node: Node, inputs: Sequence[Any], out: Any, seed: int) -> Any:
        """Fill the node's output."""
        operator = node.operator
        if isinstance(operator, Pooling) and operator.is_maximum and out.size:
            return self.arrays.max_pool(operator, inputs[0], out)
        if isinstance(operator, Pooling) and out.size:
            cuda.execute(_pool(operator, inputs[0].shape, out.shape).program, 1, {"x": inputs[0], "y": out}, None)
            return None
        if isinstance(operator, BatchNorm) and not operator.use_global_stats and out.size:
            return self.arrays.batch_norm(operator, inputs, out, self._member)
        if isinstance(operator, Arithmetic) and operator.relu and out.size:
            return self.arrays.sum_relu(inputs, out)
        if not isinstance(operator, Convolution) or not out.size:
            return super().train(node, inputs, out, seed)
        (x, w, *bias), problem = inputs, operator.problem(inputs[0].shape)
        kernel = self._chooser.kernel(node, problem)
        free = operator.impl == self._chooser.impl == dispatch.AUTO
        in_float32 = kernel is None or (free and kernel.arithmetic == "fp32")
        if in_float32 and operator.kernel == (1, 1) and not problem.needs:
            batch, filters = out.shape[:2]
            matrix = w.reshape(1, filters, -1)
            self.arrays.matmul(matrix, x.reshape(batch, x.shape[1], -1), out.reshape(batch, filters, -1))
        elif kernel is None:
            return super().train(node, inputs, out, seed)
        else:
            kernel.run(problem, x, w, out)
        if bias:
            self.arrays.xp.add(out, bias[0].reshape(1, -1, 1, 1), out=out)
        return None

    def gradients(self, node: Node, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        """Return the gradients to the node's inputs."""
        operator, xp = node.operator, self.arrays.xp
        if isinstance(operator, Activation):
            return [self.arrays.activation_gradient(operator.activation, gradient, given.out)]
        if isinstance(operator, Arithmetic) and operator.relu:
            gradient = self.arrays.activation_gradient("relu", gradient, given.out)
            node = replace(node, operator=replace(operator, relu=False))
        if isinstance(operator, Pooling):
            return [self.arrays.pool_gradient(operator, given, gradient)]
        if isinstance(operator, BatchNorm) and not operator.use_global_stats and gradient.size:
            return self.arrays.batch_norm_gradients(operator, given, gradient, wanted[0], self._member)
        if not isinstance(operator, Convolution) or not gradient.size:
            return super().gradients(node, given, gradient, wanted)
        x, w = given.inputs[:2]
        problem = operator.problem(x.shape)
        runs = ((problem.data_gradient, (gradient, w), x), (problem.weight_gradient, (x, gradient), w))
        found: list[Any] = []
        for (one, operands, like), asked in zip(runs, wanted):
            kernel = self._chooser.kernel(node, one) if asked else None
            if asked and kernel is None:
                return super().gradients(node, given, gradient, wanted)
            found.append(xp.empty(like.shape, np.float32) if kernel else None)
            if kernel:
                kernel.run(one, *operands, found[-1])
        return found if operator.no_bias else [*found, operator.bias_gradient(self.arrays, gradient, wanted)]

    def update(self, rule: Sgd | Adam, updates: Sequence[Update]) -> None:
        """Update all parameters in one launch."""
        rows = rows_of(updates)
        cuda.execute(update_program(rule, len(rows)), 1, {"x": self.arrays.xp.asarray(rows)}, None)


@lru_cache(maxsize=256)
def _pool(operator: Pooling, x: Shape, y: Shape) -> Pass:
    return pool(operator, x, y, None)
