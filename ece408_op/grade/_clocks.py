"""Is the machine as fast as before? The reference workload's times, and one timed call at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Measured(Protocol):
    """A device: its name, how much slower its reference workload may become, and that workload."""

    device_name: str
    most_drift: float
    gpu: bool

    def reference_seconds(self) -> float:
        """Seconds of the reference workload."""
        ...


#: Readings before a call while an idle chip raises its clocks.
_WAKING = 40


class ClockCheck:
    """Compares each reading with the best of that device since the harness began."""

    def __init__(self) -> None:
        self._best: dict[str, float] = {}
        self._lock = threading.Lock()

    def read(self, device: Measured) -> float:
        """One reading, in seconds."""
        seconds = device.reference_seconds()
        with self._lock:
            self._best[device.device_name] = min(seconds, self._best.get(device.device_name, seconds))
        return seconds

    def steady(self, device: Measured) -> float:
        """Read until a GPU is as fast as ever, or for a while: an idle chip has low clocks."""
        seconds = self.read(device)
        for _ in range(_WAKING if device.gpu else 0):
            if not self.disturbed(device, seconds):
                break
            seconds = self.read(device)
        return seconds

    def disturbed(self, device: Measured, *seconds: float) -> bool:
        """Was one of the readings slower than the device should be?"""
        return max(seconds) > device.most_drift * self._best[device.device_name]


class Turns:
    """Lets many threads compile and check at a time, but one call be timed alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working = self._waiting = 0
        self._timing = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """The thread works, and waits while a call is timed or is to be."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._timing or self._waiting))
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Within ``working``: no other thread works."""
        with self._changed:
            self._working -= 1
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._timing or self._working))
            self._waiting -= 1
            self._timing = True
        try:
            yield
        finally:
            with self._changed:
                self._timing = False
                self._working += 1
                self._changed.notify_all()
