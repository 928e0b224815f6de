"""Count the bytes that GPU kernels move and the warps that they keep active: --help has an example.

NVIDIA's Nsight Compute (ncu) runs this module again with --launch. That run launches every kernel once on one layer,
each after an empty kernel whose name marks it, and ncu writes one line of CSV per launch.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ece408_op.commands import CANNOT, FAILED, OK, guard, whole_number
from ece408_op.core import dispatch
from ece408_op.core.kernel import CudaKernel
from ece408_op.data.atomic import output_file, write_text
from ece408_op.errors import DataError, DeviceError
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

PROFILER = "ncu"
MISSING = f"expected {PROFILER}, NVIDIA's Nsight Compute, on PATH, found none"

#: Metrics: bytes read from and written to the GPU's memory, bytes through L2; active warps in percent of the maximum.
SUMS = {"read": ["dram__bytes_read.sum"], "written": ["dram__bytes_write.sum"], "l2": ["lts__t_bytes.sum"]}
SHARES = {"occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active"}
_TIME = "gpu__time_duration.sum"

_MARKER = "next_is_"
#: The arguments of Python that run this command.
COMMAND = ("-m", "ece408_op.profile.counters")
#: Kernels that repeat their launches more often are left out, because ncu makes a launch about 100 times as long.
_MOST_REPEATS = 16
_TIMED_OUT = 124  # the exit code of coreutils' timeout, which ends ncu and what it started
#: Four of these bytes are 0.0115 in float32.
_FILL_BYTE = 0x3C


def collect_metrics(
    arguments: Sequence[str],
    sums: Mapping[str, Sequence[str]],
    shares: Mapping[str, str],
    seconds: float = 3600,
) -> dict[str, dict[str, float]]:
    """Run Python with these arguments under ncu, with unlocked clocks; return figures by name of ``launch_marker``.

    A figure of ``sums`` adds up its metrics over all launches after the mark. A figure of ``shares``, a metric in
    percent, is averaged over these launches, weighted by their times. Raises DeviceError without ncu, and DataError if
    ncu fails, takes longer than ``seconds``, or may not read the counters.
    """
    if shutil.which(PROFILER) is None:
        raise DeviceError(MISSING)
    wanted = [_TIME, *shares.values(), *(metric for metrics in sums.values() for metric in metrics)]
    with tempfile.TemporaryDirectory(prefix="ece408-counters-") as scratch:
        log = Path(scratch) / "log.csv"
        command = ["timeout", f"{seconds:g}", PROFILER, "--csv", "--page", "raw", "--print-units", "base"]
        command += ["--clock-control", "none", "--metrics", ",".join(wanted)]
        command += ["--log-file", str(log), sys.executable, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = log.read_text(encoding="utf-8") if log.is_file() else ""
    if done.returncode:
        late, text = f"it took longer than {seconds:g} s", (done.stderr or done.stdout or lines).strip()[-500:]
        raise DataError(f"{PROFILER}: {late if done.returncode == _TIMED_OUT else text}")
    found: dict[str, list[dict[str, float]]] = {}
    launches: list[dict[str, float]] = []
    for line in csv.DictReader(line for line in lines.splitlines() if line.startswith('"')):
        name = line["Kernel Name"].split("(")[0]
        if name.startswith(_MARKER):
            launches = found.setdefault(name[len(_MARKER) :], [])
        elif line["ID"]:  # the line after the head has the units, and no ID
            launches.append({metric: _number(line.get(metric) or "") for metric in wanted})
    figures = {}
    for name, each in ((name, each) for name, each in found.items() if each):
        total = sum(one[_TIME] for one in each) or 1.0
        figures[name] = {key: sum(one[metric] for one in each for metric in sums[key]) for key in sums}
        figures[name] |= {key: sum(one[_TIME] * one[metric] for one in each) / total for key, metric in shares.items()}
    return figures


def _number(word: str) -> float:
    try:
        return float(word.replace(",", ""))
    except ValueError:
        raise DataError(f"{PROFILER}: expected a number, got {word!r}; may this user read the counters?") from None


def launch_marker(name: str) -> None:
    """Launch an empty kernel, so that ``collect_metrics`` gives ``name`` to the launches after it."""
    cuda.cupy().RawKernel(f'extern "C" __global__ void {_MARKER}{name}() {{}}', f"{_MARKER}{name}")((1,), (1,), ())


def launch(problem: ConvProblem, names: Sequence[str]) -> None:
    """Launch each kernel once; those that do not support the layer are left out. Raises DeviceError without a GPU."""
    cupy, chip = cuda.cupy(), cuda.chip()
    x, w, y = (cupy.empty(shape, "f") for shape in (problem.x_shape, problem.w_shape, problem.y_shape))
    for array in (x, w, y):
        array.data.memset(_FILL_BYTE, array.nbytes)  # a memset is not a kernel, so ncu does not list it
    aligned = cuda.alignment(x.data.ptr, w.data.ptr, y.data.ptr)
    for name in names:
        kernel = dispatch.find(name)
        if not isinstance(kernel, CudaKernel) or kernel.not_supported_reasons(problem, chip):
            continue
        if len(kernel.plan(problem, chip, aligned).launch_ranges(problem.batch)) <= _MOST_REPEATS:
            launch_marker(name)
            kernel.run(problem, x, w, y)
            cuda.wait(name, cupy.cuda.get_current_stream())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0 done, 1 failed, 2 usage, 3 no GPU or no ncu."""
    parser = argparse.ArgumentParser(
        prog="python -m ece408_op.profile.counters",
        description="Write the bytes that GPU kernels move and the warps that they keep active on one layer.",
        epilog="example: python -m ece408_op.profile.counters 1x28x28x50x5 --images 1000 --json counters.json",
    )
    parser.add_argument("layer", help="CxHxWxMxK")
    parser.add_argument("--images", type=whole_number(1), default=10_000, metavar="N", help="(default: 10000)")
    known = dispatch.names("gpu")
    parser.add_argument("--impl", nargs="+", metavar="NAME", choices=known, default=known, help="(default: all)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write there instead of printing")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.launch:
            channels, height, width, filters, kernel = map(int, options.layer.split("x"))
            launch(ConvProblem(options.images, channels, height, width, filters, kernel), options.impl)
            return OK
        again = [*COMMAND, options.layer, "--images", str(options.images), "--impl", *options.impl, "--launch"]
        found = collect_metrics(again, SUMS, SHARES)
    except (DataError, DeviceError) as error:
        print(error, file=sys.stderr)
        return FAILED if isinstance(error, DataError) else CANNOT
    for figures in found.values():
        figures["occupancy"] /= 100
    text = json.dumps(found, indent=1)
    if options.json is None:
        print(text)
    else:
        write_text(options.json, f"{text}\n")
    return OK


if __name__ == "__main__":
    sys.exit(guard("ece408_op.profile.counters", main))
