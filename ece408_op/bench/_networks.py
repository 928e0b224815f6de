"""Whole networks, from images to class probabilities: the operator, gpu_network, MXNet's own operators, PyTorch.

A network is bound once for all images. The kinds of call are "forward", from images in ordinary, pageable memory to
probabilities in a NumPy array; "gpu", from images on the GPU to probabilities on the GPU; and FIRST, the first forward,
which also compiles and causes the page faults.
"""

from __future__ import annotations

import gc
import json
import os
from ast import literal_eval
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ece408_op.core import timer
from ece408_op.core.dispatch import AUTO
from ece408_op.core.kernel import EPS32
from ece408_op.data import load_test
from ece408_op.errors import Ece408Error
from ece408_op.models import files, shapes
from ece408_op.runtime import cuda

from . import layers
from .results import FAILED, FIRST, PASSED, Case, Row

#: Networks by set: one of each architecture of the course, and image classifiers of Gluon's with random weights.
SETS = {
    "course": ("ece408-high", "ece408-2018sp", "ece408-2018fa"),
    "zoo": (
        *("resnet18_v1", "resnet50_v1", "vgg16", "inceptionv3"),
        *("densenet121", "alexnet", "mobilenetv2_1.0"),
    ),
}
#: The default numbers of images for the course's networks and for Gluon's.
IMAGES, GLUONS_IMAGES = 10_000, 128

#: The kinds of call.
FORWARD, ON_GPU = "forward", "gpu"

#: MXNet's setting that decides whether it fuses operators when it binds a graph.
_SETTING = "MXNET_SUBGRAPH_BACKEND"


def case(name: str, images: int | None, device: str, repeats: int, seed: int) -> Case:
    """Time all contestants on one network; ``device`` computes the convolutions of ``New``.

    On "gpu", gpu_network and PyTorch are contestants too. A row of ``New`` or gpu_network fails if a prediction differs
    from that of MXNet's own operators, or if an output is off by more than the bound. The other rows never fail; they
    only report how many predictions agree.
    """
    from ece408_op.models import inference

    os.environ.pop(_SETTING, None)  # MXNet's default
    own = name in files.list_names()
    built_in, pixels, _ = given(name, images, seed)
    rows: list[Row] = []
    expected = _bound(built_in, pixels)[FORWARD]()
    # A sum of n products has an error of at most n u, and the layers' errors add up (Higham, Accuracy and Stability of
    # Numerical Algorithms, 3.1).
    weights = (array.shape for name, array in built_in.arg_params.items() if name.endswith("weight"))
    bound = EPS32 * sum(prod(shape[1:]) for shape in weights)

    def add(contestant: str, impl: str, calls: dict[str, Callable[[], Any]]) -> None:
        rows.extend(_rows(contestant, impl, calls, expected, bound, repeats))

    # On a GPU, the peers of Gluon's networks are on the GPU too; MXNet on the CPU would take minutes.
    if own or device == "cpu":
        add("MXNet, default", "", _bound(built_in, pixels))
        os.environ[_SETTING] = "NONE"
        try:
            add("MXNet, NONE", "", _bound(built_in, pixels))
        finally:
            del os.environ[_SETTING]
    for contestant, fuse in {"New": False, "New fused": True}.items() if own else ():
        loaded = inference.with_operator(files.find(name), AUTO, device, fuse=fuse)
        add(contestant, AUTO, _bound(loaded, pixels))
    if device == "gpu":
        # On image classifiers, PyTorch already times cuDNN.
        for impl in (AUTO, "cudnn") if own else (AUTO,):
            try:
                add(f"gpu_network {impl}", impl, _gpu_network(built_in, pixels, impl))
            except Ece408Error as error:
                rows.append(Row(f"gpu_network {impl}", FORWARD, status="skipped", reason=str(error), impl=impl))
        gpus = cuda.cupy().cuda.runtime.getDeviceCount()
        if gpus > 1:
            # No variable may refer to the network here: PyTorch needs its memory.
            called = f"gpu_network {AUTO}, {gpus} GPUs"
            add(called, AUTO, {FORWARD: _executed(inference.on_gpu(built_in, AUTO, device_ids=range(gpus)), pixels)})
        free_gpu()
        for contestant, calls in _pytorch(built_in, pixels):
            add(contestant, "", calls)
    return Case(name, len(pixels), tuple(rows))


def free_gpu() -> None:
    """Free the GPU memory of earlier contestants, so that the next contestant can use it, even if it is PyTorch."""
    from ece408_op.network import engine

    gc.collect()
    engine.clear()
    cuda.cupy().get_default_memory_pool().free_all_blocks()


def _rows(
    contestant: str,
    impl: str,
    calls: dict[str, Callable[[], Any]],
    expected: np.ndarray,
    bound: float,
    repeats: int,
) -> Iterator[Row]:
    """Yield the rows of a contestant's calls, which return scores (N, classes); the first kind is "forward"."""
    for kind, call in calls.items():
        first, output = timer.cpu_clock(call)
        scores = _numpy(output)
        agreeing = int((scores.argmax(axis=1) == expected.argmax(axis=1)).sum())
        error = float(abs(scores - expected).max() / abs(expected).max())
        wrong = bool(impl) and (agreeing < len(expected) or not error <= bound)
        got = f"{agreeing} of {len(expected)} predictions are MXNet's, the error is {error:.2g}, allowed {bound:.2g}"
        status, reason = (FAILED, got) if wrong else (PASSED, "")
        if kind == FORWARD and not wrong:
            yield Row(contestant, FIRST, (first,), impl=impl)
        seconds = () if wrong else timer.measure(call, timer.cpu_clock, repeats=repeats).seconds
        details = {"agreeing": agreeing}
        yield Row(contestant, kind, seconds, status, reason, impl, error=error, bound=bound, details=details)


def _bound(network: Any, pixels: np.ndarray) -> dict[str, Callable[[], Any]]:
    import mxnet as mx

    from ece408_op.models import inference

    forward, data = inference.bound(network, pixels.shape, mx.cpu()), mx.nd.array(pixels)
    data.wait_to_read()
    return {FORWARD: lambda: forward(data=data).asnumpy()}


def given(name: str, images: int | None, seed: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return a network by its name, images (N, C, H, W) and labels (N,), float32.

    Images and labels come from a data set for the networks of models/; for Gluon's, which have random weights, they are
    random.
    """
    from ece408_op.models import inference

    if name in files.list_names():
        pixels, labels, _ = load_test(shapes.info(name).image[1], images or IMAGES)
        return inference.built_in(files.find(name)), pixels, labels.astype(np.float32)
    network, image = gluons(name, seed)
    stream, images = np.random.RandomState(seed), images or GLUONS_IMAGES
    pixels = stream.uniform(-1, 1, (images, *image)).astype(np.float32)
    return network, pixels, stream.randint(0, 1000, images).astype(np.float32)


def gluons(name: str, seed: int) -> tuple[Any, tuple[int, int, int]]:
    """Return a network of Gluon's model zoo with seeded random weights, and the shape of an image.

    Raises ValueError, with all names, for an unknown name.
    """
    import mxnet as mx

    from ece408_op.models import inference

    mx.random.seed(seed)
    side = 299 if name.startswith("inception") else 224
    block = mx.gluon.model_zoo.vision.get_model(name)
    block.initialize(mx.init.Xavier(magnitude=2))
    block(mx.nd.zeros((1, 3, side, side))).wait_to_read()
    symbol = block(mx.sym.Variable("data"))
    values = {name: parameter.data() for name, parameter in block.collect_params().items()}
    states = {name: values.pop(name) for name in symbol.list_auxiliary_states()}
    return inference.Loaded(symbol, values, states), (3, side, side)


def _gpu_network(network: Any, pixels: np.ndarray, impl: str) -> dict[str, Callable[[], Any]]:
    """Return calls of gpu_network: its node bound by MXNet, and its engine for images that are on the GPU."""
    from ece408_op.models import inference
    from ece408_op.network.engine import engine

    loaded = inference.on_gpu(network, impl)
    (attributes,) = loaded.symbol.attr_dict().values()
    own, here = engine(attributes["graph"], impl, "float32", 0), cuda.cupy().asarray(pixels)

    def on_gpu() -> Any:
        (scores, *_) = own.compute([here])
        _wait()
        return scores

    return {FORWARD: _executed(loaded, pixels), ON_GPU: on_gpu}


def _executed(network: Any, pixels: np.ndarray) -> Callable[[], Any]:
    """Return a forward pass of an executor whose data array has the images, so that no call copies them into it."""
    import mxnet as mx

    from ece408_op.models import inference

    forward = inference.bound(network, pixels.shape, mx.cpu())
    forward(data=mx.nd.array(pixels))
    return lambda: forward().asnumpy()  # type: ignore[no-any-return]


def _wait() -> None:
    """Wait for CuPy's current stream: the default stream, which PyTorch uses too."""
    cuda.wait("the network", cuda.cupy().cuda.get_current_stream())


def _numpy(scores: Any) -> np.ndarray:
    """Return scores, an array of NumPy, CuPy or PyTorch, as a NumPy array."""
    if isinstance(scores, np.ndarray):
        return scores
    return scores.get() if hasattr(scores, "get") else scores.cpu().numpy()


def _pytorch(network: Any, pixels: np.ndarray) -> Iterator[tuple[str, dict[str, Callable[[], Any]]]]:
    """Yield PyTorch's calls on the GPU, eager and compiled, in both layouts, float32 (TF32 off); none without a GPU.

    The first call compiles.
    """
    if not layers.pytorch_has_cuda():
        return
    torch = layers.pytorch()
    images = torch.from_numpy(pixels)

    def on_gpu(run: Callable[[Any], Any], here: Any) -> Any:
        with torch.inference_mode():
            scores = run(here)
        _wait()
        return scores

    def forward(run: Callable[[Any], Any], layout: Any) -> Any:
        with torch.inference_mode():
            return run(images.cuda().contiguous(memory_format=layout)).cpu().numpy()

    for name, layout in (("", torch.contiguous_format), (", channels last", torch.channels_last)):
        model, here = torch_module(network, "cuda", layout), images.cuda().contiguous(memory_format=layout)
        # Compiled versions of one function are limited in number, and the networks share it.
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        for setting, run in (("eager", model), ("compile", compiled)):
            calls: dict[str, Callable[[], Any]] = {FORWARD: partial(forward, run, layout)}
            yield f"PyTorch {setting}{name}", {**calls, ON_GPU: partial(on_gpu, run, here)}
    torch.cuda.empty_cache()


def torch_module(network: Any, device: str, layout: Any = None, training: bool = False) -> Any:
    """Return the network's symbol as a PyTorch module; ``layout`` is the memory format of its filters.

    training: batch normalization uses the batch's statistics, and the parameters in ``weights`` have gradients. Raises
    KeyError for an operator that the networks here do not have; the module's forward raises it for a LeakyReLU whose
    act_type is neither leaky nor prelu.
    """
    import torch

    weights = {}
    for name, array in {**network.arg_params, **network.aux_params}.items():
        weight = torch.from_numpy(array.asnumpy().astype("float32")).to(device)
        weights[name] = weight.contiguous(memory_format=layout) if layout and weight.ndim == 4 else weight
        weights[name].requires_grad_(training and name in network.arg_params)
    operators = _operators(torch, training)
    nodes = json.loads(network.symbol.tojson())["nodes"]
    # Parsed before the forward, so that torch.compile captures the forward as one graph.
    steps = [
        (
            None if node["op"] == "null" else operators[node["op"]],
            node["name"],
            _attributes(node),
            [source for source, *_ in node["inputs"]],
        )
        for node in nodes
    ]

    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weights = weights

        def forward(self, x: Any) -> Any:
            values: list[Any] = []
            for operator, name, attributes, sources in steps:
                if operator is None:
                    values.append(x if name == "data" else weights.get(name))
                else:
                    values.append(operator(attributes, *[values[source] for source in sources]))
            return values[-1]

    return Module()


def _attributes(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node's attributes as Python values; attributes that are words stay strings."""
    found = {}
    for key, word in node.get("attrs", {}).items():
        try:
            found[key] = literal_eval(word)
        except (ValueError, SyntaxError):
            found[key] = word
    return found


def _operators(torch: Any, training: bool) -> dict[str, Callable[..., Any]]:
    nn = torch.nn.functional

    def convolution(a: dict[str, Any], x: Any, w: Any, bias: Any = None) -> Any:
        window = a.get("stride", 1), a.get("pad", 0), a.get("dilate", 1)
        return nn.conv2d(x, w, bias, *window, a.get("num_group", 1))

    def batch_norm(a: dict[str, Any], x: Any, gamma: Any, beta: Any, mean: Any, variance: Any) -> Any:
        scale = None if a.get("fix_gamma", True) else gamma
        share = 1 - a.get("momentum", 0.9)
        return nn.batch_norm(x, mean, variance, scale, beta, training, share, a.get("eps", 1e-3))

    def pooling(a: dict[str, Any], x: Any) -> Any:
        if a.get("global_pool", False):
            return x.mean((2, 3), keepdim=True)
        window = a["kernel"], a.get("stride", 1), a.get("pad", 0)
        ceil = a.get("pooling_convention", "valid") == "full"
        if a.get("pool_type", "max") == "avg":
            return nn.avg_pool2d(x, *window, ceil, a.get("count_include_pad", True))
        return nn.max_pool2d(x, *window, ceil_mode=ceil)

    return {
        "Convolution": convolution,
        "BatchNorm": batch_norm,
        "Pooling": pooling,
        "Activation": lambda a, x: getattr(torch, a["act_type"])(x),
        "FullyConnected": lambda a, x, *more: nn.linear(x.flatten(1), *more),
        "Flatten": lambda a, x: x.flatten(1),
        "LeakyReLU": lambda a, x, *slopes: {"leaky": nn.leaky_relu, "prelu": nn.prelu}[a.get("act_type", "leaky")](
            x, *slopes or [a.get("slope", 0.25)]
        ),
        "sigmoid": lambda a, x: x.sigmoid(),
        "softmax": lambda a, x: x.softmax(a.get("axis", -1)),
        "elemwise_add": lambda a, x, y: x + y,
        "elemwise_mul": lambda a, x, y: x * y,
        "broadcast_mul": lambda a, x, y: x * y,
        "_plus_scalar": lambda a, x: x + a["scalar"],
        "_minus_scalar": lambda a, x: x - a["scalar"],
        "_mul_scalar": lambda a, x: x * a["scalar"],
        "_div_scalar": lambda a, x: x / a["scalar"],
        "Concat": lambda a, *arrays: torch.cat(arrays, a.get("dim", 1)),
        "Dropout": lambda a, x: nn.dropout(x, a.get("p", 0.5), training),
        "clip": lambda a, x: x.clamp(a["a_min"], a["a_max"]),
        "SoftmaxOutput": lambda a, x, label=None: x.softmax(1),
    }
