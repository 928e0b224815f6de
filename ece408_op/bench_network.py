"""How long the course's networks take on the GPU as one node each, beside PyTorch in the same run.

    python -m ece408_op.bench_network [--images N] [--repeats N] [--no-compile] [--json FILE]

Prints a table to stdout, median milliseconds for all images in one call, float32 (TF32 off):
images on the GPU already, ours by impl auto and cudnn, PyTorch eager and by torch.compile; and from and to
ordinary memory of the computer: ours an executor of MXNet's, PyTorch eager from pageable and from pinned memory.
Predictions of all images are compared with those of MXNet's own operators on the CPU.
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

from . import cuda, mxnet_import
from .data import load_test
from .data.atomic import replacing
from .errors import DeviceError
from .models import files, shapes

#: Networks of the three architectures, and of the other two sets of weights, whose predictions alone are compared.
TIMED, COMPARED = ("ece408-high", "ece408-2018sp", "ece408-2018fa"), ("baseline", "ece408-low")


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


class _Ours:
    """A network by gpu_network, bound by MXNet; and its engine, for images that are on the GPU."""

    def __init__(self, network: Any, images: np.ndarray, impl: str) -> None:
        import mxnet as mx

        from .network.door import gpu_network
        from .network.engine import engine

        symbol, params, states = gpu_network(network.symbol, network.arg_params, network.aux_params, impl=impl)
        labels = {n: mx.nd.zeros(len(images)) for n in symbol.list_arguments() if n not in (*params, "data")}
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

    def there(self, images: Any) -> Any:
        """From images on the GPU to scores there; nothing is waited for."""
        return self.engine.compute([images])[0]


def torch_network(network: Any) -> Any:
    """The same layers as a PyTorch module on the GPU."""
    import torch

    from .network.door import gpu_network
    from .network.graph import parse

    symbol, params, _ = gpu_network(network.symbol, network.arg_params)
    (attributes,) = symbol.attr_dict().values()
    parsed = parse(attributes["graph"])
    names = {v.value: v.name for v in parsed.parameters}
    weights = {v: torch.from_numpy(params[n].asnumpy().astype("float32")).cuda() for v, n in names.items()}

    class Network(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            for node in parsed.nodes:
                kind, settings = node.kind.names[0], node.settings
                given = [weights[value] for value in node.inputs[1:] if value in weights]
                if kind in ("Convolution", "New"):
                    x = torch.nn.functional.conv2d(x, *given)
                elif kind == "FullyConnected":
                    x = torch.nn.functional.linear(x, *given)
                elif kind == "Activation":
                    x = getattr(torch, settings)(x)
                elif kind == "Pooling":
                    x = torch.nn.functional.max_pool2d(x, settings.kernel, settings.stride)
                elif kind == "Flatten":
                    x = x.flatten(1)
                elif kind == "SoftmaxOutput":
                    x = x.softmax(1)
                else:
                    raise AssertionError(kind)
            return x

    return Network()


def measure(name: str, count: int, repeats: int, compiled: bool, folder: str | None) -> dict[str, Any]:
    """One network's row: milliseconds by way, and how many predictions agree with MXNet's on the CPU."""
    import mxnet as mx

    from . import inference

    found = files.find(name)
    images, _, _ = load_test(shapes.info(found).image[1], count, folder)
    network = inference.built_in(found)
    expected = inference.predict(network, images, mx.cpu())
    cp = cuda.cupy()
    here = cp.asarray(images)
    row: dict[str, Any] = {"network": name}
    for impl in ("auto", "cudnn"):
        ours = _Ours(network, images, impl)
        row[f"agreeing, {impl}"] = int((ours.forward().asnumpy().argmax(axis=1) == expected).sum())
        if name in TIMED:
            row[f"gpu, {impl}"] = median(lambda ours=ours: ours.there(here), cp.cuda.Device().synchronize, repeats)  # type: ignore[misc]
            row[f"memory, {impl}"] = median(ours.forward, lambda: None, repeats)
        del ours
    if name in TIMED:
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
    wait, nothing = torch.cuda.synchronize, (lambda: None)
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
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for row in rows:
        cells = [f"{v:.2f}" if isinstance(v, float) else str(v) for v in (row.get(key, "") for key in columns)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ece408_op.bench_network", description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=10_000, help="images in one call (default 10000)")
    parser.add_argument("--repeats", type=int, default=20, help="calls measured, the median counts (default 20)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--data", metavar="FOLDER", help="folder with the Fashion-MNIST files")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to FILE as well")
    options = parser.parse_args()
    os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")
    # MXNet's fusing of convolution and tanh on the CPU is slow, and its predictions are the same.
    os.environ.setdefault("MXNET_SUBGRAPH_BACKEND", "NONE")
    try:
        chip = cuda.chip()
        mx = mxnet_import.load()
        rows = [
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
    sys.exit(main())
