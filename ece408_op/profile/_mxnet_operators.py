"""Records MXNet's operators through MXNet's own profiler."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ece408_op.plugin import mxnet_import

from ._tables import OPERATOR, Activity

#: MXNet's profiler names the code of a Custom operator X "X::pure_python", and the operators that X calls "X::name".
#: New calls no operator.
_OWN_NAMES = {"New::pure_python": "New"}

_CUSTOM = "Custom Operator"

#: Without this setting, MXNet runs a network's operators in groups with one entry each, such as [Activation,Pooling].
SETTING = ("MXNET_EXEC_BULK_EXEC_INFERENCE", "0")


class Recorder:
    """Records until ``stop``, from its creation on or, if MXNet is not imported yet, from MXNet's import on."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ece408-profile-")
        self._file = Path(self._folder.name) / "operators.json"
        self._profiler: Any = None
        mxnet_import.install(self._start)

    def stop(self) -> list[Activity]:
        """End the recording when all operators have run; return its activities, none if MXNet was never imported."""
        with self._folder:
            if self._profiler is None:
                return []
            sys.modules["mxnet"].nd.waitall()
            self._profiler.set_state("stop")
            self._profiler.dump(True)
            return activities(json.loads(self._file.read_text(encoding="utf-8"))["traceEvents"])

    def _start(self) -> None:
        self._profiler = sys.modules["mxnet"].profiler
        self._profiler.set_config(profile_symbolic=True, profile_imperative=True, filename=str(self._file))
        self._profiler.set_state("run")


def activities(events: Iterable[dict[str, Any]]) -> list[Activity]:
    """Return the operators of a trace that MXNet's profiler wrote.

    The trace has each operator of the engine twice, by device ("B" and "E") and by thread ("b" and "e"); this function
    takes the entries by device. Custom operators have only entries by thread. In a thread, an operator's
    beginnings and ends alternate.
    """
    found = []
    begun: dict[tuple, dict[str, Any]] = {}
    for event in events:
        phase, custom = event["ph"], event.get("cat") == _CUSTOM
        if phase not in (("b", "e") if custom else ("B", "E")):
            continue
        key = (event["name"], event["tid"], custom)
        if phase in "bB":
            begun[key] = event
        elif key in begun:
            name = _OWN_NAMES.get(event["name"], event["name"])
            details = {} if name == event["name"] else {"mxnet_name": event["name"]}
            # MXNet's thread numbers are hashes of 64 bits.
            track = f"thread {event['tid'] % 100_000:05d}"
            start, end = 1000 * begun.pop(key)["ts"], 1000 * event["ts"]
            found.append(Activity(OPERATOR, name, start, end, track, details=details))
    return found
