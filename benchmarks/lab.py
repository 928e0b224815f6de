"""Measure the seconds from saving a file to the first verdict of a running ``ece408-lab --watch``.

    python benchmarks/lab.py --json benchmarks/results/lab-times.json    # with --gpu, on a GPU

Each save changes the starter's text, so that the lab compiles it; the lab checks its default layers and images. The aim
on two cores is 1.5 s for a .h file, and 3 s for a CUDA file. Other work on the machine makes these times longer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from ece408_op.bench.results import this_machine
from ece408_op.lab import __path__ as folders

STARTERS = Path(folders[0]) / "starters"
AIMS = {"new-forward.h": 1.5, "my_kernel.cu": 3.0}


def seconds_to_verdict(name: str, gpu: bool, saves: int) -> list[float]:
    """Return the seconds of each save, without the first check, which fills the caches."""
    text, seconds = (STARTERS / name).read_text(encoding="utf-8"), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        # On a GPU the first check has 4 images anyway; so few make the times behind it short.
        way = ["--images", "4"] if gpu else ["--emulate"]
        command = [sys.executable, "-u", "-m", "ece408_op", "lab", str(path), "--watch", *way]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            for number in range(saves + 1):
                start = time.perf_counter()
                while not run.stdout.readline().startswith(f"{name}, "):
                    assert run.poll() is None
                seconds.append(round(time.perf_counter() - start, 3))
                print(f"{name}: save {number}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
                while not run.stderr.readline().startswith("waiting"):
                    assert run.poll() is None
                path.write_text(f"{text}// {number} {time.time()}\n", encoding="utf-8")
            run.terminate()
    return seconds[1:]


def main() -> int:
    """Print and write the seconds; return 1 if a median is above its aim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the CUDA file on a GPU alone")
    parser.add_argument("--saves", type=int, default=10, help="saves of each file (default: 10)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load, names = os.getloadavg()[0], [name for name in AIMS if name.endswith(".cu") or not options.gpu]
    found = {name: {"seconds": seconds_to_verdict(name, options.gpu, options.saves)} for name in names}
    medians = {name: statistics.median(one["seconds"]) for name, one in found.items()}
    print(medians)
    if options.json:
        machine = asdict(this_machine(gpu=options.gpu))
        result = {"files": found, "aims": AIMS, "load before": round(load, 1), "machine": machine}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(medians[name] > AIMS[name] for name in found))


if __name__ == "__main__":
    sys.exit(main())
