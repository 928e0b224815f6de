"""Whole networks, end to end: the operator's beside MXNet's own on the CPU, by both of MXNet's settings.

A network is bound once for all images. A forward begins with the images in MXNet's memory and ends with the
probabilities in NumPy's. On the GPU the operator works in the host context: what it copies there and back is part of
the time, and all but the convolutions, and what is fused to them, stays on the CPU. The first forward, which faults
all memory in and compiles, is told apart from the steady ones.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ece408_op.data import load_test
from ece408_op.models import files, shapes

#: One of each architecture.
NETWORKS = ("ece408-high", "ece408-2018sp", "ece408-2018fa")

#: MXNet's setting that decides whether it fuses operators, and the value that it has by default.
SETTING = "MXNET_SUBGRAPH_BACKEND"
DEFAULT, NONE = "default", "NONE"

#: Who computes the convolutions, and MXNet's setting for the rest. MXNet's own are on the CPU in any case.
MXNET_DEFAULT, MXNET_NONE = "MXNet, default", "MXNet, NONE"
CONTESTANTS = {
    MXNET_DEFAULT: ("mxnet", DEFAULT),
    MXNET_NONE: ("mxnet", NONE),
    "New, default": ("new", DEFAULT),
    "New, NONE": ("new", NONE),
    "New fused, default": ("fused", DEFAULT),
    "New fused, NONE": ("fused", NONE),
}


@dataclass(frozen=True)
class NetworkTiming:
    """One contestant: seconds of the first forward and of the steady ones; predictions that agree with MXNet's."""

    network: str
    contestant: str
    images: int
    first: float
    steady: list[float]
    agreeing: int

    @property
    def median(self) -> float:
        """The median of the steady forwards, in seconds."""
        return statistics.median(self.steady)

    @property
    def passed(self) -> bool:
        """Every prediction is MXNet's."""
        return self.agreeing == self.images


def measure(name: str, images: int, repeats: int, device: str) -> list[NetworkTiming]:
    """All contestants on one network, one after the other; each is printed on stderr when it is done.

    device: where the operator computes, "cpu" or "gpu".
    """
    results = []
    network = files.find(name)
    pixels, _, _ = load_test(shapes.info(network).image[1], images)
    expected = None
    for contestant, (convolutions, setting) in CONTESTANTS.items():
        with _setting(setting):
            first, steady, predictions = _forwards(network, convolutions, device, pixels, repeats)
        expected = predictions if expected is None else expected
        agreeing = int((predictions == expected).sum())
        results.append(NetworkTiming(name, contestant, images, first, steady, agreeing))
        print(f"{name}: {contestant}: {results[-1].median:.3f} s, the first {first:.3f} s", file=sys.stderr)
    return results


def _forwards(
    network: files.Network, convolutions: str, device: str, pixels: np.ndarray, repeats: int
) -> tuple[float, list[float], np.ndarray]:
    import mxnet as mx

    from ece408_op.models import inference

    if convolutions == "mxnet":
        loaded = inference.built_in(network)
    else:
        loaded = inference.with_operator(network, "auto", device, fuse=convolutions == "fused")
    forward = inference.bound(loaded, pixels.shape, mx.cpu())
    data = mx.nd.array(pixels)
    data.wait_to_read()
    seconds, probabilities = [], np.empty(0)
    for _ in range(repeats + 1):
        start = time.perf_counter()
        probabilities = forward(data).asnumpy()
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1:], probabilities.argmax(axis=1)


@contextmanager
def _setting(value: str) -> Iterator[None]:
    before = os.environ.pop(SETTING, None)
    if value != DEFAULT:
        os.environ[SETTING] = value
    try:
        yield
    finally:
        os.environ.pop(SETTING, None)
        if before is not None:
            os.environ[SETTING] = before


def table(results: list[NetworkTiming]) -> str:
    """Markdown: a row for each network and contestant."""
    head = ["network", "convolutions, MXNet's setting", "steady, s", "least to most", "first, s"]
    head += ["x default", "x NONE", "same predictions"]
    rows = [head, ["---"] * len(head)]
    medians = {(result.network, result.contestant): result.median for result in results}
    for result in results:
        spread = f"{min(result.steady):.3f} to {max(result.steady):.3f}"
        rows.append([result.network, result.contestant, f"{result.median:.3f}", spread, f"{result.first:.3f}"])
        rows[-1] += [f"{medians[result.network, peer] / result.median:.2f}" for peer in (MXNET_DEFAULT, MXNET_NONE)]
        rows[-1].append(f"{result.agreeing} of {result.images}")
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def as_data(results: list[NetworkTiming]) -> dict[str, Any]:
    """Everything that was measured, for JSON."""
    return {"networks": [asdict(result) for result in results]}


def from_data(data: dict[str, Any]) -> list[NetworkTiming]:
    """The results in what ``as_data`` gave; none in an empty dictionary."""
    return [NetworkTiming(**result) for result in data.get("networks", [])]
