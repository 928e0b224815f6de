"""What computes a node on the GPU: chosen once for each batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional

from ece408_op.core import dispatch
from ece408_op.core.kernel import CudaKernel
from ece408_op.errors import UnsupportedError
from ece408_op.plugin import op_times
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip

from . import _cudnn as cudnn
from . import _passes
from ._dense import Connected, GpuArrays, blas
from ._layers import BATCH_NORM, CONVOLUTION, FULLY_CONNECTED, NEW, Convolution
from ._op_definition import Shape, size
from ._pooling import POOLING
from ._run import Plain, Step
from ._shaping import LOG_SOFTMAX, SOFTMAX, SOFTMAX_OUTPUT
from ._split_precision import Split, worth_splitting
from .graph import Node

CUDNN = "cudnn"

#: Where cuDNN is there, it takes padded layers of more channels: its Winograd transforms save products. Below, ours do,
#: with a border copied on. Where the line should be has not been measured.
_BORDER_CHANNELS = 16

#: From x, w, output and scratch to what convolves them.
Bind = Callable[[Any, Any, Any, Any], Callable[[], None]]
Make = Callable[["Chooser", Node, Sequence[Shape], Shape], Optional[Step]]


class Chooser:
    """Makes the steps of a network's nodes on one GPU, which is the current one."""

    def __init__(self, impl: str, precision: str, device: int, chip: Chip) -> None:
        self.impl, self.precision, self.device, self.chip = impl, precision, device, chip
        if impl == CUDNN:
            cudnn.library()
        self.arrays = GpuArrays(device)
        #: Holds the current stream while a block queues work on it, where convolutions are to be timed.
        self.hold: Callable[[], AbstractContextManager[None]] | None = None

    def step(self, node: Node, inputs: Sequence[Shape], output: Shape) -> Step:
        """The step of a node, given the shapes of what it reads and of its output."""
        make = _MAKERS.get(node.kind.names[0])
        step = None if make is None or not size(output) else make(self, node, inputs, output)
        return step or Plain(self.arrays, node)


class _Convolution:
    """A convolution and, in one pass after it, its bias and activation.

    intervals: the events around each timed run's convolution alone, until they are asked for.
    """

    def __init__(self, chooser: Chooser, node: Node, output: Shape, make: Bind, name: str, scratch: int) -> None:
        self._chooser = chooser
        self._make, self.name, self.scratch = make, name, scratch
        self._bias = node.settings.bias
        self._shift: Any = None
        self._after = None
        if self._bias or node.activation:
            inner = output[2] * output[3]
            self._after = _passes.affine(output[1], inner, size(output), False, node.activation)
        self._filters = output[1]
        self.intervals: list[tuple[Any, Any]] = []

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Zeros in the place of a bias where only an activation follows."""
        if self._after is not None and not self._bias:
            self._shift = cuda.cupy().zeros(self._filters, "f")

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Callable[[], None]:
        """The convolution between two events, and what follows it."""
        convolve, after = self._make(inputs[0], inputs[1], out, scratch), None
        if self._after is not None:
            shift = inputs[2] if self._bias else self._shift
            after = self._after.bind(x=out, scale=shift, shift=shift, y=out)
        event = cuda.cupy().cuda.Event

        def fill() -> None:
            hold = self._chooser.hold
            if hold is None:
                convolve()
            else:
                # Held for these three alone: what comes next is queued while they run.
                start, end = event(), event()
                with hold():
                    start.record()
                    convolve()
                    end.record()
                self.intervals.append((start, end))
            if after is not None:
                after()

        return fill


def problem_of(settings: Convolution, x: Shape, pad: tuple[int, int] = (0, 0)) -> ConvProblem | None:
    """The layer as our kernels know it, of data with a border already on; None where it is none of theirs."""
    plain = settings.stride == (1, 1) and settings.dilate == (1, 1) and settings.groups == 1 and settings.pad == pad
    if not plain or settings.kernel[0] != settings.kernel[1]:
        return None
    return ConvProblem(x[0], x[1], x[2] + 2 * pad[0], x[3] + 2 * pad[1], settings.filters, settings.kernel[0])


def _ours(chooser: Chooser, problem: ConvProblem | None, impl: str, precision: str) -> CudaKernel | None:
    if problem is None or chooser.impl == CUDNN:
        return None
    try:
        kernel = dispatch.select(problem, "gpu", impl, precision, chooser.chip)
    except UnsupportedError:
        if impl != dispatch.AUTO:
            raise
        return None
    return kernel if isinstance(kernel, CudaKernel) else None


def _convolution(chooser: Chooser, node: Node, inputs: Sequence[Shape], output: Shape) -> Step | None:
    settings, x = node.settings, inputs[0]
    impl = settings.impl if settings.impl in dispatch.names("gpu") else dispatch.AUTO
    precision = chooser.precision if settings.precision == "float32" else settings.precision
    problem = problem_of(settings, x)
    kernel = None if settings.kernel == (1, 1) and impl == dispatch.AUTO else _ours(chooser, problem, impl, precision)
    if kernel is not None and problem is not None:
        return _Convolution(chooser, node, output, _kernel(kernel, problem), kernel.name, 0)
    if chooser.impl == CUDNN:
        return _cudnn(chooser, node, inputs, output)
    if settings.kernel == settings.stride == (1, 1) and settings.pad == (0, 0) and settings.groups == 1:
        return _Convolution(chooser, node, output, _pointwise(chooser, x, output), "cublas", 0)
    bordered = problem_of(settings, x, settings.pad)
    if not cudnn.is_there() or x[1] <= _BORDER_CHANNELS:
        kernel = _ours(chooser, bordered, impl, precision)
        if kernel is not None and bordered is not None:
            border = _passes.border(settings.pad, x)
            count = size(bordered.x_shape) * ITEM_BYTES
            return _Convolution(chooser, node, output, _bordered(kernel, bordered, border), kernel.name, count)
    return _cudnn(chooser, node, inputs, output) if cudnn.is_there() else None


def _kernel(kernel: CudaKernel, problem: ConvProblem) -> Bind:
    return lambda x, w, out, scratch: kernel.prepare_launch(problem, x, w, out)


def _bordered(kernel: CudaKernel, problem: ConvProblem, border: _passes.Pass) -> Bind:
    def bind(x: Any, w: Any, out: Any, scratch: Any) -> Callable[[], None]:
        whole = scratch[: size(problem.x_shape)].reshape(problem.x_shape)
        calls = border.bind(x=x, y=whole), kernel.prepare_launch(problem, whole, w, out)

        def fill() -> None:
            for call in calls:
                call()

        return fill

    return bind


def _cudnn(chooser: Chooser, node: Node, inputs: Sequence[Shape], output: Shape) -> Step:
    planned = cudnn.CudnnConvolution(node.settings, inputs[0], inputs[1], output, chooser.device)
    return _Convolution(chooser, node, output, planned.bind, CUDNN, planned.scratch)


def _pointwise(chooser: Chooser, x: Shape, y: Shape) -> Bind:
    """A 1 x 1 convolution: for each image, filters (M, C) times pixels (C, H W)."""
    library, pixels = blas(chooser.device), y[2] * y[3]

    def bind(x_array: Any, w: Any, out: Any, scratch: Any) -> Callable[[], None]:
        sizes, strides = (y[1], pixels, x[1]), (0, x[1] * pixels, y[1] * pixels)
        addresses = w.data.ptr, x_array.data.ptr, out.data.ptr
        return lambda: library.multiply(*addresses, sizes, (x[1], pixels), strides, y[0], transposed=False)

    return bind


def _connected(chooser: Chooser, node: Node, inputs: Sequence[Shape], output: Shape) -> Step:
    products = inputs[1][1]
    rows = size(output) // output[-1]
    way = Split if chooser.impl != CUDNN and worth_splitting(rows, output[-1], products, chooser.chip) else Connected
    return way(node.settings, rows, products, node.activation, chooser.device)


class _Pass:
    """A node that is one launch."""

    scratch = 0

    def __init__(self, launch: _passes.Pass) -> None:
        self._launch = launch

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Nothing depends on parameters alone."""

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Callable[[], None]:
        """The launch on these arrays."""
        return self._launch.bind(x=inputs[0], y=out)


class _Norm:
    """BatchNorm: a factor and a number for each channel, worked out when the parameters come."""

    scratch = 0

    def __init__(self, node: Node, launch: _passes.Pass, plain: Plain) -> None:
        self._settings, self._launch, self._plain = node.settings, launch, plain
        self._factors: tuple[Any, Any] | None = None

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Scale and shift of each channel."""
        known = all(array is not None for array in inputs[1:])
        self._factors = self._settings.factors(cuda.cupy(), inputs[1:]) if known else None

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Callable[[], None]:
        """The launch on these arrays, or the record's own function where parameters are computed."""
        if self._factors is None:
            return self._plain.bind(inputs, out, scratch)
        return self._launch.bind(x=inputs[0], scale=self._factors[0], shift=self._factors[1], y=out)


def _norm(chooser: Chooser, node: Node, inputs: Sequence[Shape], output: Shape) -> Step:
    axis = node.settings.axis % len(output)
    launch = _passes.affine(output[axis], size(output[axis + 1 :]), size(output), True, node.activation)
    return _Norm(node, launch, Plain(chooser.arrays, node))


def _pool(chooser: Chooser, node: Node, inputs: Sequence[Shape], output: Shape) -> Step | None:
    if max(node.settings.fitted(inputs[0]).kernel) > _LARGEST_WINDOW:
        return None
    return _Pass(_passes.pool(node.settings, inputs[0], output, node.activation))


#: Windows that the pooling's loops, which are unrolled, are compiled for.
_LARGEST_WINDOW = 16


def _softmax(chooser: Chooser, node: Node, inputs: Sequence[Shape], output: Shape) -> Step | None:
    settings, temperature = node.settings, 1.0
    if node.kind is SOFTMAX_OUTPUT:
        length = size(output[1:]) if settings == "batch" else output[-1]
        last = settings != "channels" or len(output) == 2
    else:
        length, temperature = output[-1], settings.temperature
        last = settings.axis % len(output) == len(output) - 1
    if not last:
        return None
    return _Pass(_passes.softmax(size(output) // length, length, temperature, node.kind is LOG_SOFTMAX))


_MAKERS: dict[str, Make] = {
    CONVOLUTION.names[0]: _convolution,
    NEW.names[0]: _convolution,
    FULLY_CONNECTED.names[0]: _connected,
    BATCH_NORM.names[0]: _norm,
    POOLING.names[0]: _pool,
    SOFTMAX.names[0]: _softmax,
    LOG_SOFTMAX.names[0]: _softmax,
    SOFTMAX_OUTPUT.names[0]: _softmax,
}


def timing(node: Node, step: Step, x: Shape) -> op_times.OpTime | None:
    """What the runs of a convolution since the last asking took, all being over; x: the shape of all their data.

    None for other nodes, and for layers that the record has no words for.
    """
    if not isinstance(step, _Convolution):
        return None
    elapsed = cuda.cupy().cuda.get_elapsed_time
    seconds = sum(elapsed(start, end) for start, end in step.intervals) / 1000
    step.intervals.clear()
    problem = problem_of(node.settings, x)
    return None if problem is None else op_times.OpTime(node.name, problem, step.name, "gpu", seconds)
