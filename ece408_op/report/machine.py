"""What this machine is and can do, as data: python -m ece408_op.report.machine --json FILE."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ece408_op.bench import results
from ece408_op.core import roofline
from ece408_op.data.atomic import replacing
from ece408_op.errors import DeviceError
from ece408_op.plugin import bridge, mxnet_import
from ece408_op.runtime import cuda

from ._jobs import COUNTERS, DEVICE, GPU
from .counters import PROFILER


def facts() -> dict[str, Any]:
    """The machine: ``identity`` names it, ``cannot`` has the reason for each need that it does not meet."""
    mxnet_import.load()
    own = results.this_machine()
    cpu = {"cpu": own.cpu, "cores": own.cores, "threads": own.threads, "simd": own.simd}
    cannot = {GPU: bridge.gpu_problem("host"), DEVICE: bridge.gpu_problem("device")}
    gpu = None if cannot[GPU] else _gpu()
    cannot[COUNTERS] = cannot[GPU]
    if gpu is not None and shutil.which(PROFILER) is None:
        cannot[COUNTERS] = f"expected {PROFILER}, NVIDIA's Nsight Compute, on PATH, found none"
    return {
        "identity": [cpu["cpu"], f"{cpu['cores']} cores", gpu["name"] if gpu else "no GPU"],
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": gpu,
        "versions": _versions(own.versions),
        "cannot": cannot,
    }


def _gpu() -> dict[str, Any]:
    chip, runtime = cuda.chip(0), cuda.cupy().cuda.runtime
    major, minor, _ = _digits(runtime.driverGetVersion())
    ceilings = roofline.measure()
    return {
        "name": chip.name,
        "capability": ".".join(map(str, chip.capability)),
        "multiprocessors": chip.multiprocessors,
        "memory_bytes": runtime.memGetInfo()[1],
        "driver": _driver(),
        "driver_cuda": f"{major}.{minor}",
        "nvrtc": ".".join(map(str, cuda.cupy().cuda.nvrtc.getVersion())),
        "ceilings": asdict(ceilings),
    }


def _digits(number: int) -> tuple[int, int, int]:
    """13000 is CUDA 13.0."""
    return number // 1000, number % 1000 // 10, number % 10


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text(encoding="utf-8").splitlines()[0].split() if path.is_file() else []
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def _versions(found: dict[str, str]) -> dict[str, str]:
    # MXNet may lie in a folder without its metadata.
    if not any(name.startswith("mxnet") for name in found):
        found["mxnet"] = mxnet_import.load().__version__
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m ece408_op.report.machine", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write there instead of printing")
    options = parser.parse_args(arguments)
    try:
        words = json.dumps(facts(), indent=1)
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 3
    if options.json is None:
        print(words)
    else:
        with replacing(options.json) as file:
            file.write(words.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
