"""Run a compiled program in a process of its own, and read what it found."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ._build import header_folders

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
class Call:
    """One call of a program's function: its buffers, and whole numbers."""

    buffers: Sequence[Buffer]
    parameters: Sequence[int]


@dataclass(frozen=True)
class Outcome:
    """The results of a call.

    Attributes:
        outputs: the outputs by name.
        rows: the words of the report's lines, as ``native/main.cpp`` writes them, by the first word.
        printed: what the program printed until its end.
    """

    outputs: dict[str, np.ndarray]
    rows: dict[str, list[list[str]]]
    printed: str


def execute(executable: Path, calls: Sequence[Call], seconds: float) -> list[Outcome]:
    """Make the calls in one process, each within the seconds.

    A call that ends the process is the last one; where it leaves no report, a finding of kind "crash" is all.
    """
    with tempfile.TemporaryDirectory(prefix="ece408-emulator-") as name:
        folder = Path(name)
        with open(folder / "job", "wb") as job:
            job.write(_numbers(len(calls)))
            for call in calls:
                job.writelines(_described(call))
        try:
            done = subprocess.run(
                [str(executable), "job", str(seconds)], cwd=folder, check=False, capture_output=True,
                timeout=len(calls) * seconds + 10, preexec_fn=_limit, stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            # It fails again where it would write its report: native/main.cpp.
            said = "the host's code has overwritten memory that is not its own" if done.returncode == 113 else "exit {}"
            end, printed = said.format(done.returncode), done.stdout + done.stderr
        except subprocess.TimeoutExpired as late:
            end, printed = f"it ran longer than {seconds:g} s", (late.stdout or b"") + (late.stderr or b"")
        text = printed.decode(errors="replace")
        found: list[Outcome] = []
        for number, call in enumerate(calls):
            report = folder / f"report-{number}"
            if not report.is_file():
                if not (found and "ended" in found[-1].rows):  # nothing says yet why there is none
                    outputs = {each.name: each.array for each in call.buffers if each.output}
                    rows = _rows(f"finding\tcrash\tthe program ended without a report ({end})\t0\t0\t1\nended")
                    found.append(Outcome(outputs, rows, text))
                break
            rows = _rows(report.read_text(encoding="utf-8", errors="replace"))
            found.append(Outcome(_outputs(call, (folder / f"output-{number}").read_bytes()), rows, text))
    return found


def _described(call: Call) -> Iterator[bytes]:
    """Yield a call as the program reads it: ``native/main.cpp``."""
    yield _numbers(len(call.buffers))
    for each in call.buffers:
        yield each.name.encode()[:31].ljust(32, b"\0")
        yield _numbers(each.array.nbytes, each.alignment, int(each.output))
    yield _numbers(len(call.parameters), *call.parameters)
    for each in call.buffers:
        yield np.ascontiguousarray(each.array).tobytes()


def _outputs(call: Call, content: bytes) -> dict[str, np.ndarray]:
    outputs, at = {}, 0
    for each in call.buffers:
        if each.output:
            flat = np.frombuffer(content, each.array.dtype, each.array.size, at)
            outputs[each.name] = flat.reshape(each.array.shape).copy()
            at += each.array.nbytes
    return outputs


def _rows(report: str) -> dict[str, list[list[str]]]:
    rows: dict[str, list[list[str]]] = {"finding": [], "launch": [], "counters": []}
    for line in report.rstrip("\n").split("\n"):
        first, *words = line.split("\t")
        rows.setdefault(first, []).append(words)
    return rows


def source_lines(executable: Path, source: str, codes: Sequence[int]) -> dict[int, tuple[str, int]]:
    """Return the file and line of the calls that return to these addresses, outside the headers that it gives.

    Of inlined functions, the call in the file of the name ``source``, if one is there, counts.
    """
    wanted = sorted({code for code in codes if code})
    if not wanted:
        return {}
    text = "".join(f"{code - 1:#x}\n" for code in wanted)
    command = ["addr2line", "-i", "-a", "-e", str(executable)]
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", errors="replace", check=False)
    frames: dict[int, list[tuple[str, int]]] = {}
    here: list[tuple[str, int]] = []
    for line in done.stdout.splitlines():
        if line.startswith("0x"):
            here = frames.setdefault(int(line, 16) + 1, [])
            continue
        file, _, number = line.partition(" (discriminator")[0].rpartition(":")
        # The C++ library's own lines say nothing to the reader.
        here.append((Path(file).name, int(number) if number.isdigit() and not file.startswith("/usr/") else 0))
    own = {path.name for folder in header_folders() for path in folder.rglob("*.h")}
    found = {}
    for code, all_frames in frames.items():
        outer = [frame for frame in all_frames if frame[0] not in own and frame[1]]
        found[code] = next((frame for frame in outer if frame[0] == source), outer[0] if outer else ("", 0))
    return found


def _numbers(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()


def _limit() -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
