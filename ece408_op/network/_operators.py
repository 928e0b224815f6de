"""The table of operators that a network may have, by their names in MXNet's graphs."""

from __future__ import annotations

from collections.abc import Mapping

from ._definition import Operator
from ._elementwise import Activation, Arithmetic, Clip, Function, LeakyReLU, Sum, WithScalar
from ._layers import BatchNorm, Convolution, FullyConnected, New
from ._moving import OneLong, Part, UpSampling
from ._pooling import Pooling
from ._shaping import Concat, Dropout, Flatten, Identity, Reduction, Reshape, Softmax, SoftmaxOutput, Transpose

_CLASSES: tuple[type[Operator], ...] = (
    *(Convolution, New, FullyConnected, BatchNorm, Pooling),
    *(Activation, LeakyReLU, Clip, Function, WithScalar, Arithmetic, Sum),
    *(Identity, Flatten, Dropout, Reshape, OneLong, Transpose, Concat, Part, UpSampling),
    *(Reduction, Softmax, SoftmaxOutput),
)
OPERATORS: Mapping[str, type[Operator]] = {name: kind for kind in _CLASSES for name in kind.names}
