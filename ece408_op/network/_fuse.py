"""Activations joined to the node that feeds them, and moved behind a maximum.

A function that grows with its argument gives for the maximum of some values the maximum of what it gives for each:
behind a 2 x 2 pooling it is computed a quarter as often.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ._elementwise import ACTIVATION, ACTIVATIONS
from ._layers import BATCH_NORM, CONVOLUTION, FULLY_CONNECTED, NEW
from ._pooling import MAXIMUM, POOLING
from .graph import Network, Node

#: What has an activation done in the same pass over its output.
_TAKES = (CONVOLUTION, NEW, FULLY_CONNECTED, BATCH_NORM, POOLING)


def fused(network: Network) -> Network:
    """The same function in fewer passes over memory."""
    return _joined(_behind_maxima(network))


def _uses(network: Network) -> Counter[int]:
    return Counter([value for node in network.nodes for value in node.inputs] + [v for _, v in network.outputs])


def _behind_maxima(network: Network) -> Network:
    uses = _uses(network)
    nodes = list(network.nodes)
    makers = {node.output: position for position, node in enumerate(nodes)}
    for position, pool in enumerate(nodes):
        maker = makers.get(pool.inputs[0])
        if pool.kind is not POOLING or pool.settings.kind != MAXIMUM or maker is None:
            continue
        grower = nodes[maker]
        if grower.kind.grows(grower.settings) and uses[grower.output] == 1:
            # The pooling now makes the value between the two, of a smaller shape.
            nodes[maker] = replace(pool, inputs=grower.inputs, output=grower.output)
            nodes[position] = replace(grower, inputs=(grower.output,), output=pool.output)
    return network.with_nodes(nodes)


def _activation(node: Node) -> str | None:
    if node.kind is ACTIVATION:
        return str(node.settings)
    name = node.kind.names[0]
    return name if name in ACTIVATIONS and not node.settings else None


def _joined(network: Network) -> Network:
    uses = _uses(network)
    nodes: dict[int, Node] = {}
    for node in network.nodes:
        activation = _activation(node)
        before = nodes.get(node.inputs[0]) if node.inputs else None
        if (
            activation
            and before is not None
            and before.kind in _TAKES
            and before.activation is None
            and uses[before.output] == 1
        ):
            del nodes[before.output]
            nodes[node.output] = replace(before, output=node.output, activation=activation)
        else:
            nodes[node.output] = node
    return network.with_nodes(list(nodes.values()))
