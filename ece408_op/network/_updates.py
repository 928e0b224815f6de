"""Rules that update parameters, as MXNet's optimisers SGD and Adam compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np


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
