"""A network's forward and backward pass in training: every value is saved, and gradients are computed in reverse order.

This is reverse-mode differentiation (A. Griewank, On automatic differentiation, 1989). No later value overwrites a
value's memory, so each operator's gradient can read inputs and output. CuPy allocates the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ece408_op.errors import GraphError
from ece408_op.graph.fusion import only_source
from ece408_op.graph.symbol_graph import VARIABLE, Graph

from ._definition import Shape, Trained, Unsupported
from ._elementwise import Activation
from ._layers import BatchNorm, Convolution, Pooling
from ._network import Network, described
from ._shaping import Dropout, Identity
from ._training_gpu import GpuOperators


@dataclass(frozen=True)
class SavedValues:
    """A forward pass on a GPU: by number, the values, ``Operator.train``'s results, and the new values of states."""

    values: Mapping[int, Any]
    saved: Mapping[int, Any]
    states: Mapping[int, Any]
    #: The QueuedBackward that is queued behind this pass, if any: see ``_backward``.
    queued: Any = None


def check_gradients(network: Network, several: bool) -> None:
    """Raise GraphError, which names the nodes, if operators lack a gradient, with ``several`` on several GPUs."""
    problems = []
    for _, node in network.operators:
        try:
            node.operator.check_gradient(several)
        except Unsupported as error:
            problems.append(f"{described(node)}: {error}")
    if problems:
        raise GraphError(
            f"for_training: expected operators with a gradient, got {len(problems)} without: {'; '.join(problems)}"
        )


def fused(network: Network) -> Network:
    """Return the network with each relu fused into the BatchNorm or sum before it, if nothing else reads that value.

    Under the same condition, a BatchNorm takes over the bias of a convolution before it, and a max-pooling the
    activation before it: an increasing function of a maximum is the maximum of the function's values.
    """
    graph = network.graph
    source, nodes = only_source(graph), list(graph.nodes)
    for index, node in enumerate(nodes):
        before = source(index)
        if before is None:
            continue
        one, own = nodes[before].operator, node.operator
        batch_norm = isinstance(own, BatchNorm) and not own.use_global_stats and own.axis == 1
        if batch_norm and isinstance(one, Convolution) and not one.no_bias:
            *rest, bias = nodes[before].inputs
            nodes[before] = replace(nodes[before], operator=replace(one, no_bias=True), inputs=rest)
            nodes[index] = replace(node, operator=replace(own, bias=True), inputs=[*node.inputs, bias])
        if isinstance(own, Pooling) and own.is_maximum and isinstance(one, Activation):
            nodes[before] = replace(nodes[before], operator=Identity("_copy"))
            nodes[index] = replace(node, epilogue=one.activation)
        if not isinstance(own, Activation) or own.activation != "relu":
            continue
        if (isinstance(one, BatchNorm) and not one.use_global_stats) or one.op == "elemwise_add":
            nodes[before] = replace(nodes[before], epilogue="relu")
            nodes[index] = replace(node, operator=Identity("_copy"))
    return replace(network, graph=Graph(nodes, graph.heads, graph.attrs))


def is_random(network: Network) -> bool:
    """Return whether training draws random numbers."""
    return any(isinstance(node.operator, Dropout) for _, node in network.operators)


def reads_gradient(network: Network) -> list[bool]:
    """Return for each output whether the backward pass reads the gradient to it; that of a loss is not read."""
    nodes = network.graph.nodes
    return [nodes[value].op == VARIABLE or not nodes[value].operator.is_loss for value in network.outputs]


def forward(
    network: Network, operators: GpuOperators, given: Mapping[int, Any], shapes: Mapping[int, Shape], seed: int
) -> SavedValues:
    """Compute all values, of these shapes, from data and parameters; equal seeds make equal random numbers."""
    values, saved = dict(given), {}
    states: dict[int, Any] = {}
    for number, node in network.operators:
        # The second use of a layer updates the states that its first use has updated.
        inputs = [states.get(entry.node, values.get(entry.node)) for entry in node.inputs]
        if node.operator.view_in_training:
            values[number] = values[node.inputs[0].node].reshape(shapes[number])
            continue
        values[number] = operators.xp.empty(shapes[number], np.float32)
        saved[number] = operators.train(node, inputs, values[number], seed + number)
        new = node.operator.new_states(Trained(inputs, values[number], saved[number]))
        states.update({node.inputs[position].node: value for position, value in new.items()})
    return SavedValues(values, saved, states)


def backward(
    network: Network,
    operators: GpuOperators,
    before: SavedValues,
    labels: Mapping[int, Any],
    gradients: Mapping[int, Any],
    wanted: Collection[int],
) -> dict[int, Any]:
    """Return the gradients to the wanted variables by number, except variables that no gradient reaches.

    labels: the variables that the forward pass does not read. gradients: those to outputs, by the outputs' positions.
    """
    xp, values = operators.xp, {**before.values, **labels}
    found: dict[int, Any] = {}
    for position, gradient in gradients.items():
        _add(found, network.outputs[position], gradient)
    needed = set(wanted)
    for number, node in network.operators:
        if any(entry.node in needed for entry in node.inputs):
            needed.add(number)
    for number, node in reversed(network.operators):
        gradient = found.pop(number, None)
        if number not in needed or (gradient is None and not node.operator.is_loss):
            continue
        if gradient is not None:
            gradient = xp.ascontiguousarray(gradient)
        sources = [entry.node for entry in node.inputs]
        given = Trained([values.get(source) for source in sources], values[number], before.saved.get(number))
        results = operators.gradients(node, given, gradient, [source in needed for source in sources])
        for source, result in zip(sources, results):
            if result is not None and source in needed:
                _add(found, source, result)
    return {value: found[value] for value in wanted if value in found}


def _add(found: dict[int, Any], value: int, gradient: Any) -> None:
    """Add to a value's gradient, out of place: views of the arrays may be other values' gradients."""
    found[value] = found[value] + gradient if value in found else gradient
