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

    def apply(self, xp: Any, one: Update) -> None:
        """Update a parameter and its states."""
        raise NotImplementedError

    def _clipped(self, xp: Any, gradient: Any) -> Any:
        return xp.clip(gradient, np.float32(-self.clip), np.float32(self.clip))


@dataclass(frozen=True)
class Sgd(Rule):
    """Stochastic gradient descent with momentum."""

    states = 1
    momentum: float = 0.0

    def apply(self, xp: Any, one: Update) -> None:
        gradient = self._clipped(xp, one.gradient * np.float32(self.scale))
        gradient += np.float32(one.decay) * one.parameter
        (momentum,) = one.states
        if self.momentum:
            momentum *= np.float32(self.momentum)
        else:
            # Not 0 times what a step with NaN or infinity has left.
            momentum[...] = 0
        momentum -= np.float32(one.rate) * gradient
        xp.add(one.parameter, momentum, out=one.parameter)


@dataclass(frozen=True)
class Adam(Rule):
    """Adam (Kingma and Ba, 2015); its bias correction is in the rate."""

    states = 2
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def apply(self, xp: Any, one: Update) -> None:
        gradient = one.gradient * np.float32(self.scale) + np.float32(one.decay) * one.parameter
        gradient = self._clipped(xp, gradient)
        mean, variance = one.states
        mean *= np.float32(self.beta1)
        mean += np.float32(1 - self.beta1) * gradient
        variance *= np.float32(self.beta2)
        variance += np.float32(1 - self.beta2) * gradient * gradient
        change = np.float32(one.rate) * mean / (xp.sqrt(variance) + np.float32(self.epsilon))
        xp.subtract(one.parameter, change, out=one.parameter)
