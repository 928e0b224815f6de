"""The record of calls: one entry for each forward of the operator, oldest first, bounded in number."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from ece408_op.problem import ConvProblem

#: Calls that are remembered; older ones are forgotten.
CAPACITY = 10_000


class Timing(NamedTuple):
    """What a call took.

    ``seconds`` is the interval around the computation alone, as the original's Op Time: the output's memory is mapped
    before it begins; no copies, no waiting for inputs; on a GPU, between events around the kernel, a layer's
    unmeasured first run left out.
    ``copy_seconds`` is what the call took on top of that where its arrays were copied to a GPU and back: copies
    and computing overlap, and together they took ``seconds + copy_seconds``.
    """

    seconds: float
    copy_seconds: float = 0.0


@dataclass(frozen=True)
class OpTime:
    """One call of the operator; ``layer`` is the layer's name where the graph tool or the builder knew it.

    ``seconds`` and ``copy_seconds`` are those of ``Timing``. ``call_seconds`` is the operator's whole forward: choosing
    and compiling the kernel, mapping the output's memory, copies and the computation.
    """

    layer: str | None
    problem: ConvProblem
    implementation: str
    device: str
    seconds: float
    copy_seconds: float = 0.0
    call_seconds: float = 0.0


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
