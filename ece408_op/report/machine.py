"""The machine of a report as data: python -m ece408_op.report.machine --json FILE."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ece408_op.bench import results
from ece408_op.core import roofline
from ece408_op.errors import DeviceError
from ece408_op.plugin import bridge, mxnet_import
from ece408_op.profile import counters

from ._commands import COUNTERS, GPU


def facts() -> dict[str, Any]:
    """The machine; ``cannot`` maps each need of a command to the reason why the machine lacks it, or None."""
    mxnet = mxnet_import.load()
    problem = bridge.gpu_problem("host")
    machine = results.this_machine(gpu=problem is None)
    machine.versions.setdefault("mxnet", mxnet.__version__)
    profiler = None if shutil.which(counters.PROFILER) else counters.MISSING
    return {
        "machine": asdict(machine),
        "ceilings": None if problem else asdict(roofline.measure()),
        "cannot": {GPU: problem, COUNTERS: problem or profiler},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "system": f"{platform.system()} {platform.release()}",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


if __name__ == "__main__":
    try:
        Path(sys.argv[-1]).write_text(json.dumps(facts(), indent=1), encoding="utf-8")
    except DeviceError as error:
        sys.exit(str(error))
