"""The record of calls, oldest first: forward calls of the operator, gradients, convolutions of ``gpu_network``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from ece408_op.problem import ConvProblem

#: The most calls in the record; then a new call replaces the oldest one.
CAPACITY = 10_000


class Timing(NamedTuple):
    """The time of a call, as in OpTime.

    As in the course, ``seconds`` excludes mapping the output's memory and waiting for inputs. On a GPU, the first run
    of a layer is not measured.
    """

    seconds: float
    copy_seconds: float = 0.0


@dataclass(frozen=True)
class OpTime:
    """One call of the operator.

    Attributes:
        layer: the layer's name, or None if it has none.
        problem: the sizes of the convolution; a DataGradient or WeightGradient for a gradient.
        implementation: the name of the kernel.
        device: "cpu" or "gpu".
        seconds: the Op Time, that of the computation only; on a GPU, between two events around the kernel.
        copy_seconds: the additional seconds for copies to a GPU and back. Copies and computation overlap, and together
            take seconds + copy_seconds.
        call_seconds: the whole call: choosing and compiling the kernel, mapping memory, copies, computation.
    """

    layer: str | None
    problem: ConvProblem
    implementation: str
    device: str
    seconds: float
    copy_seconds: float = 0.0
    call_seconds: float = 0.0


class Later:
    """Calls whose times are computed when somebody asks for them first; ``made`` returns them, and is then dropped."""

    def __init__(self, made: Callable[[], Sequence[OpTime]]) -> None:
        self._made: Callable[[], Sequence[OpTime]] | None = made
        self._calls: Sequence[OpTime] = ()

    def make(self) -> None:
        """Compute the times, unless that is done; two threads at once may both compute them."""
        made = self._made
        if made:
            self._calls = made()
            self._made = None

    def calls(self) -> Sequence[OpTime]:
        """Return the calls."""
        self.make()
        return self._calls


_calls: deque[OpTime | Later] = deque(maxlen=CAPACITY)
_lock = Lock()


def record(call: OpTime | Later) -> None:
    """Add a call to the record, or calls whose times are computed when the record is read; safe from any thread."""
    with _lock:
        _calls.append(call)


def op_times() -> list[OpTime]:
    """Return the recorded calls of the operator, oldest first, at most 10,000.

    A backward pass adds an entry per gradient to data or weight.
    MXNet runs operators asynchronously: wait for their outputs (``wait_to_read``, ``asnumpy``, ``mx.nd.waitall``)
    before reading the record.
    """
    with _lock:
        calls = list(_calls)
    newest: list[OpTime] = []
    while calls and len(newest) < CAPACITY:
        call = calls.pop()
        newest += [call] if isinstance(call, OpTime) else reversed(call.calls())
    return newest[CAPACITY - 1 :: -1]


def clear_op_times() -> None:
    """Remove all calls from the record."""
    with _lock:
        _calls.clear()
