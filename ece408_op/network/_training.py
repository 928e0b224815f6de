"""A network's forward and backward pass in training: every value is saved, and gradients are computed in reverse order.

This is reverse-mode differentiation (A. Griewank, On automatic differentiation, 1989). No later value overwrites a
value's memory, so each operator's gradient can read inputs and output. CuPy allocates the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._definition import Shape, Trained
from ._network import Network
from ._training_gpu import GpuOperators


@dataclass(frozen=True)
class SavedValues:
    """A forward pass on a GPU: by number, the values, ``Operator.train``'s results, and the new values of states."""

    values: Mapping[int, Any]
    saved: Mapping[int, Any]
    states: Mapping[int, Any]
    #: The QueuedBackward that is queued behind this pass, if any: see ``_backward``.
    queued: Any = None


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
