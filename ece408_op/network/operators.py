"""The table of operators that a network may have; graphs, tests and errors read it."""

from __future__ import annotations

from .elementwise import ELEMENTWISE
from .kinds import by_name
from .layers import LAYERS
from .pooling import POOLING
from .shaping import SHAPING

OPERATORS = by_name((*LAYERS, POOLING, *ELEMENTWISE, *SHAPING))
