"""``gpusgd`` and ``gpuadam``: MXNet's optimisers SGD and Adam, which update the parameters on a GPU.

They are subclasses of MXNet's optimisers that replace only the update: learning rates and their schedule, weight decay,
the multipliers of single parameters, ``rescale_grad`` and ``clip_gradient`` work as in the base classes. A network
whose gradients stay on the GPU (``gpu_network(..., gradients="gpu")``) needs one of them; other gradients are copied to
the GPU. After the update, MXNet's arrays have the new parameters, and can be read, written and saved as always. The GPU
keeps a copy of the parameters until MXNet writes to the arrays again. MXNet does not count writes through shared
memory, as by ``to_dlpack_for_write``: after one, let MXNet write too, as by ``weight *= 1``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np

from ece408_op.errors import ProblemError
from ece408_op.plugin import array_version, bridge, engine_queue

from ._gpu_update import Operand, Rule, State, update


def _are_examined(weights: Sequence[Any], gradients: Sequence[Any], states: Sequence[Any]) -> bool:
    """Return whether one earlier call has examined exactly these arrays, none of them twice."""
    call = states[0].examined[2] if states and isinstance(states[0], State) else None
    return (call is not None and len({*map(id, states)}) == len(states)) and all(
        isinstance(state, State)
        and state.examined[0] is weight
        and state.examined[1] is gradient
        and state.examined[2] is call
        for weight, gradient, state in zip(weights, gradients, states)
    )


class _OnGpu(mx.optimizer.Optimizer):  # type: ignore[misc] # MXNet has no types
    """The base class of both optimisers."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        # MXNet passes all parameters in one call.
        self.aggregate_num = np.iinfo(np.int32).max

    def _rule(self) -> Rule:
        raise NotImplementedError

    def _rates(self, indices: Sequence[Any]) -> list[float]:
        return list(self._get_lrs(indices))

    def _limits(self) -> tuple[float, float]:
        """Return the factor of gradients and the limit of their absolute values."""
        # As in MXNet, a limit that is not positive means no limit.
        clip = self.clip_gradient
        return self.rescale_grad, clip if clip and clip > 0 else math.inf

    def create_state(self, index: Any, weight: Any) -> State:
        """Return a state of zeros; raises ProblemError for a parameter that is not float32 and dense in mx.cpu()."""
        self._check(weight, weight.shape, "parameters")
        return State([np.zeros(weight.shape, np.float32) for _ in range(self._rule().states)])

    def _examine(self, weight: Any, gradient: Any, state: Any) -> None:
        """Raise ProblemError unless the arrays are valid and the state is this class's, of the parameter's shape."""
        shape = weight.shape
        for array, words in ((weight, "parameters"), (gradient, "gradients")):
            self._check(array, shape, words)
        shapes = [shape] * self._rule().states
        if not isinstance(state, State) or state.shapes != shapes:
            got = f"arrays of the shapes {state.shapes}" if isinstance(state, State) else type(state).__name__
            name = type(self).__name__
            raise ProblemError(f"state: expected a state of {name} with arrays of the shapes {shapes}, got {got}")

    def _check(self, array: Any, shape: tuple[int, ...], words: str) -> None:
        """Raise ProblemError unless the array is dense, float32, of this shape and in mx.cpu()."""
        if array.dtype != np.float32 or array.stype != "default" or bridge.on_gpu(array) or array.shape != shape:
            expected = f"{type(self).__name__}: expected float32 {words}, dense, in mx.cpu(), of shape {shape}"
            got = f"{np.dtype(array.dtype).name}, {array.stype}, in {array.context}, of shape {array.shape}"
            raise ProblemError(f"{expected}, got {got}")

    def _check_apart(self, weights: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Raise ProblemError if parameters of one call share memory with each other or with gradients.

        MXNet's engine would deadlock: the call would wait for itself.
        """
        written, read = ({*map(array_version.variable_of, arrays)} for arrays in (weights, gradients))
        if len(written) < len(weights) or written & read:
            raise ProblemError(
                f"{type(self).__name__}: expected parameters that share no memory with each other or with gradients of "
                "the call, got views of one array or one array twice; update copies, or each view in a separate call"
            )

    create_state_multi_precision = create_state

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Queue the update of one parameter or of lists of them."""
        several = isinstance(index, (list, tuple))
        indices, weights, gradients, states = (list(one) if several else [one] for one in (index, weight, grad, state))
        if not _are_examined(weights, gradients, states):
            for one in zip(weights, gradients, states):
                self._examine(*one)
            if array_version.is_readable():  # called here first, since its trial must not run in MXNet's threads
                self._check_apart(weights, gradients)
            call = object()
            for weight_, gradient, state_ in zip(weights, gradients, states):
                state_.examined = weight_, gradient, call
        for number, one in zip(indices, states):
            # A loaded state has its count of updates, which Module does not save elsewhere.
            self._index_update_count.setdefault(number, max(self.begin_num_update, one.updates))
        addresses = zip(bridge.addresses(weights), bridge.addresses(gradients))
        self._update_count(indices)
        for number, one in zip(indices, states):
            one.updates = self._index_update_count[number]
        rates, decays = self._rates(indices), self._get_wds(indices)
        rule, operands = self._rule(), list(map(Operand, weights, gradients, addresses, states, rates, decays))
        engine_queue.queue(lambda: update(rule, operands), gradients, weights, type(self).__name__)

    update_multi_precision = update


@mx.optimizer.Optimizer.register
class GpuSGD(_OnGpu, mx.optimizer.SGD):  # type: ignore[misc]
    """MXNet's SGD on a GPU, with momentum; ``lazy_update`` and ``multi_precision`` have no effect.

    Args:
        keywords: those of mxnet.optimizer.SGD.

    Raises:
        ProblemError: a parameter or gradient is not float32 and dense in mx.cpu(), parameters of one call share
            memory, or a state is not this class's. If a gradient on a GPU was changed or already used, a wait for the
            first parameter raises it, and all parameters are unchanged.
        DeviceError: a GPU fails; raised by a wait for the first parameter. If the GPU lacked memory, its parameters and
            states are unchanged; otherwise they may be partly updated: load a checkpoint. Those of other GPUs may be
            updated.
    """

    def _rule(self) -> Rule:
        return Rule(False, *self._limits(), self.momentum)


@mx.optimizer.Optimizer.register
class GpuAdam(_OnGpu, mx.optimizer.Adam):  # type: ignore[misc]
    """MXNet's Adam on a GPU; ``lazy_update`` and ``multi_precision`` have no effect.

    Args:
        keywords: those of mxnet.optimizer.Adam.

    Raises:
        ProblemError, DeviceError: as GpuSGD.
    """

    def _rule(self) -> Rule:
        return Rule(True, *self._limits(), self.beta1, self.beta2, self.epsilon)

    def _rates(self, indices: Sequence[Any]) -> list[float]:
        counts = (self._index_update_count[number] for number in indices)
        return [
            rate * math.sqrt(1 - self.beta2**count) / (1 - self.beta1**count)
            for rate, count in zip(super()._rates(indices), counts)
        ]
