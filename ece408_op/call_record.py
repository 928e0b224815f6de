"""The record of calls: one entry for each forward of the operator, oldest first, bounded in number."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import Lock

from .problem import ConvProblem

#: Calls that are remembered; older ones are forgotten.
CAPACITY = 10_000


@dataclass(frozen=True)
class OpTime:
    """One call of the operator.

    ``seconds`` is the interval around the computation alone, as the original's Op Time: no copies, no
    waiting for inputs. ``layer`` is the layer's name where the graph tool or the builder knew it.
    """

    layer: str | None
    problem: ConvProblem
    implementation: str
    device: str
    seconds: float


_calls: deque[OpTime] = deque(maxlen=CAPACITY)
_lock = Lock()


def record(call: OpTime) -> None:
    """Add a call to the record; safe from any thread."""
    with _lock:
        _calls.append(call)


def op_times() -> list[OpTime]:
    """The calls recorded so far, oldest first.

    MXNet runs operators asynchronously: wait for their outputs (``wait_to_read``, ``asnumpy``,
    ``mx.nd.waitall``) before reading the record.
    """
    with _lock:
        return list(_calls)


def clear_op_times() -> None:
    """Forget all recorded calls."""
    with _lock:
        _calls.clear()
