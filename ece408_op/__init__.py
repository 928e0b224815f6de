"""ece408_op: the convolution of the ECE408 course as a custom operator of today's MXNet.

    import ece408_op                 # first: then MXNet can be imported with any NumPy
    import mxnet as mx

    y = mx.nd.Custom(x, w, op_type="New", kernel=(5, 5), num_filter=50)

Importing this package is cheap, and only changes how MXNet is imported. As soon as MXNet is imported, the package
registers the operator.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

_root = Path(__file__).resolve().parent.parent
if not Path(__file__).with_name("kernels").exists() and (_root / "kernels" / "__init__.py").is_file():
    # In a checkout kernels/, models/ and data/ stand beside this package; a wheel has them inside it.
    __path__.append(str(_root))

from .plugin import mxnet_import  # noqa: E402 (the folders above must be found first)
from .plugin.op_times import OpTime, clear_op_times, op_times  # noqa: E402

if TYPE_CHECKING:
    from .graph.api import load_checkpoint, replace_convolution, save_checkpoint
    from .network.api import gpu_network
    from .plugin.builder import Convolution, New

__version__ = "0.1.0"

__all__ = [
    "Convolution",
    "New",
    "OpTime",
    "clear_op_times",
    "gpu_network",
    "load_checkpoint",
    "op_times",
    "replace_convolution",
    "save_checkpoint",
]

#: The modules of the names that need MXNet, which are imported at their first use.
_NEEDS_MXNET = {
    "New": "plugin.builder",
    "Convolution": "plugin.builder",
    "gpu_network": "network.api",
    "load_checkpoint": "graph.api",
    "replace_convolution": "graph.api",
    "save_checkpoint": "graph.api",
}


def __getattr__(name: str) -> Any:
    if name not in (*_NEEDS_MXNET, "gluon"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    mxnet_import.load()
    if name == "gluon":
        return import_module(".gluon", __name__)
    return getattr(import_module(f".{_NEEDS_MXNET[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _connect() -> None:
    import_module(".plugin.connect", __name__).connect()
    import_module(".network.operator", __name__).register()


mxnet_import.install(after=_connect)
mxnet_import.warn_where_absent()
