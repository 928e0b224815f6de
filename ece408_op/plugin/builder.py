"""``New``: the operator as a function, for NDArrays and Symbols, which checks its arguments at the call."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from ece408_op.errors import ProblemError

from .attributes import LAYER, Attributes
from .default_layout import OP_TYPE


def New(  # noqa: N802 (the operator's name in MXNet)
    data: Any,
    weight: Any = None,
    *,
    kernel: Any,
    num_filter: Any,
    impl: str = "auto",
    device: str | None = None,
    precision: str = "float32",
    fuse: str | None = None,
    name: str | None = None,
    out: Any = None,
) -> Any:
    """Convolve data with weight: a cross-correlation with stride 1, no padding and no bias, in float32.

    Args:
        data: an NDArray of shape (B, C, H, W), float32, or a Symbol. Arrays and Symbols of mx.np work too.
        weight: an NDArray of shape (M, C, K, K), float32, or a Symbol, as data is. Without it, MXNet makes a variable
            named after the layer for a Symbol.
        kernel: (K, K).
        num_filter: M.
        impl: the name of a kernel, or "auto" for the kernel that is expected to be fastest.
        device: "cpu", "gpu", or None for the device of the arrays.
        precision: "float32"; "tf32" or "fp16" allow kernels that round the factors of each product to 11 bits.
        fuse: "tanh_pool" computes the tanh of the 2 x 2 maxima of the convolution as well, as MXNet's Activation and
            Pooling with the convention "valid" do; "tanh_pool_full" is the convention "full".
        name: the layer's name, as in op_times.
        out: an NDArray to fill.

    Returns:
        An array or Symbol of data's kind: (B, M, OH, OW) with OH = H - K + 1 and OW = W - K + 1, float32. With
            "tanh_pool" (B, M, OH // 2, OW // 2), with "tanh_pool_full" (B, M, (OH + 1) // 2, (OW + 1) // 2).

    Raises:
        ProblemError: the arguments, shapes or types do not fit together; for Symbols, some only when they are bound.
    """
    given = {"kernel": kernel, "num_filter": num_filter, "impl": impl, "device": device, "precision": precision}
    if isinstance(data, (mx.np.ndarray, mx.sym.np._Symbol)):
        result = New(_legacy(data), _legacy(weight), **given, fuse=fuse, name=name, out=_legacy(out))
        return result.as_np_ndarray() if out is None else out
    attributes = Attributes.parse({**given, "fuse": fuse})
    if isinstance(data, mx.sym.Symbol):
        return _symbol(data, weight, attributes, name, out)
    if not isinstance(data, mx.nd.NDArray):
        raise ProblemError(f"data: expected an NDArray or a Symbol, got {type(data).__name__}")
    if not isinstance(weight, mx.nd.NDArray):
        raise ProblemError(f"weight: expected an NDArray as data is, got {type(weight).__name__}")
    if out is not None and not isinstance(out, mx.nd.NDArray):
        raise ProblemError(f"out: expected an NDArray to fill, got {type(out).__name__}")
    text = attributes.as_text()
    if name is not None:
        text[LAYER] = name
    return mx.nd.Custom(data, weight, op_type=OP_TYPE, out=out, **text)


def _symbol(data: Any, weight: Any, attributes: Attributes, name: str | None, out: Any) -> Any:
    if out is not None:
        raise ProblemError("out: expected none for a Symbol, which has no memory yet; pass it for NDArrays only")
    if weight is not None and not isinstance(weight, mx.sym.Symbol):
        raise ProblemError(f"weight: expected a Symbol as data is, got {type(weight).__name__}")
    name = _name_manager().get(name, OP_TYPE.lower())
    inputs = {"data": data} if weight is None else {"data": data, "weight": weight}
    with mx.name.NameManager():  # the current manager may put a prefix in front of a given name
        return mx.sym.Custom(name=name, op_type=OP_TYPE, **inputs, **{**attributes.as_text(), LAYER: name})


def _legacy(value: Any) -> Any:
    """Return an array or Symbol of mx.np as the older kind that Custom operators take, with the same memory."""
    return value.as_nd_ndarray() if isinstance(value, (mx.np.ndarray, mx.sym.np._Symbol)) else value


def _name_manager() -> Any:
    """Return the manager that MXNet's own operators take their names from; its public property warns at every use."""
    current = mx.name.NameManager._current
    if not hasattr(current, "value"):
        current.value = mx.name.NameManager()
    return current.value
