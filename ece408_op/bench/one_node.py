"""How long the course's networks take on the GPU as one node each, beside PyTorch in the same run.

    python -m ece408_op.bench.one_node [--images N] [--repeats N] [--no-compile] [--json FILE]

Prints a table to stdout, median milliseconds for all images in one call, float32 (TF32 off):
images on the GPU already, ours by impl auto and cudnn, PyTorch eager and by torch.compile; and from and to
ordinary memory of the computer: ours an executor of MXNet's, PyTorch eager from pageable and from pinned memory.
Predictions of all images are compared with those of MXNet's own operators on the CPU. Gluon's resnet18_v1 follows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.data import load_test
from ece408_op.data.atomic import folder_problem, replacing
from ece408_op.errors import DeviceError
from ece408_op.models import files, shapes
from ece408_op.plugin import mxnet_import
from ece408_op.runtime import cuda

#: Networks of the three architectures, and of the other two sets of weights, whose predictions alone are compared.
TIMED, COMPARED = ("ece408-high", "ece408-2018sp", "ece408-2018fa"), ("baseline", "ece408-low")


#: Images of Gluon's resnet18_v1.
RESNET_IMAGES = 256


def median(call: Callable[[], Any], finish: Callable[[], Any], repeats: int) -> float:
    """The median milliseconds from the call's beginning until ``finish`` has waited for its end; three warm up."""
    times = []
    for repeat in range(repeats + 3):
        start = time.perf_counter()
        kept = call()
        finish()
        if repeat >= 3:
            times.append(1000 * (time.perf_counter() - start))
        del kept
    return statistics.median(times)


def _wait() -> None:
    """Wait for CuPy's current stream, which is PyTorch's too: the default one."""
    cuda.wait("the network", cuda.cupy().cuda.get_current_stream())


class _Ours:
    """A network by gpu_network, bound by MXNet; and its engine, for images that are on the GPU."""

    def __init__(self, network: Any, images: np.ndarray, impl: str) -> None:
        import mxnet as mx

        from ece408_op.network.api import gpu_network
        from ece408_op.network.engine import engine

        symbol, params, states = gpu_network(network.symbol, network.arg_params, network.aux_params, impl=impl)
        labels = {n: mx.nd.zeros(len(images)) for n in symbol.list_arguments() if n not in {*params, "data"}}
        given = {n: array.astype("float32") for n, array in params.items()}
        self.executor = symbol.bind(
            mx.cpu(), {"data": mx.nd.array(images), **labels, **given}, aux_states=states, grad_req="null"
        )
        (attributes,) = symbol.attr_dict().values()
        self.engine = engine(attributes["graph"], impl, "float32", 0)

    def forward(self) -> Any:
        """From MXNet's memory to MXNet's memory."""
        (output,) = self.executor.forward(is_train=False)
        output.wait_to_read()
        return output

    def layers(self, images: Any) -> dict[str, float]:
        """Median milliseconds of each node by itself, images on the GPU; an activation is its node's."""
        calls = self.engine.calls([images])
        return {name: cuda.median_milliseconds(call, name) for name, call in calls.items()}

    def there(self, images: Any) -> Any:
        """From images on the GPU to scores there; nothing is waited for."""
        return self.engine.compute([images])[0]


def torch_network(network: Any) -> Any:
    """The same layers as a PyTorch module on the GPU."""
    import torch

    from ece408_op.network.api import gpu_network
    from ece408_op.network.graph import parse

    symbol, params, states = gpu_network(network.symbol, network.arg_params, network.aux_params)
    params = {**params, **states}
    (attributes,) = symbol.attr_dict().values()
    parsed = parse(attributes["graph"])
    names = {v.value: v.name for v in parsed.parameters}
    weights = {v: torch.from_numpy(params[n].asnumpy().astype("float32")).cuda() for v, n in names.items()}

    class Network(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            values = {**weights, parsed.data[0].value: x}
            for node in parsed.nodes:
                given = [values[value] for value in node.inputs if value in values]
                values[node.output] = _torch_node(torch, node, *given)
            return values[parsed.outputs[0][1]]

    return Network()


def _torch_node(torch: Any, node: Any, x: Any, *more: Any) -> Any:
    kind, settings, nn = node.kind.names[0], node.settings, torch.nn.functional
    if kind in ("Convolution", "New"):
        return nn.conv2d(x, *more, stride=settings.stride, padding=settings.pad, groups=settings.groups)
    if kind == "BatchNorm":
        gamma, beta, mean, variance = more
        return nn.batch_norm(x, mean, variance, None if settings.fixed else gamma, beta, eps=settings.eps)
    if kind == "FullyConnected":
        return nn.linear(x.flatten(1), *more)
    if kind == "Activation":
        return getattr(torch, settings)(x)
    if kind == "Pooling" and settings.whole:
        return x.mean((2, 3), keepdim=True)
    if kind == "Pooling":
        return nn.max_pool2d(x, settings.kernel, settings.stride, settings.pad)
    if kind == "elemwise_add":
        return x + more[0]
    return x.softmax(1) if kind == "SoftmaxOutput" else x.flatten(1)


def resnet(images: int, repeats: int, compiled: bool) -> dict[str, Any]:
    """The row of Gluon's resnet18_v1 with seeded random weights, on random images of 224 x 224."""
    import mxnet as mx

    from ece408_op.models import inference

    mx.random.seed(11)
    block = mx.gluon.model_zoo.vision.resnet18_v1()
    block.initialize(mx.init.Xavier(magnitude=2))
    x = np.random.RandomState(5).uniform(-1, 1, (images, 3, 224, 224)).astype(np.float32)
    block(mx.nd.array(x[:1])).wait_to_read()
    symbol = block(mx.sym.Variable("data"))
    params = {name: parameter.data() for name, parameter in block.collect_params().items()}
    states = {name: params[name] for name in symbol.list_auxiliary_states()}
    arguments = {name: params[name] for name in symbol.list_arguments() if name != "data"}
    network = inference.Loaded(symbol, arguments, states)
    expected = inference.predict(network, x, mx.cpu())
    return _row(f"resnet18_v1, {images} images", network, x, expected, repeats, compiled)


def measure(name: str, count: int, repeats: int, compiled: bool, folder: str | None) -> dict[str, Any]:
    """One network's row: milliseconds by way, and how many predictions agree with MXNet's on the CPU."""
    import mxnet as mx

    from ece408_op.models import inference

    found = files.find(name)
    images, _, _ = load_test(shapes.info(found).image[1], count, folder)
    network = inference.built_in(found)
    expected = inference.predict(network, images, mx.cpu())
    return _row(name, network, images, expected, repeats if name in TIMED else 0, compiled)


def _row(name: str, network: Any, images: np.ndarray, expected: np.ndarray, repeats: int, compiled: bool) -> Any:
    here = cuda.cupy().asarray(images)
    row: dict[str, Any] = {"network": name}
    for impl in ("auto", "cudnn"):
        ours = _Ours(network, images, impl)
        row[f"agreeing, {impl}"] = int((ours.forward().asnumpy().argmax(axis=1) == expected).sum())
        if repeats:
            row[f"gpu, {impl}"] = median(lambda ours=ours: ours.there(here), _wait, repeats)  # type: ignore[misc]
            row[f"memory, {impl}"] = median(ours.forward, lambda: None, repeats)
        if repeats and impl == "auto":
            row["layers"] = ours.layers(here)
        del ours
    if repeats:
        row.update(_torch(network, images, repeats, compiled))
    return row


def _torch(network: Any, images: np.ndarray, repeats: int, compiled: bool) -> dict[str, float]:
    try:
        import torch
    except ImportError:
        return {}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    model = torch_network(network)
    pageable = torch.from_numpy(images)
    here, pinned = pageable.cuda(), pageable.pin_memory()
    wait, nothing = _wait, (lambda: None)
    row = {}
    with torch.inference_mode():
        row["gpu, eager"] = median(lambda: model(here), wait, repeats)
        row["memory, eager pageable"] = median(lambda: model(pageable.cuda()).cpu(), nothing, repeats)
        row["memory, eager pinned"] = median(lambda: model(pinned.cuda(non_blocking=True)).cpu(), nothing, repeats)
        if compiled:
            fast = torch.compile(model)
            row["gpu, compile"] = median(lambda: fast(here), wait, repeats)
    torch.cuda.empty_cache()
    return row


def as_table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "layers"]
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for row in rows:
        cells = [f"{v:.2f}" if isinstance(v, float) else str(v) for v in (row.get(key, "") for key in columns)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_EPILOG = """\
example:
  python -m ece408_op.bench.one_node --images 1000 --repeats 5 --json network.json

exit codes: 0 done, 2 usage, 3 this machine can't (no GPU, no MXNet)"""


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ece408_op.bench.one_node",
        description=__doc__.splitlines()[0],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--images", type=int, default=10_000, help="images in one call (default 10000)")
    parser.add_argument("--repeats", type=int, default=20, help="calls measured, the median counts (default 20)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--data", metavar="FOLDER", help="folder with the Fashion-MNIST files")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to FILE as well")
    options = parser.parse_args()
    problem = folder_problem(options.json)
    if problem:
        parser.error(f"--json: {problem}")
    os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")
    # MXNet's fusing of convolution and tanh on the CPU is slow, and its predictions are the same.
    os.environ.setdefault("MXNET_SUBGRAPH_BACKEND", "NONE")
    try:
        chip = cuda.chip()
        mx = mxnet_import.load()
        rows = [resnet(RESNET_IMAGES, options.repeats, not options.no_compile)] + [
            measure(name, options.images, options.repeats, not options.no_compile, options.data)
            for name in (*TIMED, *COMPARED)
        ]
    except DeviceError as error:
        print(f"bench_network: {error}", file=sys.stderr)
        return 3
    cp = cuda.cupy()
    print(
        f"{options.images} images, {chip.name}, Python {platform.python_version()}, NumPy {np.__version__}, "
        f"MXNet {mx.__version__}, CuPy {cp.__version__}, CUDA {cp.cuda.runtime.runtimeGetVersion()}{_torchs()}; "
        f"milliseconds, median of {options.repeats}\n"
    )
    print(as_table(rows))
    for row in rows:
        if "layers" in row:
            print(f"\n{row['network']}, impl auto, milliseconds of each layer by itself:", end=" ")
            print(", ".join(f"{name} {time:.3f}" for name, time in row["layers"].items()))
    if options.json is not None:
        with replacing(options.json) as file:
            file.write((json.dumps(rows, indent=2) + "\n").encode())
    return 0


def _torchs() -> str:
    try:
        import torch
    except ImportError:
        return ""
    return f", PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"


if __name__ == "__main__":
    from ece408_op import commands

    sys.exit(commands.guard("ece408_op.bench.one_node", main))
