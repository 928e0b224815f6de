"""The table of operators that a network may have; graphs, tests and errors read it."""

from __future__ import annotations

from ._elementwise import ELEMENTWISE
from ._layers import LAYERS
from ._op_definition import by_name
from ._pooling import POOLING
from ._shaping import SHAPING

OPERATORS = by_name((*LAYERS, POOLING, *ELEMENTWISE, *SHAPING))
