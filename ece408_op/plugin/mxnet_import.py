"""MXNet 1.9.1 on today's Python and NumPy, and the CUDA libraries that its GPU builds link to.

    import mxnet.x
      -> Finder     finds the module as Python would, and sets a loader of ours in front of its own
      -> Loader     gives the module builtins of its own, through which it alone sees the names that
                    today's NumPy and Python lack, runs it, and mends it (_compatibility.py)

``install`` has to run before MXNet is imported; where MXNet is loaded already it is left as it is.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ece408_op.errors import MXNetImportError

from ._compatibility import lent_builtins, mend

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


def warn_where_absent() -> None:
    """Warn, with what to install, where there is no MXNet: the kernels work without it, the operator does not."""
    if "mxnet" not in sys.modules and importlib.util.find_spec("mxnet") is None:
        warnings.warn(f"MXNet is not installed, so there is no operator New: {_how_to_install()}", stacklevel=3)


def _command(extra: str) -> str:
    from ece408_op.runtime.install_hint import command  # needs importlib.metadata, a third of this package's import

    return command(extra)


def _how_to_install() -> str:
    if sys.version_info >= (3, 13):
        return f"{_command('cpu')} && pip install --no-deps mxnet==1.9.1 (its metadata rules out this Python)"
    return f"{_command('cpu')}, or with cu117, cuda12 or cuda13 in the place of cpu for a GPU"


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
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code; raises MXNetImportError where a library or a sound installation is missing."""
        # Who asks a loaded module for its loader (inspect, pkgutil, reload) finds the original.
        module.__loader__ = self.inner
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        vars(module)["__builtins__"] = lent_builtins()
        if module.__name__ == "mxnet":
            _run_mxnet(module, self.inner)
        else:
            self.inner.exec_module(module)
        mend(module)
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
        from ece408_op.runtime.shared_libraries import load_libraries

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
        return f"{_command('cu117')} brings it"
    if library == "libcuda.so.1":
        return f"it comes with NVIDIA's driver; without one, pip uninstall this build and {_command('cpu')}"
    return "install the system's package for it"


def _builds(site: Path) -> list[str]:
    """The distributions in a site-packages folder that own the package mxnet: "mxnet", "mxnet-cu117", ..."""
    found = (re.match(r"(mxnet(?:[-_]cu\d+)?)-", path.name) for path in site.glob("mxnet*.dist-info"))
    return sorted({match[1].replace("_", "-") for match in found if match})
