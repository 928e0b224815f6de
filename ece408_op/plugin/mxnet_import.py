"""The import of MXNet 1.9.1 on today's Python and NumPy, and the CUDA libraries that its GPU builds link to.

    import mxnet.x
      -> Finder      finds the module as Python does, and wraps its loader's exec_module in _execute
      -> _execute    gives the module builtins with compatibility shims, runs it, and patches it (_compatibility.py)

``install`` has to run before MXNet is imported; a loaded MXNet is left as it is.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from ece408_op.errors import MXNetImportError

from ._compatibility import builtins_with_shims, patch

#: The libraries that MXNet's CUDA 11 builds link to, each behind those that it links to itself.
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

#: How long idle OpenMP threads spin, in libgomp's iterations: about 0.25 ms. By default they spin for 8 ms after each
#: call of MXNet, on the cores that the next kernel of ``New`` needs.
SPIN_COUNT = 10_000


def install(after: Callable[[], None] | None = None) -> None:
    """Make MXNet importable, and call ``after`` once it is imported, or now if it is loaded."""
    if "mxnet" in sys.modules:
        if after is not None:
            after()
        return
    finder = next((finder for finder in sys.meta_path if isinstance(finder, Finder)), None)
    if finder is None:
        # A failed import before this call has left these modules.
        for name in [name for name in sys.modules if name.startswith("mxnet.")]:
            del sys.modules[name]
        finder = Finder()
        sys.meta_path.insert(0, finder)
    finder.after += [after] if after is not None else []


def load() -> ModuleType:
    """Import MXNet and return it; raises MXNetImportError, which says what to install, if the import fails."""
    install()
    try:
        return importlib.import_module("mxnet")
    except ModuleNotFoundError as error:
        if error.name != "mxnet":
            raise
        raise MXNetImportError(f"expected MXNet, found none in {sys.prefix}: {_how_to_install()}") from None


def warn_where_absent() -> None:
    """Warn if MXNet is missing, and say what to install: the kernels work without MXNet, the operator does not."""
    if "mxnet" not in sys.modules and importlib.util.find_spec("mxnet") is None:
        warnings.warn(f"MXNet is not installed, so there is no operator New: {_how_to_install()}", stacklevel=3)


def _command(extra: str) -> str:
    from ece408_op.runtime.install_hint import command  # needs importlib.metadata, a third of this package's import

    return command(extra)


def _how_to_install() -> str:
    if sys.version_info >= (3, 13):
        return f"{_command('cpu')} && pip install --no-deps mxnet==1.9.1 (its metadata rules out this Python)"
    return f"{_command('cpu')}, or cu117, cuda12 or cuda13 instead of cpu for a GPU"


class Finder(importlib.abc.MetaPathFinder):
    """Finds ``mxnet`` and its modules by the other finders, and makes their loaders run them by ``_execute``."""

    def __init__(self) -> None:
        self.after: list[Callable[[], None]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec; None for other packages, and if MXNet is not installed."""
        if fullname.partition(".")[0] != "mxnet":
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = partial(_execute, spec.loader.exec_module, self.after if fullname == "mxnet" else ())
            spec.loader.exec_module = execute  # type: ignore[method-assign] # each spec has its own loader
        return spec


def _execute(execute: Callable[[ModuleType], None], after: Sequence[Callable[[], None]], module: ModuleType) -> None:
    """Run a module of MXNet with its own ``__builtins__``, then patch it and call each of ``after``.

    Raises MXNetImportError if a library is missing, two builds are installed, or this process cannot import MXNet.
    """
    vars(module)["__builtins__"] = builtins_with_shims()
    if module.__name__ == "mxnet":
        _run_mxnet(module, execute)
    else:
        execute(module)
    patch(module)
    for call in after:
        call()


def _run_mxnet(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    builds = _builds(Path(module.__file__).parent.parent) if module.__file__ else []
    if len(builds) > 1:
        raise MXNetImportError(
            f"expected one build of MXNet, found {' and '.join(builds)}, which overwrite each other's files: "
            f"pip uninstall {' '.join(builds)}, then install one of them"
        )
    threads = os.environ.get("OMP_NUM_THREADS", "").strip()
    # With another value, MXNet's library would end the process.
    if not re.fullmatch(r"([+-]?[0-9]{1,10})?", threads) or abs(int(threads or 0)) >= 1 << 31:
        raise MXNetImportError(f"OMP_NUM_THREADS: expected one whole number below 2**31, got {threads!r}")
    if sys.flags.optimize > 1:
        raise MXNetImportError("MXNet needs its docstrings: run Python without -OO, and without PYTHONOPTIMIZE=2")
    if any("cu11" in build for build in builds):
        from ece408_op.runtime.shared_libraries import load_libraries

        load_libraries(CUDA11_LIBRARIES)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))  # libgomp reads the variable when it is loaded
    try:
        execute(module)
    except OSError as error:
        missing = re.match(r"(lib[\w.+-]+): cannot open shared object", str(error))
        if missing is None:
            raise
        raise MXNetImportError(f"MXNet needs the library {missing[1]}: {_origin(missing[1])}") from error


def _origin(library: str) -> str:
    if library == "libgomp.so.1":
        return "install the system's package for it (Debian and Ubuntu: apt-get install libgomp1)"
    if library in CUDA11_LIBRARIES:
        return f"{_command('cu117')} brings it"
    if library == "libcuda.so.1":
        return f"it comes with NVIDIA's driver; without one, pip uninstall this build and {_command('cpu')}"
    return "install the system's package for it"


def _builds(site: Path) -> list[str]:
    """Return the distributions in a site-packages folder that own the package mxnet: "mxnet", "mxnet-cu117", ..."""
    found = (re.match(r"(mxnet(?:[-_]cu\d+)?)-", path.name) for path in site.glob("mxnet*.dist-info"))
    return sorted({match[1].replace("_", "-") for match in found if match})
