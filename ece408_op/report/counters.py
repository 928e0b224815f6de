"""Bytes that GPU kernels moved, by the hardware's counters: python -m ece408_op.report.counters CxHxWxMxK --json FILE.

NVIDIA's Nsight Compute (``ncu``) watches ``launch_all`` and prints a line for each launch.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ece408_op.core import dispatch
from ece408_op.data.atomic import replacing
from ece408_op.errors import DataError

PROFILER = "ncu"

#: Bytes read from and written to the GPU's memory, bytes through the second-level cache, and the share of a
#: multiprocessor's warps that were there, in percent.
METRICS = {
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "cache": "lts__t_bytes.sum",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
}


def command(layer: Sequence[int], images: int, names: Sequence[str] | None, made: Path, log: Path) -> list[str]:
    """The profiler's command line around ``launch_all``; clocks are left alone."""
    watched = [sys.executable, "-m", "ece408_op.report.launch_all", *map(str, layer), "--images", str(images)]
    watched += ["--made", str(made)] + (["--kernels", *names] if names else [])
    options = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--log-file", str(log)]
    return [PROFILER, *options, "--metrics", ",".join(METRICS.values()), *watched]


def parse(lines: Iterable[str], made: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each kernel of ``made`` the sums over its launches; raises DataError where the lines are not theirs.

    Occupancy is a share from 0 to 1, the mean over the launches weighted by nothing; None without counters.
    """
    table = list(csv.DictReader(line for line in lines if line.startswith('"')))
    # The first line behind the head has the units.
    watched = [row for row in table if row["ID"]]
    count = sum(entry["launches"] for entry in made)
    if len(watched) != count:
        raise DataError(f"{PROFILER}: expected {count} launches, got {len(watched)}")
    rows, place = [], 0
    for entry in made:
        own = watched[place : place + entry["launches"]]
        place += entry["launches"]
        row = dict(entry)
        if own:
            figures = {key: [_number(line[metric]) for line in own] for key, metric in METRICS.items()}
            row.update({key: sum(values) for key, values in figures.items()})
            row["occupancy"] = row["occupancy"] / len(own) / 100
        rows.append(row)
    return rows


def _number(word: str) -> float:
    try:
        return float(word.replace(",", ""))
    except ValueError:
        raise DataError(f"{PROFILER}: expected a number, got {word!r}; may it read the counters?") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 1 failed, 2 usage, 3 no GPU or no profiler."""
    parser = argparse.ArgumentParser(prog="python -m ece408_op.report.counters", description=__doc__.split("\n")[0])
    parser.add_argument("layer", help="CxHxWxMxK")
    parser.add_argument("--images", type=int, required=True)
    parser.add_argument("--kernels", nargs="+", metavar="NAME", choices=dispatch.names("gpu"))
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    options = parser.parse_args(arguments)
    if shutil.which(PROFILER) is None:
        print(f"expected {PROFILER}, NVIDIA's Nsight Compute, on PATH, found none", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory(prefix="ece408-counters-") as scratch:
        made, log = Path(scratch) / "made.json", Path(scratch) / "log.csv"
        layer = [int(size) for size in options.layer.split("x")]
        done = subprocess.run(
            command(layer, options.images, options.kernels, made, log), capture_output=True, text=True, check=False
        )
        if done.returncode or not made.is_file():
            words = log.read_text(encoding="utf-8") if log.is_file() else ""
            print((done.stderr or done.stdout or words)[-500:], file=sys.stderr)
            return done.returncode if done.returncode == 3 else 1
        try:
            rows = parse(log.read_text(encoding="utf-8").splitlines(), json.loads(made.read_text(encoding="utf-8")))
        except DataError as error:
            print(error, file=sys.stderr)
            return 1
    with replacing(options.json) as file:
        file.write((json.dumps({"layer": layer, "images": options.images, "rows": rows}, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
