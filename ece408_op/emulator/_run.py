"""Run a compiled program in a process of its own, and read what it found."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ._build import Program

#: Bytes of a file that a program may write.
_FILE = 4 << 30


@dataclass(frozen=True)
class Buffer:
    """A buffer of the emulated GPU, at a multiple of ``alignment`` bytes; below 256, at an odd multiple."""

    name: str
    array: np.ndarray
    alignment: int = 256
    output: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a run left: the outputs by name, the report's tables, and what the program printed."""

    outputs: dict[str, np.ndarray]
    tables: dict[str, Any]
    printed: str


def execute(program: Program, buffers: Sequence[Buffer], parameters: Sequence[int], seconds: float) -> Outcome:
    """Run the program; where it leaves no report, a finding of kind "crash" is all."""
    with tempfile.TemporaryDirectory(prefix="ece408-emulator-") as name:
        folder = Path(name)
        with open(folder / "job", "wb") as job:
            job.write(_numbers(len(buffers)))
            for each in buffers:
                job.write(each.name.encode()[:31].ljust(32, b"\0"))
                job.write(_numbers(each.array.nbytes, each.alignment, int(each.output)))
            job.write(_numbers(len(parameters), *parameters))
            for each in buffers:
                job.write(np.ascontiguousarray(each.array).data)
        command = [str(program.executable), "job", "output", "report", str(seconds)]
        try:
            done = subprocess.run(
                command, cwd=folder, check=False, capture_output=True, timeout=seconds + 10, preexec_fn=_limit,
                stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            end, printed = f"exit {done.returncode}", done.stdout + done.stderr
        except subprocess.TimeoutExpired as late:
            end, printed = f"it ran longer than {seconds:g} s", (late.stdout or b"") + (late.stderr or b"")
        report, text = folder / "report", printed.decode(errors="replace")
        if not report.is_file():
            outputs = {each.name: each.array for each in buffers if each.output}
            return Outcome(outputs, _ended(f"the program ended without a report ({end})"), text)
        content = (folder / "output").read_bytes()
        outputs, at = {}, 0
        for each in buffers:
            if each.output:
                flat = np.frombuffer(content, each.array.dtype, each.array.size, at)
                outputs[each.name] = flat.reshape(each.array.shape).copy()
                at += each.array.nbytes
        tables = json.loads(report.read_text(encoding="utf-8", errors="replace"))
    return Outcome(outputs, tables, text)


def _ended(message: str) -> dict[str, Any]:
    """Return the tables of a program that left none."""
    finding = {"kind": "crash", "message": message, "code": 0, "other": 0, "times": 1}
    finding.update(block=(0, 0, 0), thread=(0, 0, 0))
    return {"findings": [finding], "launches": [], "counters": []}


def places(program: Program, codes: Sequence[int]) -> dict[int, tuple[str, int]]:
    """Return the file and line of the calls that return to these addresses, outside the emulator's own headers."""
    wanted = sorted({code for code in codes if code})
    if not wanted:
        return {}
    text = "".join(f"{code - 1:#x}\n" for code in wanted)
    command = ["addr2line", "-i", "-a", "-e", str(program.executable)]
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", errors="replace", check=False)
    frames: dict[int, list[tuple[str, int]]] = {}
    here: list[tuple[str, int]] = []
    for line in done.stdout.splitlines():
        if line.startswith("0x"):
            here = frames.setdefault(int(line, 16) + 1, [])
            continue
        file, _, number = line.partition(" (")[0].rpartition(":")
        here.append((Path(file).name, int(number) if number.isdigit() else 0))
    own = {path.name for path in (Path(__file__).parent / "cuda").iterdir()}
    found = {}
    for code, all_frames in frames.items():
        outer = [frame for frame in all_frames if frame[0] not in own and frame[1]]
        found[code] = next((frame for frame in outer if frame[0] == program.source), outer[0] if outer else ("", 0))
    return found


def _numbers(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()


def _limit() -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
