"""Training steps of whole networks: gpu_network with MXNet's optimiser, gpu_network with an optimiser on GPUs, PyTorch.

A step is the forward pass, the backward pass and the update of SGD with momentum; it ends when the parameters are
ready. The call "step" has the images in pageable memory, "gpu" on the GPU. The losses of the first steps are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from ece408_op.core import timer
from ece408_op.models import files
from ece408_op.runtime import cuda

from . import _networks, layers
from .results import FAILED, PASSED, Case, Row

#: The kinds of call.
STEP, ON_GPU = "step", "gpu"

#: At a rate of 0.01, two runs of PyTorch's own steps of ResNet-50 differ by 1.7e-3 in the third loss.
_RATE, _MOMENTUM, _DECAY = 1e-4, 0.9, 1e-4
#: The largest relative differences of the first steps' losses. Each step amplifies rounding errors: a last-bit change
#: of the weights changes PyTorch's own losses of ResNet-50 by 3e-7, 6e-4 and 6e-3.
_TOLERANCES = (1e-3, 1e-3, 1e-2)

#: A call that does one step and returns its loss, or a tensor with the loss.
Step = Callable[[], Any]


def case(name: str, images: int | None, repeats: int, gpus: int, seed: int) -> Case:
    """Time all contestants on one network, with ``images`` images in a step; they begin with the same parameters.

    gpus: the number of GPUs that share the images of one more contestant. A row fails if its losses differ from the
    first contestant's, unless the network has dropout, which makes losses random.
    """
    network, pixels, labels = _networks.given(name, images, seed)
    if name in files.list_names():  # up to the scores before softmax
        network = replace(network, symbol=network.symbol.get_children()[0])
    rows: list[Row] = []
    expected: list[float] = []
    random = "Dropout" in network.symbol.tojson()
    given = network, pixels, labels
    for contestant, kind, step in chain(_gpu_networks(*given, gpus), _pytorch(*given)):
        losses = [float(step()) for _ in _TOLERANCES]
        expected = expected or losses
        wrong = not random and not np.allclose(losses, expected, rtol=_TOLERANCES, atol=0)
        seconds = () if wrong else timer.measure(step, timer.cpu_clock, repeats=repeats).seconds
        status, reason = (FAILED, f"losses: expected {expected}, got {losses}") if wrong else (PASSED, "")
        rows.append(Row(contestant, kind, seconds, status, reason, details={"loss": losses[-1]}))
        del step
        _networks.free_gpu()
    return Case(name, len(pixels), tuple(rows))


def _gpu_networks(network: Any, pixels: np.ndarray, labels: np.ndarray, gpus: int) -> Iterator[tuple[str, str, Step]]:
    """Yield gpu_network's steps with an optimiser on the GPU and with MXNet's."""
    for rule, gradients in (("gpusgd", "gpu"), ("sgd", "cpu")):
        yield f"gpu_network {rule}", STEP, _gpu_network(network, pixels, labels, rule, gradients, 1)
    if gpus > 1:
        yield f"gpu_network gpusgd, {gpus} GPUs", STEP, _gpu_network(network, pixels, labels, "gpusgd", "gpu", gpus)


def _gpu_network(network: Any, pixels: np.ndarray, labels: np.ndarray, rule: str, gradients_in: str, gpus: int) -> Step:
    """Return a step of an executor whose data array has the images, and of the optimiser named ``rule``."""
    import mxnet as mx

    from ece408_op.network.api import gpu_network

    arguments = {key: value.astype("float32") for key, value in network.arg_params.items()}
    symbol = mx.sym.SoftmaxOutput(network.symbol, name="softmax")
    options: dict[str, Any] = {"for_training": True, "gradients": gradients_in, "device_ids": range(gpus)}
    node, arguments, states = gpu_network(symbol, arguments, network.aux_params, **options)
    arrays = {**arguments, "data": mx.nd.array(pixels), "softmax_label": mx.nd.array(labels)}
    gradients = {key: mx.nd.zeros(value.shape) for key, value in arguments.items()}
    requests = {key: "write" if key in gradients else "null" for key in arrays}
    states = {key: value.copy() for key, value in states.items()}
    executor = node.bind(mx.cpu(), arrays, gradients, requests, states)
    settings = {"learning_rate": _RATE, "momentum": _MOMENTUM, "wd": _DECAY, "rescale_grad": 1 / len(pixels)}
    update = mx.optimizer.get_updater(mx.optimizer.create(rule, **settings))
    numbers = list(range(len(arguments)))
    rows = np.arange(len(labels)), labels.astype(int)

    def step() -> float:
        (probabilities,) = executor.forward(is_train=True)
        executor.backward()
        update(numbers, list(gradients.values()), list(arguments.values()))
        loss = -np.log(probabilities.asnumpy()[rows]).mean()
        mx.nd.waitall()
        return loss

    return step


def _pytorch(network: Any, pixels: np.ndarray, labels: np.ndarray) -> Iterator[tuple[str, str, Step]]:
    """Yield PyTorch's steps in float32, with TF32 off; none if PyTorch has no GPU."""
    if not layers.pytorch_has_cuda():
        return
    torch = layers.pytorch()
    images, target = torch.from_numpy(pixels), torch.from_numpy(labels).long().cuda()
    here = images.cuda()

    def steps(given: Callable[[], Any]) -> Step:
        model = _networks.torch_module(network, "cuda", training=True)
        learned = [weight for weight in model.weights.values() if weight.requires_grad]
        optimizer = torch.optim.SGD(learned, _RATE, _MOMENTUM, weight_decay=_DECAY)

        def step() -> Any:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(given()), target)
            loss.backward()
            optimizer.step()
            cuda.wait("PyTorch", cuda.cupy().cuda.get_current_stream())
            return loss

        return step

    yield "PyTorch eager", STEP, steps(images.cuda)
    yield "PyTorch eager", ON_GPU, steps(lambda: here)
    torch.cuda.empty_cache()
