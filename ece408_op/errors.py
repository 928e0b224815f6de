"""Every error that ece408_op raises on purpose.

    Ece408Error
    +-- ProblemError (ValueError)        shapes, types or attributes that no convolution fits
    +-- UnsupportedError (ValueError)    a sound problem that the kernel asked for does not take
    +-- DeviceError (RuntimeError)       this machine or these arrays cannot do what was asked
    +-- GraphError (ValueError)          a symbol or parameter file that cannot be used
    +-- DataError (ValueError)           an image or label file that cannot be used
    +-- MXNetImportError (ImportError)   MXNet is missing, or two builds of it are in each other's way

A message says what was expected, what came, and what to do about it.
"""


class Ece408Error(Exception):
    """The root: catch it to catch every error of this package."""


class ProblemError(Ece408Error, ValueError):
    """Shapes, types or attributes that no convolution fits."""


class UnsupportedError(Ece408Error, ValueError):
    """A sound problem that the kernel asked for does not take; the message has every reason."""


class DeviceError(Ece408Error, RuntimeError):
    """This machine, or the device that the arrays live on, cannot do what was asked."""


class GraphError(Ece408Error, ValueError):
    """A symbol or parameter file that cannot be used; the message names file and node."""


class DataError(Ece408Error, ValueError):
    """An image or label file that cannot be used; the message names the file."""


class MXNetImportError(Ece408Error, ImportError):
    """MXNet is missing, or two builds of it are in each other's way."""
