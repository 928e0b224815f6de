"""A network: a graph with operators, whose variables are sorted into data, parameters, labels and states.

The number of a value is that of the node that computes it, or of its variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ece408_op.errors import GraphError
from ece408_op.graph.symbol_graph import VARIABLE, Entry, Graph, Node
from ece408_op.plugin.attributes import integers
from ece408_op.plugin.mxnet_errors import sentence_of
from ece408_op.runtime.thread_pool import run_in_other_thread

from . import _elementwise, _fusion, _layers, _shaping, _softmax
from ._definition import SHAPE, Operator, Shape, Unsupported

_WHERE = "network"
#: How many parsed graphs stay in memory: MXNet infers shapes many times.
_CACHED = 32

#: The operators' classes, in the order of their definitions.
_CLASSES: list[type[Operator]] = [
    kind
    for module in (_layers, _elementwise, _shaping, _softmax)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Operator) and "names" in vars(kind)
]
#: The operators that a network may have, by their names in MXNet's graphs.
OPERATORS: Mapping[str, type[Operator]] = {name: kind for kind in _CLASSES for name in kind.names}

#: The operators of mx.np with the equivalent ones of mx.nd, and the attributes that have another name in mx.np.
_LONG = {"subtract": "sub", "multiply": "mul", "true_divide": "div"} | {name: name for name in ("add", "power")}
_SHORT = {"add": "plus", "subtract": "minus"}
_NUMPY = {
    **{f"_npi_{long}": f"broadcast_{short}" for long, short in _LONG.items()},
    **{f"_npi_{r}{a}_scalar": f"_{r}{_SHORT.get(a, b)}_scalar" for r in ("", "r") for a, b in _LONG.items()},
    **{f"_npi_{name}": name for name in ("negative", "exp", "log", "sqrt", "square", "tanh", "mean")},
    **{f"_np_{name}": name for name in ("sum", "max", "min", "transpose", "squeeze")},
    **{f"_npx_{name}": name for name in ("relu", "sigmoid")},
    **{"_npi_absolute": "abs", "_npi_concatenate": "Concat"},
    **{"_np_reshape": "Reshape", "_npx_reshape": "Reshape"},
}
_RENAMED = {("_npi_concatenate", "axis"): "dim"} | {(f"_{n}_reshape", "newshape"): "shape" for n in ("np", "npx")}


@dataclass(frozen=True, eq=False)
class Network:
    """A graph in the order of its computation, whose operator nodes all have ``operator`` set.

    data: variables without a shape. parameters: variables with a shape, including states. labels: variables that
    inference does not read. All are numbers of nodes, in MXNet's order. text: the JSON of the graph before fusion, from
    which MXNet infers shapes; ``Node.origin`` is a node's number in it.
    """

    graph: Graph
    data: tuple[int, ...]
    parameters: tuple[int, ...]
    labels: tuple[int, ...]
    states: frozenset[int]
    text: str

    @property
    def operators(self) -> list[tuple[int, Node]]:
        """The nodes that compute, with their numbers, in order."""
        return [(number, node) for number, node in enumerate(self.graph.nodes) if node.op != VARIABLE]

    @property
    def arguments(self) -> list[str]:
        """The names of the variables, without states: data, parameters and labels."""
        return [n.name for i, n in enumerate(self.graph.nodes) if n.op == VARIABLE and i not in self.states]

    @property
    def state_names(self) -> list[str]:
        """The names of the variables that MXNet counts as auxiliary states."""
        return [self.graph.nodes[number].name for number in sorted(self.states)]

    @property
    def outputs(self) -> list[int]:
        """The values that are the network's outputs."""
        return [head.node for head in self.graph.heads]

    def names(self, values: tuple[int, ...]) -> list[str]:
        """Return the names of variables."""
        return [self.graph.nodes[value].name for value in values]

    def shape(self, parameter: int) -> Shape:
        """Return the shape of a parameter."""
        return tuple(integers(self.graph.nodes[parameter].attrs[SHAPE]) or ())

    def infer(self, data: Sequence[Shape], images: int | None = None) -> dict[int, Shape]:
        """Return the shape of every value; raises GraphError, which names the node, if the data's shapes do not fit.

        data: the shapes of the data, in the network's order. images: replaces their first lengths, unless None.
        """
        if images is not None:
            data = [(images, *shape[1:]) for shape in data]
        origins = (self.graph.nodes[number].origin for number in self.data)
        of_origins = _inferred(self.text, tuple(zip(origins, map(tuple, data))))
        shapes = {number: of_origins[node.origin] for number, node in enumerate(self.graph.nodes)}
        for number, node in self.operators:
            try:
                node.operator.check_shapes([shapes[entry.node] for entry in node.inputs], shapes[number])
            except Unsupported as error:
                raise GraphError(f"{_WHERE}: {described(node)}: {error}") from None
        return shapes

    def fused(self) -> Network:
        """Return the network with normalizations, additions and activations fused into the nodes before them."""
        return of_graph(_fusion.fused(self.graph), self.text)

    def fused_for_training(self) -> Network:
        """Return the network with the same numbers of nodes, fused as training allows: see ``_fusion``."""
        return replace(self, graph=_fusion.fused_for_training(self.graph))

    @property
    def is_random(self) -> bool:
        """Whether training draws random numbers."""
        return any(isinstance(node.operator, _shaping.Dropout) for _, node in self.operators)

    @property
    def reads_gradient(self) -> list[bool]:
        """For each output, whether the backward pass reads the gradient to it; that of a loss is not read."""
        nodes = self.graph.nodes
        return [nodes[value].op == VARIABLE or not nodes[value].operator.is_loss for value in self.outputs]

    def check_gradients(self, several: bool) -> None:
        """Raise GraphError, which names the nodes, if operators lack a gradient, with ``several`` on several GPUs."""
        problems = []
        for _, node in self.operators:
            try:
                node.operator.check_gradient(several)
            except Unsupported as error:
                problems.append(f"{described(node)}: {error}")
        if problems:
            raise GraphError(
                f"for_training: expected operators with a gradient, got {len(problems)} without: {'; '.join(problems)}"
            )


def described(node: Node) -> str:
    """Return the node's name and op, for error messages."""
    return f"{node.name!r} ({node.type})"


def named_inputs(node: Node) -> list[tuple[str, int]]:
    """Return the name and the value of each input of a node."""
    names = node.operator.input_names(len(node.inputs))
    return [(name, entry.node) for name, entry in zip(names, node.inputs)]


def read_values(node: Node) -> list[int]:
    """Return the values that a node reads at inference."""
    return [value for name, value in named_inputs(node) if name not in node.operator.ignored]


def operator_of(op: str, attrs: Mapping[str, str]) -> Operator:
    """Return the operator of a node's op and attributes; raises Unsupported, which names the attribute."""
    name = _NUMPY.get(op, op)
    if op == "_contrib_AdaptiveAvgPooling2D" and attrs.get("output_size", "").strip("()[], ") in ("", "1", "1, 1"):
        return _layers.Pooling("Pooling", pool_type="avg", global_pool=True)
    if name not in OPERATORS:
        raise Unsupported("unsupported operator")
    no_axes = attrs.get("axis", "None").strip("()[] ") in ("None", "")
    if name != op and name in ("mean", "sum", "max", "min", "Concat") and no_axes:
        raise Unsupported("axis: expected axes, got none, for which mx.np and mx.nd return different results")
    return OPERATORS[name].read(name, {_RENAMED.get((op, key), key): text for key, text in attrs.items()})


@lru_cache(maxsize=2 * _CACHED)
def splits(network: Network, data: tuple[Shape, ...]) -> bool:
    """Return whether images are computed independently, and are the first axis of all outputs and data of these shapes.

    The function compares all shapes with those for one image more: every value that depends on the data must be larger
    by one in its first axis and equal in the others.
    """
    if not data or not all(data):
        return False
    (count, *others) = {shape[0] for shape in data}
    if others:
        return False
    try:
        here, there = network.infer(data), network.infer(data, count + 1)
    except GraphError:
        return False
    depending = set(network.data)
    for number, node in network.operators:
        values = read_values(node)
        if depending.isdisjoint(values):
            continue
        old, new, first = here[number], there[number], here[values[0]]
        # Which element of a parameter slice_like gives to an image depends on the images before it.
        mixed = node.operator.mixes_images(len(first)) or (node.operator.moves and first[:1] != old[:1])
        if old[:1] != (count,) or new != (count + 1, *old[1:]) or mixed:
            return False
        depending.add(number)
    return all(value in depending for value in network.outputs)


@lru_cache(maxsize=_CACHED)
def parse(text: str) -> Network:
    """Return the network in a graph's JSON; raises GraphError, which says what is unsupported in which node."""
    graph = Graph.parse(text, _WHERE).ordered()
    for number, node in enumerate(graph.nodes):
        node.origin = number
    text, problems = _text(graph), []
    for node in graph.nodes:
        if node.op == VARIABLE:
            continue
        try:
            node.operator = operator_of(node.type, node.attrs)
            node.operator.input_names(len(node.inputs))
        except Unsupported as error:
            problems.append(f"{described(node)}: {error}")
    readers, others = [(node.name, node.inputs) for node in graph.nodes], dict[Entry, Entry]()
    for reader, entries in [*readers, ("the network", graph.heads)]:
        for place, entry in enumerate(entries):
            node = graph.nodes[entry.node]
            if entry.output and isinstance(node.operator, _shaping.Slice):
                if entry not in others:
                    others[entry] = Entry(len(graph.nodes))
                    graph.nodes.append(replace(node, operator=replace(node.operator, index=entry.output)))
                entries[place] = others[entry]
            elif entry.output and node.operator:
                problems.append(f"{described(node)}: {reader} uses output {entry.output}, only output 0 is supported")
    if problems:
        raise GraphError(
            f"{_WHERE}: expected nodes that gpu_network supports, got {len(problems)} that it does not: "
            f"{'; '.join(problems)}. Change them, or let MXNet compute them between separate gpu_network nodes"
        )
    names = [node.name for node in graph.nodes if node.op == VARIABLE]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise GraphError(f"{_WHERE}: expected variables of different names, got several named {', '.join(twice)}")
    return of_graph(graph.ordered(), text)


def of_graph(graph: Graph, text: str) -> Network:
    """Return the network of a graph whose nodes have operators; ``text`` as in Network."""
    read = {head.node for head in graph.heads}
    states: set[int] = set()
    for node in graph.nodes:
        if node.op != VARIABLE:
            read.update(read_values(node))
            states.update(value for name, value in named_inputs(node) if name in node.operator.auxiliary)
    variables = [number for number, node in enumerate(graph.nodes) if node.op == VARIABLE]
    with_shape = {number for number in variables if SHAPE in graph.nodes[number].attrs}
    return Network(
        graph,
        data=tuple(n for n in variables if n in read and n not in with_shape),
        parameters=tuple(n for n in variables if n in read and n in with_shape),
        labels=tuple(n for n in variables if n not in read),
        states=frozenset(states),
        text=text,
    )


def _text(graph: Graph) -> str:
    """Return the graph as JSON of MXNet 1.9.1, with each node's first output as an output of the graph.

    Variables are renamed: MXNet's shape inference takes their names as keywords, which could clash with its arguments.
    """
    nodes = [replace(n, name=f"value{i}") if n.op == VARIABLE else n for i, n in enumerate(graph.nodes)]
    heads = [Entry(number) for number in range(len(nodes))]
    return replace(graph, nodes=nodes, heads=heads, attrs={"mxnet_version": ["int", 10901]}).dump(indent=None)


@lru_cache(maxsize=4 * _CACHED)
def _inferred(text: str, data: tuple[tuple[int, Shape], ...]) -> list[Shape]:
    """Return the shapes that MXNet infers for all nodes of a graph; data: the numbers and shapes of the data."""

    def infer() -> list[Shape]:
        import mxnet as mx

        got = ", ".join(str(shape) for _, shape in data)
        try:
            # By default, MXNet's older operators read a length of 0 and a shape () as unknown; np_shape makes them
            # known. Not infer_shape, which prints its arguments on failure.
            with mx.util.np_shape(True):
                _, shapes, _ = _symbol(text)._infer_shape_impl(False, **{f"value{n}": shape for n, shape in data})
        except mx.MXNetError as error:
            reason = f"expected data that fit, got shape {got}, for which MXNet says: {sentence_of(error)}"
            raise GraphError(f"{_WHERE}: {reason}") from None
        if shapes is None:
            raise GraphError(f"{_WHERE}: expected the shapes of all data and labels, got {got}; give all of them")
        return [tuple(shape) for shape in shapes]

    # In another thread: MXNet keeps a function's results in memory per thread, and the caller may itself be inside an
    # MXNet shape inference.
    return run_in_other_thread(infer)


@lru_cache(maxsize=_CACHED)
def _symbol(text: str) -> Any:
    """Return MXNet's symbol of a graph."""
    import mxnet as mx

    with mx.util.np_shape(False):  # otherwise a parameter's shape () is read as not known
        return mx.sym.load_json(text)
