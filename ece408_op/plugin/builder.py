"""``New`` and ``Convolution``: the operator as functions of arrays and Symbols, which check their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mxnet as mx

from ece408_op.errors import ProblemError

from .attributes import LAYER, Attributes, is_mxnets_own
from .default_layout import OP_TYPE


def New(  # noqa: N802 (the operator's name in MXNet)
    data: Any = None,
    weight: Any = None,
    bias: Any = None,
    *,
    kernel: Any,
    num_filter: Any,
    stride: Any = None,
    pad: Any = None,
    dilate: Any = None,
    num_group: Any = 1,
    no_bias: bool = True,
    impl: str = "auto",
    device: str | None = None,
    precision: str = "float32",
    tune: bool = False,
    fuse: str | None = None,
    name: str | None = None,
    out: Any = None,
    **others: Any,
) -> Any:
    """Convolve data with weight (a cross-correlation in float32), and add a bias per filter if there is one.

    Args:
        data: a dense NDArray of shape (B, C, H, W), float32, or a Symbol, whose shape MXNet cannot infer from that of
            the output. Arrays and Symbols of mx.np work too. Without it, MXNet makes a variable named after the layer
            and returns a Symbol.
        weight: an NDArray of shape (M, C / G, K, L), float32, or a Symbol if data is one. For a Symbol, it may be left
            out: MXNet then makes a variable named after the layer.
        bias: if no_bias is False, an NDArray of shape (M,), float32, or a Symbol, as for weight.
        kernel: (K, L), the rows and columns of a filter.
        num_filter: M.
        stride: rows and columns from one output to the next, (1, 1) by default.
        pad: rows of zeros above and below the images, and columns on both sides, (0, 0) by default.
        dilate: rows and columns from one element of a filter to the next, (1, 1) by default.
        num_group: G. Channels and filters are divided into G groups, and each filter reads its group's channels.
        no_bias: whether there is no bias.
        impl: the name of a kernel, or "auto" for the kernel that is expected to be fastest. Gradients use the same
            kernel if it supports them.
        device: "cpu", "gpu", or None for the device of the arrays.
        precision: "float32"; "tf32" or "fp16" allow kernels that round the factors of each product to 11 bits.
        tune: whether the first call with these shapes times the GPU kernel's tiles and keeps the fastest one. That
            takes about 0.1 s after compiling, which takes seconds. Without it, a tuning table decides.
        fuse: "tanh_pool" also computes the tanh of the convolution's 2 x 2 maxima, like MXNet's Activation and Pooling
            with the convention "valid"; "tanh_pool_full" uses the convention "full". Both need a square kernel and
            defaults for the other attributes, and have no gradient.
        name: the layer's name, as in op_times.
        out: an NDArray to fill.
        others: MXNet's layout (None or "NCHW"), cudnn_tune, cudnn_off and workspace, which have no effect; for a Symbol
            also attr, a dictionary, and MXNet's own attributes such as lr_mult.

    Returns:
        An array or Symbol of data's kind: (B, M, OH, OW), float32, where
            OH = (H + 2 pad - dilate (K - 1) - 1) // stride + 1, and OW is computed in the same way from W, L and the
            second numbers. With "tanh_pool" (B, M, OH // 2, OW // 2), with "tanh_pool_full" (B, M, (OH + 1) // 2,
            (OW + 1) // 2).

    Raises:
        ProblemError: the arguments, shapes or types do not fit together; for Symbols, some only when they are bound.
    """
    given: dict[str, Any] = {"kernel": kernel, "num_filter": num_filter, "stride": stride, "pad": pad}
    given.update({"dilate": dilate, "num_group": num_group, "no_bias": no_bias})
    given.update({"impl": impl, "device": device, "precision": precision, "tune": tune, "fuse": fuse})
    if isinstance(data, (mx.np.ndarray, mx.sym.np._Symbol)):
        data, weight, bias = map(_legacy, (data, weight, bias))
        result = New(data, weight, bias, **given, name=name, out=_legacy(out), **others)
        return result.as_np_ndarray() if out is None else out
    own = dict(others.pop("attr", None) or {})
    own.update({key: others.pop(key) for key in list(others) if is_mxnets_own(key)})
    attributes = Attributes.parse({**given, **others})
    inputs = {"data": data, "weight": weight, "bias": bias}
    if attributes.no_bias and bias is not None:
        raise ProblemError("bias: expected none with no_bias=True, got one; pass no_bias=False")
    inputs = {each: inputs[each] for each in attributes.inputs}
    if isinstance(data, mx.sym.Symbol) or (
        data is None and all(isinstance(value, (mx.sym.Symbol, type(None))) for value in (weight, bias, out))
    ):
        return _symbol(inputs, attributes, name, out, own)
    if not isinstance(data, mx.nd.NDArray):
        raise ProblemError(f"data: expected an NDArray or a Symbol, got {type(data).__name__}")
    for each, array in inputs.items():
        if not isinstance(array, mx.nd.NDArray):
            raise ProblemError(f"{each}: expected an NDArray as data is, got {type(array).__name__}")
    if out is not None and not isinstance(out, mx.nd.NDArray):
        raise ProblemError(f"out: expected an NDArray to fill, got {type(out).__name__}")
    text = attributes.as_text()
    if name is not None:
        text[LAYER] = name
    return mx.nd.Custom(*inputs.values(), op_type=OP_TYPE, out=out, **text)


def Convolution(  # noqa: N802 (as in MXNet)
    data: Any = None,
    weight: Any = None,
    bias: Any = None,
    kernel: Any = None,
    stride: Any = None,
    dilate: Any = None,
    pad: Any = None,
    num_filter: Any = None,
    num_group: Any = 1,
    workspace: Any = None,
    no_bias: bool = False,
    **others: Any,
) -> Any:
    """Compute MXNet's Convolution of float32 2-D images in layout NCHW by the operator, with MXNet's signature.

    The arguments and defaults are those of mx.nd.Convolution, mx.sym.Convolution or mx.npx.convolution, and impl,
    device, precision and tune of ``New``. Returns and raises as ``New``.
    """
    given = {"stride": stride, "dilate": dilate, "pad": pad, "num_group": num_group}
    given["no_bias"] = False if no_bias is None else no_bias  # New's own default is True
    return New(data, weight, bias, kernel=kernel, num_filter=num_filter, **given, **others)


def _symbol(
    inputs: Mapping[str, Any], attributes: Attributes, name: str | None, out: Any, own: Mapping[str, Any]
) -> Any:
    if out is not None:
        raise ProblemError("out: expected none for a Symbol, which has no memory yet; pass it for NDArrays only")
    for each, value in inputs.items():
        if value is not None and not isinstance(value, mx.sym.Symbol):
            raise ProblemError(f"{each}: expected a Symbol as data is, got {type(value).__name__}")
    given = {each: value for each, value in inputs.items() if value is not None}
    with mx.name.NameManager() as manager:  # not the current manager, which may put a prefix in front of a given name
        name = manager._old_manager.get(name, OP_TYPE.lower())
        text = {**attributes.as_text(), **{key: str(value) for key, value in own.items()}, LAYER: name}
        return mx.sym.Custom(name=name, op_type=OP_TYPE, **given, **text)


def _legacy(value: Any) -> Any:
    """Return an array or Symbol of mx.np as one of mx.nd or mx.sym with the same memory, and others as they are."""
    return value.as_nd_ndarray() if isinstance(value, (mx.np.ndarray, mx.sym.np._Symbol)) else value
