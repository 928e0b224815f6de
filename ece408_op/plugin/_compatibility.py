"""Compatibility shims for MXNet 1.9.1 on today's NumPy and Python, visible only to MXNet's modules.

MXNet was last released for NumPy 1.x and Python 3.8. It uses names that NumPy has dropped, some while it is imported
(``numpy.bool``, ``PZERO``), some much later (``numpy.Inf`` in gluon's estimators), and ``distutils``. MXNet's modules
get builtins whose ``__import__`` returns a module with NumPy's contents and the shims. All other packages see NumPy as
it is.
"""

from __future__ import annotations

import builtins
import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, wraps
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any


@lru_cache(maxsize=1)
def builtins_with_shims() -> dict[str, Any]:
    """Return the builtins for MXNet's modules: a copy of Python's, with another ``__import__``.

    A copy, because a mapping that looks up names in the original would make each call of a builtin slower.
    """
    import numpy

    shims = _numpy_shims(numpy)
    numpy_for_mxnet = _with_shims(numpy, shims)
    version = ModuleType("distutils.version")
    vars(version).update(LooseVersion=Version, StrictVersion=Version)
    distutils = ModuleType("distutils")
    vars(distutils).update(version=version)

    def import_with_shims(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if level == 0:
            if name == "numpy":
                # Without the shims' names: NumPy would warn about them, or search for submodules of these names.
                builtins.__import__(name, globals, locals, [n for n in fromlist or () if n not in shims])
                return numpy_for_mxnet
            if name.startswith("numpy.") and not fromlist:
                builtins.__import__(name, globals, locals)
                return numpy_for_mxnet
            if name == "distutils.version":
                return version if fromlist else distutils
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    return {**vars(builtins), "__import__": import_with_shims}


def _with_shims(original: ModuleType, shims: dict[str, Any]) -> ModuleType:
    """Return a module with a copy of the original's contents and the shims; later names are found in the original.

    The contents are copied, because MXNet uses several at each call, and each look-up would cost a microsecond.
    """
    module = ModuleType(original.__name__)
    vars(module).update({**vars(original), **shims})
    vars(module)["__getattr__"] = lambda name: getattr(original, name)
    return module


def _numpy_shims(numpy: ModuleType) -> dict[str, Any]:
    """Return the names that MXNet uses and a NumPy version since 1.23 lacks, with their values in older versions."""
    inf, nan = float("inf"), float("nan")
    shims: dict[str, Any] = {"bool": bool, "int": int, "compat": SimpleNamespace(basestring=str)}
    shims.update(PZERO=0.0, NZERO=-0.0, PINF=inf, NINF=-inf, Inf=inf, NAN=nan, NaN=nan)
    shims.update({name: _named(name, _removed) for name in _FINANCIAL})
    if int(numpy.__version__.split(".")[0]) >= 2:
        # Removed, or deprecated with a warning.
        shims.update({old: _named(old, getattr(numpy, new)) for old, new in _RENAMED.items()})
        shims["msort"] = lambda a: numpy.sort(a, axis=0)
        shims["in1d"] = lambda ar1, ar2, **options: numpy.isin(numpy.ravel(ar1), ar2, **options)
        utils = importlib.import_module("numpy.lib.array_utils")
        shims["core"] = SimpleNamespace(numeric=SimpleNamespace(normalize_axis_tuple=utils.normalize_axis_tuple))
    return shims


_RENAMED = {"alltrue": "all", "product": "prod", "round_": "round", "sometrue": "any", "trapz": "trapezoid"}
_FINANCIAL = ("mirr", "npv", "pmt", "ppmt", "pv", "rate")


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # A new function per name, because MXNet keys its overrides of NumPy's functions by the function object.
    def shim(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    shim.__name__ = shim.__qualname__ = name
    shim.__doc__ = function.__doc__
    return shim


def _removed(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("NumPy has no financial functions since 1.20: use the package numpy-financial")


class Version(tuple):
    """A version that compares by its first three numbers, which is all that MXNet needs of ``distutils.version``."""

    def __new__(cls, text: str) -> Version:
        """Parse a version: (2, 1, 0) from "2.1.0rc1"."""
        return super().__new__(cls, (int(part) for part in re.findall(r"\d+", text)[:3]))


# Replacements in code, where shims are not enough: (module, function, a name in its code, the name to use instead).
_IN_CODE = (
    # NumPy 2.3 has no ndarray.tostring, and 2.5 does not convert an array of one element to a number.
    ("mxnet.recordio", "pack", "tostring", "tobytes"),
    ("mxnet.recordio", "pack_img", "tostring", "tobytes"),
    ("mxnet.contrib.quantization", "_get_optimal_threshold", "asnumpy", "asscalar"),
    # NumPy 2 prints a scalar inside a tuple or dict as np.int64(5), and MXNet needs the text "(5, 5)".
    ("mxnet.symbol.symbol", "var", "str", "plain_text"),
    ("mxnet.metric", "EvalMetric.__str__", "dict", "plain_dict"),
)

# Modules that use "str" only for the text of an operator's or an iterator's argument.
_TEXT_OF_ARGUMENTS = ("mxnet._ctypes.ndarray", "mxnet._ctypes.symbol", "mxnet.io.io")


def patch(module: ModuleType) -> None:
    """Patch a module of MXNet that has just run, where today's NumPy prints, names or rounds differently."""
    name = module.__name__
    for _, function, old, new in (row for row in _IN_CODE if row[0] == name):
        if new in globals():
            vars(module)[new] = globals()[new]
        target = attrgetter(function)(module)
        names = target.__code__.co_names
        target.__code__ = target.__code__.replace(co_names=tuple(new if each == old else each for each in names))
    if isinstance(scipy_sparse := vars(module).get("spsp"), ModuleType):
        # mx.nd.array uses scipy.sparse.csr at each call, which is deprecated and ends with SciPy 2.0.
        csr = SimpleNamespace(csr_matrix=scipy_sparse.csr_matrix)
        vars(module)["spsp"] = _with_shims(scipy_sparse, {"csr": csr})
    if name in _TEXT_OF_ARGUMENTS:
        vars(module)["str"] = plain_text
    elif name == "mxnet.metric":
        for reset in ("reset", "reset_local"):
            setattr(module.EvalMetric, reset, _from_float64_zero(getattr(module.EvalMetric, reset)))
    elif name == "mxnet.numpy.multiarray":
        module._as_mx_np_array = _keeping_named_tuples(module._as_mx_np_array)  # type: ignore[attr-defined]
    elif name == "mxnet.numpy_dispatch_protocol":
        # numpy.true_divide is named "divide" since 1.22.
        module._NUMPY_ARRAY_UFUNC_DICT.setdefault("divide", module._NUMPY_ARRAY_UFUNC_DICT["true_divide"])


def _from_float64_zero(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return EvalMetric's reset with float64 sums: NumPy 2 adds float32 to a Python float in float32."""

    @wraps(reset)
    def wrapper(metric: Any) -> None:
        import numpy

        reset(metric)
        metric.sum_metric = numpy.float64(metric.sum_metric)
        if hasattr(metric, "global_sum_metric"):
            metric.global_sum_metric = numpy.float64(metric.global_sum_metric)

    return wrapper


def _keeping_named_tuples(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return MXNet's conversion of NumPy's results, extended to the named tuples of numpy.linalg since 1.25."""

    @wraps(convert)
    def wrapper(object: Any, ctx: Any = None) -> Any:
        if isinstance(object, tuple) and hasattr(object, "_make"):
            return object._make(wrapper(item, ctx) for item in object)
        return convert(object, ctx)

    return wrapper


def plain_text(value: object) -> str:
    """Return str(value), with NumPy's scalars inside a tuple or list as plain numbers: "(5, 5)"."""
    text = str(value)
    return str(_plain(value)) if "np." in text else text


def plain_dict(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return dict(pairs), with NumPy's scalars as plain numbers: {'accuracy': 0.5}."""
    return {key: _plain(value) for key, value in pairs}


def _plain(value: Any) -> Any:
    import numpy

    if isinstance(value, numpy.generic):
        return value.item()
    if type(value) in (tuple, list):
        return type(value)(_plain(item) for item in value)
    return value
