"""Rules that update parameters, as MXNet's optimisers SGD and Adam compute them, and their launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ece408_op.runtime import cuda

from ._passes import program

#: Blocks that update a parameter.
_UPDATE_BLOCKS = 64


class Update(NamedTuple):
    """One parameter's update: float32 arrays of one shape; parameter and states change.

    parameter, gradient, states: of one library. rate: the learning rate; decay: the factor of the weight decay.
    """

    parameter: Any
    gradient: Any
    states: Sequence[Any]
    rate: float
    decay: float


@dataclass(frozen=True)
class Rule:
    """scale: the factor of gradients. clip: the largest absolute value of their elements, infinite for no limit."""

    #: How many arrays the state of a parameter has.
    states: ClassVar[int]
    scale: float = 1.0
    clip: float = np.inf


@dataclass(frozen=True)
class Sgd(Rule):
    """Stochastic gradient descent with momentum; ``training.cu`` computes it."""

    states = 1
    momentum: float = 0.0


@dataclass(frozen=True)
class Adam(Rule):
    """Adam (Kingma and Ba, 2015); its bias correction is in the rate."""

    states = 2
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


def rows_of(updates: Sequence[Update]) -> np.ndarray:
    """Return the parameters' rows for the update: the addresses, the numbers of elements, and both factors' bits."""
    factors = np.array([(one.rate, one.decay) for one in updates], np.float32).view(np.int64)
    rows = np.zeros((len(updates), 6), np.int64)
    addresses = [[array.data.ptr for array in (one.parameter, one.gradient, *one.states)] for one in updates]
    rows[:, : len(addresses[0])] = addresses
    rows[:, 4], rows[:, 5:] = [one.parameter.size for one in updates], factors
    return rows


def update(rule: Sgd | Adam, updates: Sequence[Update]) -> None:
    """Update all parameters in one launch, on the current device and stream."""
    rows = cuda.cupy().asarray(rows_of(updates))
    cuda.execute(update_program(rule, len(rows)), 1, {"x": rows}, None)


@lru_cache(maxsize=64)
def update_program(rule: Sgd | Adam, count: int) -> cuda.Program:
    """Return the update of ``count`` parameters by a rule; array x has their rows."""
    numbers = [rule.scale, rule.clip]
    if isinstance(rule, Adam):
        numbers += [rule.beta1, rule.beta2, 1 - rule.beta1, 1 - rule.beta2, rule.epsilon]
    else:
        numbers += [rule.momentum, 0, 0, 0, 0]
    args, defines = ("x", *map(np.float32, numbers)), {"ADAM": int(isinstance(rule, Adam))}
    # A parameter may have any number of elements.
    return program("training.cu", "update", args, 1 << 31, defines, grid=(_UPDATE_BLOCKS, count))
