"""A small network like the course's, as the files of three generations of MXNet, and its weights."""

import json

import numpy as np

import ece408_op  # noqa: F401 (MXNet imports after it)

IMAGES, CHANNELS, SIDE, FILTERS, KERNEL, HIDDEN, CLASSES = 5, 2, 11, 6, 3, 7, 4
POOLED = (SIDE - KERNEL + 1 + 1) // 2

#: Name, op, attributes and the names of the inputs, in the order in which MXNet writes them.
NEW = {"kernel": f"({KERNEL}, {KERNEL})", "num_filter": str(FILTERS)}
POOL = {"kernel": "(2, 2)", "pool_type": "max", "stride": "(2, 2)", "pooling_convention": "full"}
FULL = {"num_hidden": str(HIDDEN)}
LAYERS = [
    ("data", "null", {}, ()),
    ("new0_weight", "null", NEW, ()),
    ("new0", "New", NEW, ("data", "new0_weight")),
    ("activation0", "Activation", {"act_type": "tanh"}, ("new0",)),
    ("pooling0", "Pooling", POOL, ("activation0",)),
    ("flatten0", "Flatten", {}, ("pooling0",)),
    ("fullyconnected0_weight", "null", FULL, ()),
    ("fullyconnected0_bias", "null", FULL, ()),
    ("fullyconnected0", "FullyConnected", FULL, ("flatten0", "fullyconnected0_weight", "fullyconnected0_bias")),
    ("softmax_label", "null", {}, ()),
    ("softmax", "SoftmaxOutput", {}, ("fullyconnected0", "softmax_label")),
]
SPELLINGS = ("param", "attr", "attrs")


def original(spelling="attr"):
    """Return the symbol file as a dictionary: "param" as before 0.9, "attr" as of 0.11, "attrs" as of 1.3."""
    oldest = spelling == "param"
    index = {name: number for number, (name, *_) in enumerate(LAYERS)}
    entry = lambda name: [index[name], 0] if oldest else [index[name], 0, 0]  # noqa: E731
    nodes = []
    for name, op, attributes, inputs in LAYERS:
        node = {"op": op, "name": name, "inputs": [entry(source) for source in inputs]}
        if oldest:
            node.update(param=attributes if op != "null" else {}, backward_source_id=-1)
        elif attributes:
            node[spelling] = attributes
        nodes.append(node)
    variables = [index[name] for name, op, *_ in LAYERS if op == "null"]
    graph = {"nodes": nodes, "arg_nodes": variables, "heads": [entry("softmax")]}
    if oldest:
        nodes[index["new0_weight"]]["attr"] = {"lr_mult": "2"}
    else:
        graph["node_row_ptr"] = list(range(len(nodes) + 1))
        graph["attrs"] = {"mxnet_version": ["int", 1100 if spelling == "attr" else 10301]}
    return json.loads(json.dumps(graph))


def built_in():
    """Return the same network with MXNet's own Convolution, as MXNet 1.9.1 builds it."""
    import mxnet as mx

    x = mx.sym.Convolution(mx.sym.var("data"), no_bias=True, name="convolution0", **NEW)
    x = mx.sym.Pooling(mx.sym.Activation(x, act_type="tanh", name="activation0"), name="pooling0", **POOL)
    x = mx.sym.FullyConnected(mx.sym.Flatten(x, name="flatten0"), name="fullyconnected0", **FULL)
    return mx.sym.SoftmaxOutput(x, name="softmax")


def weights(layer="new0", seed=0):
    """Return the parameters as NumPy arrays; the convolution's are integers, so that its float32 sums are exact."""
    stream = np.random.RandomState(seed)
    return {
        f"{layer}_weight": stream.randint(-8, 9, (FILTERS, CHANNELS, KERNEL, KERNEL)).astype(np.float32),
        "fullyconnected0_weight": stream.normal(size=(HIDDEN, FILTERS * POOLED**2)).astype(np.float32),
        "fullyconnected0_bias": stream.normal(size=HIDDEN).astype(np.float32),
    }


def images(seed=1):
    """Return images of zeros and ones, (IMAGES, CHANNELS, SIDE, SIDE), so small that tanh does not saturate."""
    return np.random.RandomState(seed).randint(0, 2, (IMAGES, CHANNELS, SIDE, SIDE)).astype(np.float32)


def ndarrays(arrays):
    """Return NumPy arrays as NDArrays."""
    import mxnet as mx

    return {name: mx.nd.array(array, dtype=array.dtype) for name, array in arrays.items()}


def nodes_of(symbol):
    """Return the nodes of a symbol by name."""
    return {node["name"]: node for node in json.loads(symbol.tojson(remove_amp_cast=False))["nodes"]}


def write(folder, graph, arrays, name="net", epoch=1):
    """Write both files, as mx.model.save_checkpoint names them; return the prefix."""
    import mxnet as mx

    text = graph if isinstance(graph, str) else json.dumps(graph)
    (folder / f"{name}-symbol.json").write_text(text, encoding="utf-8")
    mx.nd.save(str(folder / f"{name}-{epoch:04d}.params"), {f"arg:{k}": v for k, v in ndarrays(arrays).items()})
    return str(folder / name)


def run(symbol, arg_params, data, aux_params=None):
    """Return a Module's outputs for one batch, as NumPy arrays."""
    import mxnet as mx

    labels = [name for name in symbol.list_arguments() if name.endswith("label")]
    module = mx.mod.Module(symbol, label_names=labels)
    module.bind([("data", data.shape)], [(name, data.shape[:1]) for name in labels], for_training=False)
    module.set_params(arg_params, aux_params or {})
    module.forward(mx.io.DataBatch([mx.nd.array(data)]), is_train=False)
    return [output.asnumpy() for output in module.get_outputs()]
