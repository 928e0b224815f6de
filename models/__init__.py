"""The course's five networks, and any others in this folder: their files, shapes, training and inference.

    from ece408_op import models
    models.list_names()                        # ['baseline', 'ece408-2018fa', ...]
    models.info("ece408-2018sp").image         # (1, 64, 64)

Errors are GraphErrors that name the file.

Public modules: inference (runs a network on a data set), train.
"""

from __future__ import annotations

from .files import Network, find, list_names, read_graph
from .shapes import ConvLayer, NetworkInfo, info, with_convolutions

__all__ = ("ConvLayer", "Network", "NetworkInfo", "find", "info", "list_names", "read_graph", "with_convolutions")
