"""The file that --json names: rewritten after each layer, so that an interrupted run can go on from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ece408_op.data.atomic import replacing

_COMPLETE = "complete"

#: What must be the same in a run that goes on from another one.
_SAME = ("options", "machine", "versions")


class Record:
    """The figures of one run in its file; without a file nothing is written and nothing is taken from one.

    facts: the options, the machine and the versions of the run.
    """

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        """Read the file. Raises ValueError where it holds an interrupted run with other facts, or can't be read."""
        self._path = path
        self._facts = facts
        #: Everything in the file of an interrupted run with the same facts; otherwise empty.
        self.begun: dict[str, Any] = {} if path is None else _begun(path, facts)

    def say_taken(self, done: int, count: int, what: str) -> None:
        """Print how much of the run the file has, if it has any; ``what`` names layers or networks."""
        if self.begun:
            print(f"{self._path}: {done} of {count} {what} taken from the interrupted run", file=sys.stderr)

    def write(self, data: dict[str, Any], complete: bool) -> None:
        """Replace the file by the facts and ``data``."""
        if self._path is None:
            return
        whole = {_COMPLETE: complete, **self._facts, **data}
        with replacing(self._path) as file:
            file.write(json.dumps(whole, indent=1).encode() + b"\n")


def _begun(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"--json: expected a file that can be read, got {path}: {error.strerror}") from None
    try:
        data = json.loads(content)
    except ValueError:
        return {}  # an interrupted run leaves JSON, since its file is replaced as a whole
    if not isinstance(data, dict) or data.get(_COMPLETE) is not False:
        return {}
    difference = _difference(data, json.loads(json.dumps(facts)))
    if difference:
        raise ValueError(
            f"--json: {path} holds an interrupted run with {difference}; choose another file, or delete this one"
        )
    return data


def _difference(data: dict[str, Any], facts: dict[str, Any]) -> str:
    """The first of the facts that the file's run does not share, in words; empty where there is none."""
    for part in _SAME:
        theirs, ours = data.get(part, {}), facts[part]
        for name in {**theirs, **ours}:
            if theirs.get(name) != ours.get(name):
                return f"other {part} ({name}: {theirs.get(name)}, this run: {ours.get(name)})"
    return ""
