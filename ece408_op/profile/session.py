"""A profile around a program: what starts it, what ends it, and what is written then."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ece408_op.data.atomic import replacing
from ece408_op.errors import DeviceError
from ece408_op.runtime import cuda

from . import _gpu, _operators, _tables, _trace, text
from ._activity import Profile

TEXT, DATA, TIMELINE = "profile.txt", "profile.json", "trace.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """--profile and --profile-out, as m1.py to m4.py have them."""
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print what the time went to: GPU kernels, copies and CUDA calls, and MXNet's operators",
    )
    parser.add_argument(
        "--profile-out",
        metavar="FOLDER",
        type=Path,
        help=f"profile, and write {TEXT}, {DATA} and {TIMELINE} (open it at ui.perfetto.dev) there",
    )


class Session:
    """A profile that runs from its making until ``finish``.

    on_gpu: whether a GPU is to be recorded too; out: the folder to write into, if any. Raises OSError where that
    cannot be made. Without CUPTI one sentence on stderr says what to install, and the rest is recorded.
    """

    def __init__(self, on_gpu: bool, out: Path | None = None) -> None:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._gpu: _gpu.Recorder | None = None
        self._notes: list[str] = []
        if on_gpu and cuda.driver_version() is not None:
            try:
                self._gpu = _gpu.Recorder()
            except DeviceError as error:
                print(error, file=sys.stderr)
                self._notes.append(str(error))
        name, value = _operators.SETTING
        os.environ.setdefault(name, value)
        self._operators = _operators.Recorder()
        self._start = time.perf_counter()

    def finish(self) -> Profile:
        """End the recording, print the tables to stdout, write the files; the profile."""
        found = self._operators.stop()
        seconds = time.perf_counter() - self._start
        recorder = self._gpu
        if recorder is None:
            profile = Profile(found, seconds=seconds, notes=tuple(self._notes))
        else:
            found += recorder.stop()
            lost = recorder.lost()
            if lost:
                self._notes.append(f"{lost} activities were lost: CUPTI had no room, or their form is unknown.")
            profile = Profile(found, recorder.devices, seconds, recorder.recorder_seconds, tuple(self._notes))
        words = text.as_text(profile)
        print(f"\n{words}", flush=True)
        if self._out is not None:
            _write(self._out / TEXT, words + "\n")
            _write(self._out / DATA, json.dumps(profile.as_data(), separators=(",", ":")) + "\n")
            _write(self._out / TIMELINE, json.dumps(_trace.events(profile), separators=(",", ":")) + "\n")
        return profile


def start(options: argparse.Namespace, on_gpu: bool) -> Session | None:
    """The session that a command line's options ask for; None where they ask for none."""
    if not options.profile and options.profile_out is None:
        return None
    return Session(on_gpu, options.profile_out)


def finish(session: Session | None) -> dict[str, Any] | None:
    """End a session, if there is one; its tables as data."""
    return None if session is None else _tables.summary(session.finish())


def _write(path: Path, words: str) -> None:
    with replacing(path) as file:
        file.write(words.encode())
