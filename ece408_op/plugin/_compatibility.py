"""What MXNet 1.9.1 lacks on today's NumPy and Python, lent to its modules alone.

MXNet was last released for NumPy 1.x and Python 3.8. It asks NumPy for names that are gone, some at its
import (``numpy.bool``, ``PZERO``), some long after it (``numpy.Inf`` in gluon's estimators), and Python for
``distutils``. Its modules run with the builtins made here, whose ``__import__`` answers "numpy" with a
stand-in: NumPy's own contents and the lent names. Every other package sees NumPy as it is.
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
def lent_builtins() -> dict[str, Any]:
    """The builtins for MXNet's modules: Python's own, but for an ``__import__`` that lends.

    A copy, since a mapping that looks its names up elsewhere makes each call of a builtin slower.
    """
    import numpy

    lent = _lent_names(numpy)
    numpy_for_mxnet = _stand_in(numpy, lent)
    version = ModuleType("distutils.version")
    vars(version).update(LooseVersion=Version, StrictVersion=Version)
    distutils = ModuleType("distutils")
    vars(distutils).update(version=version)

    def lent_import(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if level == 0:
            if name == "numpy":
                # Without the lent names: NumPy would warn of one, or search for a submodule of that name.
                builtins.__import__(name, globals, locals, [n for n in fromlist or () if n not in lent])
                return numpy_for_mxnet
            if name.startswith("numpy.") and not fromlist:
                builtins.__import__(name, globals, locals)
                return numpy_for_mxnet
            if name == "distutils.version":
                return version if fromlist else distutils
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    return {**vars(builtins), "__import__": lent_import}


def _stand_in(original: ModuleType, lent: dict[str, Any]) -> ModuleType:
    """A module with another's contents and the lent names; what the other one gets later is passed on.

    The contents are copied, since MXNet looks several up at each call, and passing each on costs a microsecond.
    """
    module = ModuleType(original.__name__)
    vars(module).update(vars(original))
    vars(module).update(lent)
    vars(module)["__getattr__"] = lambda name: getattr(original, name)
    return module


def _lent_names(numpy: ModuleType) -> dict[str, Any]:
    """The names that MXNet uses and some NumPy from 1.23 on lacks, with the values that older ones gave."""
    inf, nan = float("inf"), float("nan")
    lent: dict[str, Any] = {"bool": bool, "int": int, "compat": SimpleNamespace(basestring=str)}
    lent.update(PZERO=0.0, NZERO=-0.0, PINF=inf, NINF=-inf, Inf=inf, NAN=nan, NaN=nan)
    # vars() rather than getattr, which warns of some names before it fails.
    own = vars(numpy)
    lent.update({name: _removed(name) for name in _FINANCIAL if name not in own})
    if _major(numpy) >= 2:
        # Gone, or answering with a warning until they go.
        lent.update({old: _renamed(old, own[new]) for old, new in _RENAMED.items()})
        lent["msort"] = lambda a: numpy.sort(a, axis=0)
        lent["in1d"] = lambda ar1, ar2, **options: numpy.isin(numpy.ravel(ar1), ar2, **options)
        utils = importlib.import_module("numpy.lib.array_utils")
        lent["core"] = SimpleNamespace(numeric=SimpleNamespace(normalize_axis_tuple=utils.normalize_axis_tuple))
    return lent


_RENAMED = {
    "alltrue": "all",
    "product": "prod",
    "round_": "round",
    "sometrue": "any",
    "trapz": "trapezoid",
}
_FINANCIAL = ("mirr", "npv", "pmt", "ppmt", "pv", "rate")


def _renamed(old: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # A function of its own: MXNet keys its overrides of NumPy's functions by the function.
    def renamed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    renamed.__name__ = renamed.__qualname__ = old
    renamed.__doc__ = function.__doc__
    return renamed


def _removed(name: str) -> Callable[..., Any]:
    def removed(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"numpy.{name} is gone from NumPy since 1.20: use the package numpy-financial")

    removed.__name__ = removed.__qualname__ = name
    return removed


class Version(tuple):
    """A version that compares by its first three numbers: all that MXNet asks of ``distutils.version``."""

    def __new__(cls, text: str) -> Version:
        """The version that text spells: (2, 1, 0) for "2.1.0rc1"."""
        return super().__new__(cls, (int(part) for part in re.findall(r"\d+", text)[:3]))


def _major(numpy: ModuleType) -> int:
    return int(numpy.__version__.split(".")[0])


# Where lending names is not enough: (module, function, a name that its code looks up, the one it is to look up).
_IN_CODE = (
    # NumPy 2.3 has no ndarray.tostring, and 2.5 takes no array of one element for a number.
    ("mxnet.recordio", "pack", "tostring", "tobytes"),
    ("mxnet.recordio", "pack_img", "tostring", "tobytes"),
    ("mxnet.contrib.quantization", "_get_optimal_threshold", "asnumpy", "asscalar"),
    # NumPy 2 shows a scalar inside a tuple or dict as np.int64(5), where MXNet means the text "(5, 5)".
    ("mxnet.symbol.symbol", "var", "str", "plain_text"),
    ("mxnet.metric", "EvalMetric.__str__", "dict", "plain_dict"),
)

# Modules where every "str" makes the text of an operator's or an iterator's argument.
_TEXT_OF_ARGUMENTS = ("mxnet._ctypes.ndarray", "mxnet._ctypes.symbol", "mxnet.io.io")


def mend(module: ModuleType) -> None:
    """Adapt a module of MXNet that has just run, where NumPy prints, names or rounds otherwise than it once did."""
    name = module.__name__
    for _, function, old, new in (row for row in _IN_CODE if row[0] == name):
        if new in globals():
            vars(module)[new] = globals()[new]
        target = attrgetter(function)(module)
        names = target.__code__.co_names
        target.__code__ = target.__code__.replace(co_names=tuple(new if each == old else each for each in names))
    if isinstance(scipy_sparse := vars(module).get("spsp"), ModuleType):
        # mx.nd.array asks for scipy.sparse.csr at each call; SciPy warns of it and ends it with 2.0.
        csr = SimpleNamespace(csr_matrix=scipy_sparse.csr_matrix)
        vars(module)["spsp"] = _stand_in(scipy_sparse, {"csr": csr})
    if name in _TEXT_OF_ARGUMENTS:
        vars(module)["str"] = plain_text
    elif name == "mxnet.metric":
        for reset in ("reset", "reset_local"):
            setattr(module.EvalMetric, reset, _from_float64_zero(getattr(module.EvalMetric, reset)))
    elif name == "mxnet.numpy.multiarray":
        module._as_mx_np_array = _keeping_named_tuples(module._as_mx_np_array)  # type: ignore[attr-defined]
    elif name == "mxnet.numpy_dispatch_protocol":
        # numpy.true_divide has called itself "divide" since 1.22.
        module._NUMPY_ARRAY_UFUNC_DICT.setdefault("divide", module._NUMPY_ARRAY_UFUNC_DICT["true_divide"])


def _from_float64_zero(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    """EvalMetric's reset, with sums that start as float64: NumPy 2 adds float32 to a Python float in float32."""

    @wraps(reset)
    def wrapper(metric: Any) -> None:
        import numpy

        reset(metric)
        metric.sum_metric = numpy.float64(metric.sum_metric)
        if hasattr(metric, "global_sum_metric"):
            metric.global_sum_metric = numpy.float64(metric.global_sum_metric)

    return wrapper


def _keeping_named_tuples(convert: Callable[..., Any]) -> Callable[..., Any]:
    """The function that makes NumPy's results mx.np arrays, for the named tuples of numpy.linalg since 1.25 too."""

    @wraps(convert)
    def wrapper(object: Any, ctx: Any = None) -> Any:
        if isinstance(object, tuple) and hasattr(object, "_make"):
            return object._make(wrapper(item, ctx) for item in object)
        return convert(object, ctx)

    return wrapper


def plain_text(value: object) -> str:
    """str(value), with NumPy's scalars inside a tuple or list as plain numbers: "(5, 5)"."""
    text = str(value)
    return str(_plain(value)) if "np." in text else text


def plain_dict(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """dict(pairs), with NumPy's scalars as plain numbers: {'accuracy': 0.5}."""
    return {key: _plain(value) for key, value in pairs}


def _plain(value: Any) -> Any:
    import numpy

    if isinstance(value, numpy.generic):
        return value.item()
    if type(value) in (tuple, list):
        return type(value)(_plain(item) for item in value)
    return value
