"""Who is measured: ``New`` with each implementation, as a user calls it, and the peers that are installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from ece408_op.plugin import bridge
from ece408_op.problem import ConvProblem

from ._measure import Calls

#: The peer that ratios refer to.
BUILT_IN = "MXNet Convolution"

#: PyTorch's two memory formats; the better one counts.
PYTORCH = ("PyTorch contiguous", "PyTorch channels_last")


@dataclass(frozen=True)
class Input:
    """One layer's arrays, in MXNet's memory; ``x`` and ``w`` are views of it."""

    problem: ConvProblem
    data: Any
    weight: Any

    @property
    def x(self) -> np.ndarray:
        """Shape (B, C, H, W)."""
        return bridge.cpu_view(self.data)

    @property
    def w(self) -> np.ndarray:
        """Shape (M, C, K, K)."""
        return bridge.cpu_view(self.weight)


def make_input(problem: ConvProblem, seed: int) -> Input:
    """Random pixels in [0, 1) and normal weights, the same for the same seed."""
    import mxnet as mx

    random = np.random.RandomState(seed)
    given = Input(problem, mx.nd.empty(problem.x_shape), mx.nd.empty(problem.w_shape))
    for image in given.x:
        image[...] = random.random_sample(image.shape)
    given.w[...] = random.standard_normal(problem.w_shape)
    return given


def new(impl: str) -> Callable[[Input], Calls]:
    """The operator with one implementation."""

    def prepare(given: Input) -> Calls:
        import mxnet as mx

        attributes = {
            "op_type": "New",
            "impl": impl,
            "kernel": (given.problem.kernel,) * 2,
            "num_filter": given.problem.filters,
        }
        return _mxnet_calls(lambda **out: mx.nd.Custom(given.data, given.weight, **attributes, **out))

    return prepare


def built_in(given: Input) -> Calls:
    """MXNet's Convolution. It keeps its weight in a layout of its own, so it has one of its own."""
    import mxnet as mx

    weight = given.weight.copy()
    attributes = {"kernel": (given.problem.kernel,) * 2, "num_filter": given.problem.filters, "no_bias": True}
    return _mxnet_calls(lambda **out: mx.nd.Convolution(given.data, weight, **attributes, **out))


def _mxnet_calls(call: Callable[..., Any]) -> Calls:
    def fresh() -> Any:
        output = call()
        output.wait_to_read()
        return output

    def reused(output: Any) -> None:
        call(out=output)
        output.wait_to_read()

    return Calls(fresh, reused, bridge.cpu_view)


def pytorch(channels_last: bool) -> Callable[[Input], Calls]:
    """PyTorch's convolution, data and weight in one of its memory formats."""

    def prepare(given: Input) -> Calls:
        import torch

        arrays = [
            torch.from_numpy(array).contiguous(
                memory_format=torch.channels_last if channels_last else torch.contiguous_format
            )
            for array in (given.x, given.w)
        ]

        def fresh() -> Any:
            with torch.inference_mode():
                return torch.nn.functional.conv2d(*arrays)

        return Calls(fresh, None, lambda output: output.numpy())

    return prepare


def contestants(impls: list[str]) -> dict[str, Callable[[Input], Calls]]:
    """By name: MXNet's built-in, the implementations, and PyTorch where it is installed.

    The implementations are known, and the CPU's.
    """
    found: dict[str, Callable[[Input], Calls]] = {BUILT_IN: built_in}
    for impl in impls:
        found[f"New {impl}"] = new(impl)
    if find_spec("torch"):
        found.update({name: pytorch(channels_last) for name, channels_last in zip(PYTORCH, (False, True))})
    return found
