"""The table of operators that a network may have, by their names in MXNet's graphs."""

from __future__ import annotations

from collections.abc import Mapping

from . import _elementwise, _layers, _shaping
from ._definition import Operator, Unsupported

#: The operators' classes, in the order of their definitions.
_CLASSES: list[type[Operator]] = [
    kind
    for module in (_layers, _elementwise, _shaping)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Operator) and "names" in vars(kind)
]
OPERATORS: Mapping[str, type[Operator]] = {name: kind for kind in _CLASSES for name in kind.names}

#: The operators of mx.np with the equivalent ones of mx.nd, and the attributes that have another name in mx.np.
_LONG = {"subtract": "sub", "multiply": "mul", "true_divide": "div"} | {name: name for name in ("add", "power")}
_SHORT = {"add": "plus", "subtract": "minus"}
_NUMPY = {
    **{f"_npi_{long}": f"broadcast_{short}" for long, short in _LONG.items()},
    **{f"_npi_{r}{a}_scalar": f"_{r}{_SHORT.get(a, b)}_scalar" for r in ("", "r") for a, b in _LONG.items()},
    **{f"_npi_{name}": name for name in ("negative", "exp", "log", "sqrt", "square", "tanh", "mean")},
    **{f"_np_{name}": name for name in ("sum", "max", "min", "transpose", "squeeze")},
    **{f"_npx_{name}": name for name in ("relu", "sigmoid")},
    **{"_npi_absolute": "abs", "_npi_concatenate": "Concat", "_np_reshape": "Reshape"},
}
_RENAMED = {("_npi_concatenate", "axis"): "dim", ("_np_reshape", "newshape"): "shape"}


def operator_of(op: str, attrs: Mapping[str, str]) -> Operator:
    """Return the operator of a node's op and attributes; raises Unsupported, which names the attribute."""
    name = _NUMPY.get(op, op)
    if op == "_contrib_AdaptiveAvgPooling2D" and attrs.get("output_size", "").strip("()[], ") in ("", "1", "1, 1"):
        return _layers.Pooling("Pooling", pool_type="avg", global_pool=True)
    if name not in OPERATORS:
        raise Unsupported("unsupported operator")
    no_axes = attrs.get("axis", "None").strip("()[] ") in ("None", "")
    if name != op and name in ("mean", "sum", "max", "min", "Concat") and no_axes:
        raise Unsupported("axis: expected axes, got none, for which mx.np and mx.nd return different results")
    return OPERATORS[name].read(name, {_RENAMED.get((op, key), key): text for key, text in attrs.items()})
