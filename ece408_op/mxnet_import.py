"""MXNet 1.9.1 on today's Python and NumPy, and the CUDA libraries that its GPU builds link to.

MXNet was last released for NumPy 1.x and Python 3.8. It asks NumPy for names that are gone, some at
its import (``numpy.bool``, ``PZERO``), some long after it (``numpy.Inf`` in gluon's estimators), and
Python for ``distutils``. They are lent to MXNet alone; every other package sees NumPy as it is:

    import mxnet.x
      -> Finder     finds the module as Python would, and sets a loader of ours in front of its own
      -> Loader     gives the module a __builtins__ of its own, whose __import__ answers
                    "numpy" with a stand-in: NumPy's own contents and the lent names
      -> a few functions of MXNet are mended where NumPy 2 prints or names things differently

``install`` has to run before MXNet is imported; where MXNet is loaded already it is left as it is.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import importlib.abc
import re
import sys
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, Callable, Iterable, Sequence

from .errors import MXNetImportError

#: What MXNet's CUDA 11 builds link to, by the names the loader asks for.
CUDA11_LIBRARIES = (
    "libcudart.so.11.0",
    "libcublasLt.so.11",
    "libcublas.so.11",
    "libcufft.so.10",
    "libcurand.so.10",
    "libcusparse.so.11",
    "libcusolver.so.11",
    "libnvrtc.so.11.2",
    "libnvToolsExt.so.1",
    "libcudnn.so.8",
    "libnccl.so.2",
)


def install(after: Callable[[], None] | None = None) -> None:
    """Make MXNet importable, and call ``after`` once it is imported.

    Where MXNet is loaded already, how it is imported is left as it was, and ``after`` is called at once.
    """
    if "mxnet" in sys.modules:
        if after is not None:
            after()
        return
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    # Left by an import that failed before this call, for want of a name that is now lent.
    for name in [name for name in sys.modules if name.startswith("mxnet.")]:
        del sys.modules[name]
    sys.meta_path.insert(0, Finder(after))


def load() -> ModuleType:
    """MXNet, imported with all it needs; raises MXNetImportError where it cannot be, with what to install."""
    install()
    try:
        return importlib.import_module("mxnet")
    except ModuleNotFoundError as error:
        if error.name != "mxnet":
            raise
        raise MXNetImportError(f"expected MXNet, found none in {sys.prefix}: {_how_to_install()}") from None


def _how_to_install() -> str:
    if sys.version_info >= (3, 13):
        return "pip install 'ece408-op[cpu]' && pip install --no-deps mxnet==1.9.1 (its metadata rules out this Python)"
    return "pip install 'ece408-op[cpu]', or one of the extras cu117, cuda12 and cuda13 for a GPU"


def load_libraries(names: Iterable[str], folders: Iterable[Path] | None = None) -> list[str]:
    """Load shared libraries of the nvidia-* wheels, so that what links to them needs no LD_LIBRARY_PATH.

    names are file names such as "libcudart.so.11.0"; each is looked for in site-packages/nvidia/*/lib, or
    in folders. Returns the paths loaded; what is in none of the folders is left to the system's loader.
    """
    if folders is None:
        folders = [lib for entry in sys.path if entry for lib in sorted(Path(entry).glob("nvidia/*/lib"))]
    folders = list(folders)
    waiting = [path for name in names for path in [folder / name for folder in folders if (folder / name).is_file()][:1]]
    loaded: list[str] = []
    while waiting:
        left = []
        for path in waiting:
            try:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                left.append(path)  # perhaps it links to one that comes later
            else:
                loaded.append(str(path))
        if len(left) == len(waiting):
            break
        waiting = left
    return loaded


# --- finding and loading -------------------------------------------------------------------------


class Finder(importlib.abc.MetaPathFinder):
    """Finds ``mxnet`` and its modules through the other finders, and sets ``Loader`` before their loader."""

    def __init__(self, after: Callable[[], None] | None = None) -> None:
        self.after = after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec; None for other packages, and where MXNet is absent."""
        if fullname.partition(".")[0] != "mxnet":
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = Loader(spec.loader, self.after if fullname == "mxnet" else None)
                    return spec
        return None


class Loader(importlib.abc.Loader):
    """Runs a module of MXNet with the lent ``__builtins__``, then mends it and calls ``after``."""

    def __init__(self, inner: Any, after: Callable[[], None] | None) -> None:
        self.inner = inner
        self.after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The new module, as its own loader makes it."""
        return self.inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code; raises MXNetImportError where a library or a sound installation is missing."""
        # Who asks a loaded module for its loader (inspect, pkgutil, reload) finds the original.
        module.__loader__ = self.inner
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        vars(module)["__builtins__"] = _lent_builtins()
        if module.__name__ == "mxnet":
            _run_mxnet(module, self.inner)
        else:
            self.inner.exec_module(module)
        _mend(module)
        if self.after is not None:
            self.after()


def _run_mxnet(module: ModuleType, inner: Any) -> None:
    builds = _builds(Path(module.__file__).parent.parent) if module.__file__ else []
    if len(builds) > 1:
        raise MXNetImportError(
            f"expected one build of MXNet, found {' and '.join(builds)}, which overwrite each other's files: "
            f"pip uninstall {' '.join(builds)}, then install one of them"
        )
    if any("cu11" in build for build in builds):
        load_libraries(CUDA11_LIBRARIES)
    try:
        inner.exec_module(module)
    except OSError as error:
        missing = re.match(r"(lib[\w.+-]+): cannot open shared object", str(error))
        if missing is None:
            raise
        raise MXNetImportError(f"MXNet needs the library {missing[1]}: {_who_has(missing[1])}") from error


def _who_has(library: str) -> str:
    if library == "libgomp.so.1":
        return "install the system's package for it (Debian and Ubuntu: apt-get install libgomp1)"
    if library in CUDA11_LIBRARIES:
        return "pip install 'ece408-op[cu117]' brings it"
    if library == "libcuda.so.1":
        return "it comes with NVIDIA's driver; a machine without one takes MXNet's CPU build, ece408-op[cpu]"
    return "install the system's package for it"


def _builds(site: Path) -> list[str]:
    """The distributions in a site-packages folder that own the package mxnet: "mxnet", "mxnet-cu117", ..."""
    found = (re.match(r"(mxnet(?:[-_]cu\d+)?)-", path.name) for path in site.glob("mxnet*.dist-info"))
    return sorted({match[1].replace("_", "-") for match in found if match})


# --- what is lent --------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _lent_builtins() -> dict[str, Any]:
    """The builtins for MXNet's modules: Python's own, but for ``__import__``.

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


def _stand_in(numpy: ModuleType, lent: dict[str, Any]) -> ModuleType:
    """A module with NumPy's contents and the lent names; what NumPy loads later is passed on.

    The contents are copied, since MXNet looks several up at each call, and passing each on costs a microsecond.
    """
    module = ModuleType("numpy")
    vars(module).update(vars(numpy))
    vars(module).update(lent)
    vars(module)["__getattr__"] = lambda name: getattr(numpy, name)
    return module


def _lent_names(numpy: ModuleType) -> dict[str, Any]:
    """The names that MXNet uses and some NumPy from 1.23 on lacks, with the values that older ones gave."""
    inf, nan = float("inf"), float("nan")
    lent: dict[str, Any] = {"bool": bool, "int": int, "compat": SimpleNamespace(basestring=str)}
    lent.update(PZERO=0.0, NZERO=-0.0, PINF=inf, NINF=-inf, Inf=inf, NAN=nan, NaN=nan)
    # vars() rather than getattr, which warns of some names before it fails.
    own = vars(numpy)
    for old, new in _RENAMED.items():
        if old not in own:
            lent[old] = _renamed(old, own[new])
    if "msort" not in own:
        lent["msort"] = lambda a: numpy.sort(a, axis=0)
    if "in1d" not in own:
        lent["in1d"] = lambda ar1, ar2, **options: numpy.isin(numpy.ravel(ar1), ar2, **options)
    lent.update({name: _removed(name) for name in _FINANCIAL if name not in own})
    if _major(numpy) >= 2:
        # numpy.core still answers, with a warning.
        numeric = SimpleNamespace(normalize_axis_tuple=importlib.import_module("numpy.lib.array_utils").normalize_axis_tuple)
        lent["core"] = SimpleNamespace(numeric=numeric)
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


class Version(tuple):  # type: ignore[type-arg]
    """A version that compares by its leading numbers: all that MXNet asks of ``distutils.version``."""

    def __new__(cls, text: str) -> Version:
        """The version that text spells: (2, 1, 0) for "2.1.0rc1"."""
        return super().__new__(cls, (int(part) for part in re.match(r"[\d.]*", text)[0].strip(".").split(".")))  # type: ignore[index]


def _major(numpy: ModuleType) -> int:
    return int(numpy.__version__.split(".")[0])


# --- what is mended ------------------------------------------------------------------------------

# NumPy 2 shows a scalar inside a tuple or dict as np.int64(5), where MXNet means the text "(5, 5)" for its
# C++ side or the screen; and NumPy 2.3 has no ndarray.tostring. In these places one name stands for another:
# (module, function or "" for the whole module, the name there, what is looked up instead).
_MENDS = (
    ("mxnet._ctypes.ndarray", "", "str", "_plain_text"),
    ("mxnet._ctypes.symbol", "", "str", "_plain_text"),
    ("mxnet.io.io", "", "str", "_plain_text"),
    ("mxnet.symbol.symbol", "var", "str", "_plain_text"),
    ("mxnet.metric", "EvalMetric.__str__", "dict", "_plain_dict"),
    ("mxnet.recordio", "pack", "tostring", "tobytes"),
    ("mxnet.recordio", "pack_img", "tostring", "tobytes"),
)


def _mend(module: ModuleType) -> None:
    import numpy

    if _major(numpy) < 2:
        return
    lent = {"_plain_text": plain_text, "_plain_dict": plain_dict}
    for name, function, old, new in _MENDS:
        if name != module.__name__:
            continue
        if not function:
            vars(module)[old] = lent[new]
            continue
        vars(module).update({new: lent[new]} if new in lent else {})
        target: Any = module
        for part in function.split("."):
            target = getattr(target, part)
        target.__code__ = _with_name(target.__code__, old, new)


def _with_name(code: CodeType, old: str, new: str) -> CodeType:
    """The code with one of the names that it looks up replaced."""
    return code.replace(co_names=tuple(new if name == old else name for name in code.co_names))


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
