"""The format of measured results, which every subcommand of ece408-bench writes with --json.

A file is JSON with these keys; times are in seconds everywhere:

    version       VERSION
    command       the subcommand: layers, networks, transfers, one-image or sweep
    command_line  the command as typed, for people
    complete      false during the run, and after Ctrl-C
    options       the options that decide what is measured
    machine       Machine: CPU, GPU, driver, versions of the packages
    ceilings      bytes_per_second and flops_per_second, as core.roofline.Ceilings; null if no row needs them
    cases         a list of Case: a layer or a network, with a list of Row, one per contestant and kind of call

A row without times has a reason: an output was wrong, or the contestant does not support the case. For readers without
this module, the writer adds ``median`` to a row, and ``flops`` and ``bytes`` to a case.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.data.atomic import write_text
from ece408_op.errors import DataError
from ece408_op.problem import ConvProblem

VERSION = 1

#: A row's status.
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

#: A row's kind of call. FRESH: a call that allocates its output. REUSED: a call that writes into an array that was
#: written before (out=). KERNEL: only the work on a GPU, between two events. FIRST: the first call, which compiles.
FRESH, REUSED, KERNEL, FIRST = "fresh", "reused", "kernel", "first"

#: The packages that a machine's versions name.
_PACKAGES = ("ece408-op", "mxnet", "mxnet-cu117", "numpy", "llvmlite", "torch", "cupti-python")


@dataclass(frozen=True)
class Gpu:
    """A GPU, and the CUDA versions of the driver's API, CuPy's runtime and NVRTC, such as "13.0"."""

    name: str
    capability: tuple[int, ...]
    multiprocessors: int
    driver: str
    runtime: str = ""
    nvrtc: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True)
class Machine:
    """A machine: the CPU's name, the cores that the process may use, threads, SIMD level, package versions."""

    cpu: str
    cores: int
    threads: int
    simd: str
    gpu: Gpu | None = None
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """The result of one contestant on one case, for one kind of call.

    contestant: the name in tables, such as "New auto" or "cuDNN float32 NHWC". call: FRESH, REUSED, KERNEL, FIRST or
    another kind that the subcommand's help explains. seconds: the time of each timed call; empty unless the status is
    PASSED. impl: the requested implementation, empty for a peer. kernel: the kernel that computed the output.
    precision: the type of its products. error: the largest |y - exact|. bound: the largest allowed error. Both are
    shares of the sum of |x||w| (for some kernels, of larger magnitudes: see core.kernel), or of a network's largest
    score.
    roofline_seconds: the larger of the memory roofline and the roofline of the units that the kernel used.
    details: figures of only one subcommand, such as ``launches`` of a GPU kernel or ``agreeing`` predictions.
    """

    contestant: str
    call: str
    seconds: tuple[float, ...] = ()
    status: str = PASSED
    reason: str = ""
    impl: str = ""
    kernel: str = ""
    precision: str = ""
    error: float | None = None
    bound: float | None = None
    roofline_seconds: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def peer(self) -> bool:
        """Return whether this is another library, with which implementations are compared."""
        return not self.impl

    @property
    def median(self) -> float | None:
        """The median time in seconds; None without times."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper quartile of the times in seconds; the row must have times."""
        low, high = np.quantile(self.seconds, (0.25, 0.75))
        return float(low), float(high)


@dataclass(frozen=True)
class Case:
    """The measurements of a layer (``problem``) or a network, for a number of images.

    roofline_seconds: the FP32 roofline of a layer, see core.roofline.
    """

    name: str
    images: int
    rows: tuple[Row, ...] = ()
    problem: ConvProblem | None = None
    roofline_seconds: float | None = None

    def row(self, contestant: str, call: str) -> Row | None:
        """Return the row of a contestant and kind of call; None if there is none."""
        return next((row for row in self.rows if (row.contestant, row.call) == (contestant, call)), None)

    def ratio(self, row: Row, peers: str = "") -> float | None:
        """Return the fastest peer's time divided by the row's, among peers whose names begin with ``peers``.

        Only peers' rows of the same kind of call count. None if the row, or every peer, has no time.
        """
        found = (r.median for r in self.rows if r.peer and r.call == row.call and r.contestant.startswith(peers))
        theirs = [median for median in found if median]
        return min(theirs) / row.median if theirs and row.median else None


@dataclass(frozen=True)
class Results:
    """One run of a subcommand; see the module for the keys."""

    command: str
    machine: Machine
    options: dict[str, Any] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    ceilings: dict[str, float] | None = None
    command_line: str = ""
    complete: bool = True

    @property
    def passed(self) -> bool:
        """Return whether no output was wrong."""
        return all(row.status != FAILED for case in self.cases for row in case.rows)


def mean_and_least(ratios: Iterable[float | None]) -> tuple[float, float] | None:
    """Return the geometric mean and the least ratio; None if any ratio is missing, or if there are none."""
    found = list(ratios)
    known = [ratio for ratio in found if ratio is not None]
    return (statistics.geometric_mean(known), min(known)) if known and len(known) == len(found) else None


def write(path: Path, results: Results) -> None:
    """Replace the file with the results; raises OSError if it cannot be written."""
    write_text(path, as_text(results))


def as_text(results: Results) -> str:
    """Return the file's text: one line per key and per row, so that people can read it and Git can compare it.

    Floats have nine significant digits, far finer than any clock.
    """
    data = {"version": VERSION, **asdict(results)}
    cases = [_case_line(case, written) for case, written in zip(results.cases, data.pop("cases"))]
    head = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join([*head, ' "cases": [' + ",".join(cases) + "\n ]"]) + "\n}\n"


def _case_line(case: Case, data: dict[str, Any]) -> str:
    rows = []
    for row, values in zip(case.rows, data.pop("rows")):
        # Of the times as they are written, so that a file that is read and written again stays the same.
        values["median"] = statistics.median(map(_rounded, row.seconds)) if row.seconds else None
        rows.append("\n   " + _line({key: value for key, value in values.items() if value not in ("", None, {}, ())}))
    if case.problem is not None:
        data |= {"problem": case.problem.sizes, "flops": case.problem.flops, "bytes": case.problem.bytes}
    head = _line({key: value for key, value in data.items() if value is not None})
    return f'\n  {head[:-1]}, "rows": [{",".join(rows)}]}}'


def _line(data: dict[str, Any]) -> str:
    return json.dumps(json.loads(json.dumps(data), parse_float=_rounded))


def _rounded(number: float | str) -> float:
    return float(f"{float(number):.9g}")


def read(path: Path) -> Results:
    """Return the results of a file; raises OSError if it cannot be read, DataError if it has another format."""
    try:
        return from_data(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: expected results of ece408-bench, version {VERSION}, got {error!r}") from error


def from_data(data: dict[str, Any]) -> Results:
    """Return the results that JSON's values describe; raises KeyError, TypeError or ValueError for other values."""
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']}")
    given = {name: data[name] for name in ("command", "options", "ceilings", "command_line", "complete")}
    gpu = data["machine"]["gpu"]
    machine = Machine(**{**data["machine"], "gpu": gpu and Gpu(**{**gpu, "capability": tuple(gpu["capability"])})})
    return Results(machine=machine, cases=tuple(map(_case, data["cases"])), **given)


def _case(data: dict[str, Any]) -> Case:
    rows = []
    for row in data["rows"]:
        values = {key: value for key, value in row.items() if key != "median"}
        rows.append(Row(**{**values, "seconds": tuple(values.get("seconds", ()))}))
    problem = ConvProblem(**data["problem"]) if "problem" in data else None
    return Case(data["name"], data["images"], tuple(rows), problem, data.get("roofline_seconds"))


def resumed(path: Path, run: Results) -> Results:
    """Return ``run`` with the cases and ceilings of an interrupted run of the same command, if the file has one.

    Raises ValueError if the file has an interrupted run with other options or on another machine.
    """
    try:
        begun = read(path)
    except (FileNotFoundError, DataError):
        return run  # an interrupted run leaves results, since its file is replaced as a whole
    if begun.complete:
        return run
    theirs, ours = (
        {"command": one.command, **one.options, **vars(one.machine), **one.machine.versions, "versions": None}
        for one in (begun, run)
    )
    for key in {**theirs, **ours}:
        if theirs.get(key) != ours.get(key):
            raise ValueError(
                f"--json: {path} has an interrupted run with another {key} ({theirs.get(key)}, this run: "
                f"{ours.get(key)}); choose another file, or delete this one"
            )
    return replace(run, cases=begun.cases, ceilings=begun.ceilings)


def this_machine(threads: int | None = None, gpu: bool = False) -> Machine:
    """Return the machine that runs this process, with its first GPU if ``gpu`` is True.

    Raises DeviceError if ``gpu`` is True and there is no GPU.
    """
    from ece408_op.runtime import cuda, host_cpu  # late: readers of results need neither

    cores, info = len(os.sched_getaffinity(0)), Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"^model name\s*: (.*)", info, re.MULTILINE)
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    if "mxnet" in sys.modules and "mxnet-cu117" not in versions:  # a folder on the path has no metadata
        versions["mxnet"] = sys.modules["mxnet"].__version__
    found = None
    if gpu:
        chip, cupy = cuda.chip(), cuda.cupy()
        runtime = cupy.cuda.runtime
        numbers = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        driver, own = (f"{n // 1000}.{n % 1000 // 10}" for n in numbers)
        nvrtc, memory = ".".join(map(str, chip.compiler)), int(runtime.memGetInfo()[1])
        found = Gpu(chip.name, chip.capability, chip.multiprocessors, driver, own, nvrtc, memory)
        versions["cupy"] = cupy.__version__
    cpu = name[1] if name else platform.machine()
    return Machine(cpu, cores, threads or cores, host_cpu.cpu().level, found, versions)
