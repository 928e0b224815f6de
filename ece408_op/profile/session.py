"""Profile a program: the options, the start, the end, and the files that the end writes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ece408_op.commands import print_lines
from ece408_op.data.atomic import output_folder, write_text
from ece408_op.errors import DeviceError
from ece408_op.runtime import cuda

from . import _cupti, _mxnet_operators, _tables, _trace

TEXT, DATA, TIMELINE = "profile.txt", "profile.json", "trace.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options --profile and --profile-out of m1.py to m4.py."""
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print where the time goes: GPU kernels, copies and CUDA calls, and MXNet's operators",
    )
    parser.add_argument(
        "--profile-out",
        metavar="FOLDER",
        type=output_folder,
        help=f"profile, and write {TEXT}, {DATA} and {TIMELINE} (open it at ui.perfetto.dev) there",
    )


class Session:
    """A profile that records from its creation until ``finish``.

    on_gpu: whether to record a GPU too; out: the folder to write into, if any. Raises OSError if it cannot be created.
    Without CUPTI, a sentence on stderr says what to install, and the rest is recorded.
    """

    def __init__(self, on_gpu: bool, out: Path | None = None) -> None:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._gpu: _cupti.Recorder | None = None
        self._notes: list[str] = []
        if on_gpu and cuda.driver_version() is not None:
            try:
                self._gpu = _cupti.Recorder()
            except DeviceError as error:
                print(error, file=sys.stderr)
                self._notes.append(str(error))
        os.environ.setdefault(*_mxnet_operators.SETTING)
        self._operators = _mxnet_operators.Recorder()
        self._start = time.perf_counter()

    def finish(self) -> dict[str, Any]:
        """End the recording, print the tables to stdout and write the files; returns the tables as data."""
        activities = self._operators.stop()
        seconds = time.perf_counter() - self._start
        overhead = None
        if self._gpu is not None:
            activities += self._gpu.stop()
            overhead = self._gpu.overhead_seconds
            lost = self._gpu.lost()
            if lost:
                self._notes.append(f"{lost} activities were lost: CUPTI had no room, or their form is unknown.")
        profile = _tables.Profile(activities, seconds, overhead, tuple(self._notes))
        printed = _tables.as_text(profile)
        print_lines(["", printed])
        if self._out is not None:
            for name, content in ((DATA, profile), (TIMELINE, _trace.events(profile))):
                write_text(self._out / name, json.dumps(content, default=vars, separators=(",", ":")) + "\n")
            write_text(self._out / TEXT, f"{printed}\n")
        return _tables.summary(profile)


def start(options: argparse.Namespace, on_gpu: bool) -> Session | None:
    """Start the session that a command line's options ask for; return None if they ask for none."""
    if not options.profile and options.profile_out is None:
        return None
    return Session(on_gpu, options.profile_out)
