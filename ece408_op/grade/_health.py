"""Is the machine as it was? A fixed computation, timed again and again, and what the driver says of the chip."""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from typing import Any, Protocol


class Side(Protocol):
    """What can be measured: a device's name, how slow its computation may become, and the computation."""

    device_name: str
    most_drift: float

    def thermometer(self) -> float:
        """Seconds of the fixed computation."""
        ...


#: Readings before a call while the chip comes up from a rest; beyond them it is as it is.
_WAKING = 40


class Thermometer:
    """Each reading is held against the best that the device has shown since the harness began."""

    def __init__(self) -> None:
        self._best: dict[str, float] = {}
        self._lock = threading.Lock()

    def read(self, side: Side) -> float:
        """One reading, in seconds."""
        seconds = side.thermometer()
        with self._lock:
            self._best[side.device_name] = min(seconds, self._best.get(side.device_name, seconds))
        return seconds

    def steady(self, side: Side) -> float:
        """Read until the device is as quick as ever, or for a while: a resting chip has low clocks."""
        seconds = self.read(side)
        for _ in range(_WAKING if side.device_name not in ("cpu",) else 0):
            if not self.disturbed(side, seconds):
                break
            seconds = self.read(side)
        return seconds

    def disturbed(self, side: Side, *seconds: float) -> bool:
        """Was one of the readings slower than the device should be?"""
        return max(seconds) > side.most_drift * self._best[side.device_name]


@cache
def _nvml() -> Any:
    """NVIDIA's management library, or None: the package nvidia-ml-py, of the extra ``nvml``, is not always there."""
    try:
        library = import_module("pynvml")
        library.nvmlInit()
    except Exception:  # what is missing differs from machine to machine, and nothing depends on it
        return None
    return library


@cache
def _handle(bus: str) -> Any:
    return _nvml().nvmlDeviceGetHandleByPciBusId(bus.encode())


def chip_state(bus: str) -> dict[str, int] | None:
    """Temperature (degrees Celsius) and clocks (MHz) of the GPU at a PCI bus address; None where NVML is missing."""
    library = _nvml()
    if library is None:
        return None
    try:
        handle = _handle(bus)
        return {
            "celsius": int(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)),
            "sm_megahertz": int(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)),
            "memory_megahertz": int(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_MEM)),
        }
    except library.NVMLError:
        return None
