"""Records MXNet's operators through MXNet's own profiler."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Callable

from ece408_op.plugin import mxnet_import

from ._activity import OPERATOR, Activity

#: MXNet's profiler calls a Custom operator's own code X::pure_python, and the operators that it calls X::name.
#: New calls none: all of it is its own.
_OWN_NAMES = {"New::pure_python": "New"}

_CUSTOM = "Custom Operator"

#: Without it MXNet runs a network's operators in groups, and a group has one entry: [Activation,Pooling].
SETTING = ("MXNET_EXEC_BULK_EXEC_INFERENCE", "0")


class Recorder:
    """Records from the moment that MXNet is imported, or from now on where it is, until ``stop``."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ece408-profile-")
        self._file = Path(self._folder.name) / "operators.json"
        self._profiler: Any = None
        _after_import(self._start)

    def stop(self) -> list[Activity]:
        """End the recording, once all operators have run; none where MXNet was never imported."""
        if self._profiler is None:
            self._folder.cleanup()
            return []
        sys.modules["mxnet"].nd.waitall()
        self._profiler.set_state("stop")
        self._profiler.dump(True)
        found = activities(json.loads(self._file.read_text(encoding="utf-8"))["traceEvents"])
        self._folder.cleanup()
        return found

    def _start(self) -> None:
        self._profiler = sys.modules["mxnet"].profiler
        self._profiler.set_config(profile_symbolic=True, profile_imperative=True, filename=str(self._file))
        self._profiler.set_state("run")


def activities(events: Iterable[dict[str, Any]]) -> list[Activity]:
    """The operators of a trace that MXNet's profiler wrote.

    It has each operator of the engine twice, by device ("B" and "E") and by thread ("b" and "e"), of which the first
    is taken; Custom operators have the second alone. A beginning and its end follow each other, thread by thread.
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
            continue
        start = begun.pop(key, None)
        if start is None:
            continue
        name = _OWN_NAMES.get(event["name"], event["name"])
        details = {} if name == event["name"] else {"mxnet_name": event["name"]}
        # MXNet's numbers of threads are hashes of 64 bits.
        place = f"thread {event['tid'] % 100_000:05d}"
        found.append(Activity(OPERATOR, name, 1000 * start["ts"], 1000 * event["ts"], place, details=details))
    return found


def _after_import(call: Callable[[], None]) -> None:
    """Call it once MXNet is imported, now where it is."""
    if "mxnet" in sys.modules:
        call()
        return
    for finder in sys.meta_path:
        if isinstance(finder, mxnet_import.Finder):
            finder.after = partial(_in_turn, finder.after, call)


def _in_turn(*calls: Callable[[], None] | None) -> None:
    for call in calls:
        if call is not None:
            call()
