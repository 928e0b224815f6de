"""NumPy's results of the operators that networks compute by kernels of their own, to compare these with."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ece408_op.core import reference
from ece408_op.network._definition import Arrays, Operator
from ece408_op.network._elementwise import Activation
from ece408_op.network._formats import Conversion
from ece408_op.network._layers import BatchNorm, Convolution, Deconvolution, Pooling, channels_second
from ece408_op.network._training_gpu import GpuOperators

#: The derivative of each activation, from its output.
DERIVATIVES = {
    "relu": lambda y: y > 0,
    "sigmoid": lambda y: y * (1 - y),
    "tanh": lambda y: 1 - y * y,
    "softrelu": lambda y: -np.expm1(-y),
    "softsign": lambda y: np.square(1 - np.absolute(y)),
}


class Launches(GpuOperators):
    """The launches of a training step on NumPy's arrays; a test replaces ``cuda.execute``."""

    xp = np

    def vector(self, inner, *arrays):
        return 4 if inner % 4 == 0 else 1


LAUNCHES = Launches(None)


def compute(operator, inputs, out, epilogue=None):
    """Fill the output as at inference."""
    _compute(operator, inputs, out)
    if epilogue:
        epilogue.compute(Arrays(), [out], out)


def train(node, inputs, out, seed=0):
    """Fill the output as in training, and return what the gradients need."""
    norm = node.operator
    if type(norm).train is not Operator.train:
        return norm.train(Arrays(), inputs, out, seed)
    if not isinstance(norm, BatchNorm) or norm.use_global_stats:
        return compute(norm, inputs, out, node.epilogue)
    x = channels_second(inputs[0], norm.axis).astype(np.float64)
    statistics = x.mean((0, 2)), x.var((0, 2))
    compute(norm, (*inputs[:3], *statistics), out, node.epilogue)
    found = statistics[0] + (inputs[5] if norm.bias else 0), statistics[1]
    new = (norm.momentum * old + (1 - norm.momentum) * one for old, one in zip(inputs[3:5], found))
    return (*statistics, *(one.astype(np.float32) for one in new))


def gradients(node, given, gradient, wanted):
    """Return the gradients to the inputs."""
    if node.epilogue:
        gradient = gradient * DERIVATIVES[node.epilogue.activation](given.out)
    return _gradients(node.operator, given, gradient, wanted)


@singledispatch
def _compute(operator, inputs, out):
    operator.compute(Arrays(), inputs, out)


@singledispatch
def _gradients(operator, given, gradient, wanted):
    return operator.gradients(Arrays(), given, gradient, wanted)


@_compute.register
def _(operator: Conversion, inputs, out):
    out[...] = inputs[0]


@_gradients.register
def _(operator: Activation, given, gradient, wanted):
    return [gradient * DERIVATIVES[operator.activation](given.out)]


@_compute.register
def _(operator: Convolution, inputs, out):
    x, w, *_ = inputs
    y = reference.convolve(x, w, operator.problem(x.shape))
    out[...] = y if operator.no_bias else y + inputs[2].reshape(1, -1, 1, 1)
    if operator.norm:
        operator.norm.compute(Arrays(), (out, *operator.norm_inputs(inputs)), out)
    if operator.residual:
        out += inputs[-1]


@_gradients.register
def _(operator: Convolution, given, gradient, wanted):
    (x, w, *_), problem = given.inputs, operator.problem(given.inputs[0].shape)
    to_data, images = problem.data_gradient, (x, gradient)
    if isinstance(operator, Deconvolution):
        to_data, images = problem.convolution, (gradient, x)
    exact = (
        reference.convolve(gradient, w, to_data),
        reference.convolve(*images, problem.weight_gradient),
        gradient.sum((0, 2, 3), dtype=np.float64),
    )
    return [one.astype(np.float32) if asked else None for one, asked in zip(exact, wanted)]


def _windows(operator, x, outputs, fill):
    """Return a padded copy of x, and views of its images and of its windows (B, C, OH, OW, rows, columns)."""
    (rows, columns), strides, (top, left) = operator.kernel, operator.stride, operator.pad
    ends = [(n - 1) * stride + size for n, stride, size in zip(outputs, strides, operator.kernel)]
    sizes = [max(end, length + 2 * pad) for end, length, pad in zip(ends, x.shape[2:], operator.pad)]
    padded = np.full((*x.shape[:2], *sizes), fill, np.float64)
    image = padded[:, :, top : top + x.shape[2], left : left + x.shape[3]]
    image[...] = x
    windows = sliding_window_view(padded, (rows, columns), (2, 3), writeable=True)[:, :, :: strides[0], :: strides[1]]
    return image, windows[:, :, : outputs[0], : outputs[1]]


def _counts(operator, shape, outputs):
    """Return how many elements each window's mean has."""
    pads = operator.pad if operator.count_include_pad else (0, 0)
    ones = np.ones((1, 1, *(length + 2 * pad for length, pad in zip(shape[2:], pads))))
    left = tuple(pad - counted for pad, counted in zip(operator.pad, pads))
    return _windows(replace(operator, pad=left), ones, outputs, 0)[1].sum((4, 5))


@_compute.register
def _(operator: Pooling, inputs, out):
    (x,), fitted = inputs, operator.fitted(inputs[0].shape)
    _, windows = _windows(fitted, x, out.shape[2:], -np.inf if operator.is_maximum else 0)
    out[...] = windows.max((4, 5)) if operator.is_maximum else windows.sum((4, 5))
    if operator.pool_type == "avg":
        out /= _counts(fitted, x.shape, out.shape[2:])


@_gradients.register
def _(operator: Pooling, given, gradient, wanted):
    """The gradient of a maximum is its first element's, and nobody's if it is NaN."""
    (x,), fitted = given.inputs, operator.fitted(given.inputs[0].shape)
    image, windows = _windows(fitted, x, gradient.shape[2:], -np.inf if operator.is_maximum else 0)
    if operator.is_maximum:
        flat = windows.reshape(*gradient.shape, -1)
        first = flat.argmax(-1)[..., None] == np.arange(flat.shape[-1])
        chosen = (first & ~np.isnan(flat)).reshape(windows.shape)
        shares = np.where(chosen, gradient[..., None, None], 0)
    else:
        counts = _counts(fitted, x.shape, gradient.shape[2:]) if operator.pool_type == "avg" else 1
        shares = np.broadcast_to((gradient / counts)[..., None, None], windows.shape)
    image.base.fill(0)
    for tap in np.ndindex(*fitted.kernel):
        windows[(..., *tap)] += shares[(..., *tap)]
    return [image.astype(np.float32)]


@_gradients.register
def _(operator: BatchNorm, given, gradient, wanted):
    (x, gamma, _, *stored), norm = given.inputs, operator
    mean, variance = (one.astype(np.float64) for one in (stored if norm.use_global_stats else given.saved)[:2])
    x, dy = (channels_second(array, norm.axis).astype(np.float64) for array in (x, gradient))
    along = lambda vector: np.reshape(vector, (1, -1, 1))  # noqa: E731
    inverse = (variance + norm.eps) ** -0.5
    normal, sums = (x - along(mean)) * along(inverse), dy.sum((0, 2))
    products = (dy * normal).sum((0, 2))
    share = 0 if norm.use_global_stats else gamma.size / gradient.size
    dx = along(inverse * (1 if norm.fix_gamma else gamma)) * (dy - share * (along(sums) + normal * along(products)))
    dgamma = np.zeros_like(products) if norm.fix_gamma else products
    bias = [np.zeros_like(sums)] if norm.bias else []
    found = (dx.reshape(gradient.shape), dgamma, sums, None, None, *bias)
    return [None if one is None else one.astype(np.float32) for one in found]


def update(rule, one):
    """Update a parameter and its states as MXNet's SGD and Adam do."""

    def clipped(values):
        return np.clip(values, np.float32(-rule.clip), np.float32(rule.clip))

    gradient, decayed = one.gradient * np.float32(rule.scale), np.float32(one.decay) * one.parameter
    if not rule.is_adam:
        (momentum,) = one.states
        # Without a momentum, not 0 times what a step with NaN or infinity has left.
        kept = momentum * np.float32(rule.beta1) if rule.beta1 else 0
        momentum[...] = kept - np.float32(one.rate) * (clipped(gradient) + decayed)
        one.parameter[...] += momentum
        return
    gradient, (mean, variance) = clipped(gradient + decayed), one.states
    mean[...] = mean * np.float32(rule.beta1) + np.float32(1 - rule.beta1) * gradient
    variance[...] = variance * np.float32(rule.beta2) + np.float32(1 - rule.beta2) * gradient * gradient
    one.parameter[...] -= np.float32(one.rate) * mean / (np.sqrt(variance) + np.float32(rule.epsilon))
