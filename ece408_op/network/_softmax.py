"""softmax along an axis, and with the gradient of its cross-entropy loss; outputs of a regression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ._definition import Arrays, Operator, Shape, Trained, Unsupported, choice, disabled, flag, integer, number


class SoftmaxAlongAxis(Operator):
    """The base class of operators that compute softmax(x / temperature) along an axis, or its logarithm."""

    axis: int
    temperature: float = 1.0

    @property
    def logarithm(self) -> bool:
        return self.op == "log_softmax"

    def row_length(self, x: Shape) -> int | None:
        """Return the elements that are summed, if they lie one after another in memory."""
        return x[-1] if self.axis % len(x) == len(x) - 1 else None

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        x, xp, axis = inputs[0], arrays.xp, self.axis
        xp.subtract(x, x.max(axis=axis, keepdims=True), out=out)
        if self.temperature != 1:
            xp.divide(out, np.float32(self.temperature), out=out)
        if self.logarithm:
            xp.subtract(out, xp.log(xp.exp(out).sum(axis=axis, keepdims=True)), out=out)
        else:
            xp.exp(out, out=out)
            xp.divide(out, out.sum(axis=axis, keepdims=True), out=out)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        xp, y = arrays.xp, given.out
        if self.logarithm:
            found = gradient - xp.exp(y) * gradient.sum(axis=self.axis, keepdims=True)
        else:
            found = y * (gradient - (gradient * y).sum(axis=self.axis, keepdims=True))
        return [found if self.temperature == 1 else found / np.float32(self.temperature)]

    def mixes_images(self, dimensions: int) -> bool:
        return self.axis % dimensions == 0


@dataclass(frozen=True)
class Softmax(SoftmaxAlongAxis):
    """softmax along an axis, or its logarithm."""

    names = ("softmax", "log_softmax")
    axis: int = integer(-1)
    temperature: float = number(1.0)
    dtype: str = choice("float32")
    use_length: bool = disabled()

    def check_shapes(self, shapes: Sequence[Shape], output: Shape) -> None:
        if not -len(output) <= self.axis < len(output):  # MXNet checks this only in its forward pass
            raise Unsupported(f"axis: expected one of {len(output)} dimensions, got {self.axis}")


@dataclass(frozen=True)
class SoftmaxActivation(SoftmaxAlongAxis):
    """softmax over the channels, or in mode "instance" over the values of each image."""

    names = ("SoftmaxActivation",)
    axis = 1
    mode: str = choice("instance", "channel")

    def check_shapes(self, shapes: Sequence[Shape], output: Shape) -> None:
        # On other data in mode instance, MXNet's builds disagree; mode channel is checked only in its forward pass.
        if len(output) != 2 if self.mode == "instance" else len(output) < 3:
            expected = "instance with data of two dimensions, or channel with more"
            raise Unsupported(f"mode: expected {expected}, got {self.mode} with {output}")


@dataclass(frozen=True)
class SoftmaxOutput(SoftmaxAlongAxis):
    """softmax over all but the first axis, over the channels (multi_output) or over the last axis (preserve_shape)."""

    names = ("SoftmaxOutput",)
    inputs = ("data", "label")
    ignored = ("label",)
    multi_output: bool = flag(False)
    preserve_shape: bool = flag(False)
    grad_scale: float = number(1.0)
    ignore_label: float = number(-1.0)
    use_ignore: bool = flag(False)
    smooth_alpha: float = number(0.0)
    normalization: str = choice("null", "batch", "valid")
    out_grad: bool = flag(False)

    @property
    def axis(self) -> int:  # type: ignore[override] # a field of SoftmaxAlongAxis
        return 1 if self.multi_output else -1

    def check_shapes(self, shapes: Sequence[Shape], output: Shape) -> None:
        if not (self.multi_output or self.preserve_shape) and len(shapes[0]) != 2:
            raise Unsupported(
                f"data: expected two dimensions, got shape {shapes[0]}, on which MXNet's builds disagree; flatten it, "
                "or use multi_output or preserve_shape"
            )

    @property
    def is_loss(self) -> bool:
        return True

    def check_gradient(self, several: bool) -> None:
        if self.out_grad:
            # MXNet multiplies by the output instead of by the gradient to the output.
            raise Unsupported("out_grad=True has no gradient here, because MXNet 1.9.1 contradicts its documentation")
        if several and self.normalization != "null":
            raise Unsupported(
                f"normalization={self.normalization} has no gradient on several GPUs, because each would divide by "
                "the count of its share; pass null, and rescale_grad to the optimiser"
            )

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        """Return p - label, scaled as in MXNet; the labels are class numbers or have the shape of p."""
        (_, label), p, xp = given.inputs, given.out, arrays.xp
        # With multi_output, the classes are in axis 1, and MXNet also divides by the number of positions per image.
        classes, positions = (1, prod(p.shape[2:])) if self.multi_output else (p.ndim - 1, 1)
        if label.shape == p.shape:
            found = (p - label) * np.float32(self.grad_scale)
        else:
            chosen = xp.expand_dims(label.reshape((*p.shape[:classes], *p.shape[classes + 1 :])), classes)
            numbers = xp.arange(p.shape[classes]).reshape(-1, *[1] * (p.ndim - 1 - classes))
            hit = chosen.astype(np.int32) == numbers
            smooth = 0.0 if self.multi_output else self.smooth_alpha
            others = np.float32(smooth / max(1, p.shape[classes] - 1))
            found = p - xp.where(hit, np.float32(1 - smooth), others)
            if self.use_ignore:
                found = found * (chosen.astype(np.int32) != int(self.ignore_label))
            if self.normalization == "valid":
                counted = (label.astype(np.int32) != int(self.ignore_label)).sum()
                found = found * np.float32(self.grad_scale) / xp.maximum(counted, 1).astype(np.float32)
            else:
                # MXNet's batch size is the number of images, or without multi_output the number of labels.
                batch = len(p) if self.multi_output else label.size
                count = positions * (batch if self.normalization == "batch" else 1)
                found = found * np.float32(self.grad_scale / count)
        return [found, None]


@dataclass(frozen=True)
class RegressionOutput(Operator):
    """x, or sigmoid(x) (Logistic), with the gradient y - label, or its sign (MAE), divided by the outputs per image."""

    names = ("LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput")
    inputs = ("data", "label")
    ignored = ("label",)
    grad_scale: float = number(1.0)

    @property
    def is_loss(self) -> bool:
        return True

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        x = inputs[0]
        out[...] = 1 / (1 + arrays.xp.exp(-x)) if self.op == "LogisticRegressionOutput" else x

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        found = given.out - given.inputs[1].reshape(given.out.shape)
        found = arrays.xp.sign(found) if self.op == "MAERegressionOutput" else found
        return [found * np.float32(self.grad_scale / prod(found.shape[1:])), None]
