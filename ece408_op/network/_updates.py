"""The update rules of MXNet's optimisers SGD and Adam on a GPU, and their launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ece408_op.runtime import cuda

from ._passes import program

#: Blocks per parameter.
_UPDATE_BLOCKS = 64


class Update(NamedTuple):
    """One parameter's update: CuPy float32 arrays of one shape. The parameter and its states change.

    rate: the learning rate. decay: the weight decay's factor.
    """

    parameter: Any
    gradient: Any
    states: Sequence[Any]
    rate: float
    decay: float


class Rule(NamedTuple):
    """An optimiser's rule: Adam (Kingma and Ba, 2015), or SGD, whose momentum is beta1.

    Adam's bias correction is part of each Update's rate. scale: the factor of gradients. clip: the limit of the
    absolute values of gradients' elements, infinite for no limit.
    """

    is_adam: bool
    scale: float
    clip: float
    beta1: float
    beta2: float = 0.0
    epsilon: float = 0.0

    @property
    def states(self) -> int:
        """The number of arrays in a parameter's state."""
        return 2 if self.is_adam else 1


def rows_of(updates: Sequence[Update]) -> np.ndarray:
    """Return ``struct Row`` of training.cu for each parameter: four addresses, the element count, and both factors."""
    factors = np.array([(one.rate, one.decay) for one in updates], np.float32).view(np.int64)
    rows = np.zeros((len(updates), 6), np.int64)
    addresses = [[array.data.ptr for array in (one.parameter, one.gradient, *one.states)] for one in updates]
    rows[:, : len(addresses[0])] = addresses
    rows[:, 4], rows[:, 5:] = [one.parameter.size for one in updates], factors
    return rows


@lru_cache(maxsize=64)
def update_program(rule: Rule, count: int) -> cuda.Program:
    """Return the program that updates ``count`` parameters by a rule; array x has the result of ``rows_of``."""
    complements = 1 - rule.beta1, 1 - rule.beta2
    numbers = rule.scale, rule.clip, rule.beta1, rule.beta2, *complements, rule.epsilon
    args, defines = ("x", *map(np.float32, numbers)), {"ADAM": int(rule.is_adam)}
    # A parameter may have any number of elements.
    return program("training.cu", "update", args, 1 << 31, defines, grid=(_UPDATE_BLOCKS, count))


def update(rule: Rule, updates: Sequence[Update]) -> None:
    """Update all parameters in one launch, on the current device and stream."""
    rows = cuda.cupy().asarray(rows_of(updates))
    cuda.execute(update_program(rule, len(rows)), 1, {"x": rows}, None)
