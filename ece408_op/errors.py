"""This package's exceptions, which also derive from Python's own.

A message has the expected value, the given value, and often the remedy.
"""


class Ece408Error(Exception):
    """The base class of every error of this package."""


class ProblemError(Ece408Error, ValueError):
    """Shapes, types or attributes that are not those of a convolution."""


class UnsupportedError(Ece408Error, ValueError):
    """A valid convolution that the requested kernel does not support; the message has every reason."""


class DeviceError(Ece408Error, RuntimeError):
    """A call that this machine, or the device of the arrays, cannot run."""


class GraphError(Ece408Error, ValueError):
    """A symbol or parameter file that cannot be used; the message names file and node."""


class DataError(Ece408Error, ValueError):
    """An image or label file that cannot be used; the message names the file."""


class MXNetImportError(Ece408Error, ImportError):
    """MXNet is missing, or two builds of it are installed over each other."""
