"""Compare the emulator's counters with Nsight Compute's on the ladder's kernels.

    python benchmarks/emulator_counters.py measure FILE    # on a GPU: runs ncu, writes its counters as JSON
    python benchmarks/emulator_counters.py compare FILE    # anywhere: emulates the same launches, prints the table

Both run every kernel of ``kernels/cuda/ladder`` on three layers, two images each.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from ece408_op.core import dispatch
from ece408_op.core.kernel import CudaKernel

LAYERS = ("1x28x28x50x5", "6x30x30x16x5", "12x33x33x24x7")
IMAGES = 2
#: The emulator's counter: ncu's metrics, summed.
METRICS = {
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "load_instructions": "smsp__inst_executed_op_global_ld.sum",
    "store_instructions": "smsp__inst_executed_op_global_st.sum",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "shared_load_instructions": "smsp__inst_executed_op_shared_ld.sum",
    "shared_store_instructions": "smsp__inst_executed_op_shared_st.sum",
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
}
#: The kernel that profile.counters launches in front of each, to name it.
_MARK = "next_is_"


def ladder() -> list[CudaKernel]:
    """Return the kernels whose sources are in kernels/cuda/ladder."""
    found = (dispatch.find(name) for name in dispatch.names("gpu"))
    return [k for k in found if isinstance(k, CudaKernel) and k.sources[-1].parent.name == "ladder"]


def measure(layer: str) -> dict[str, dict[str, float]]:
    """Return ncu's counters by kernel, summed over its launches."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.csv"
        command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
        command += ["--log-file", str(log), "--metrics", ",".join(METRICS.values()), sys.executable, "-m"]
        command += ["ece408_op.profile.counters", layer, "--images", str(IMAGES), "--impl"]
        done = subprocess.run([*command, *(k.name for k in ladder()), "--launch"], check=False)
        lines = log.read_text().splitlines() if log.is_file() else []
        if done.returncode:
            raise SystemExit(f"ncu failed: {lines[-5:]}")
    found: dict[str, dict[str, float]] = {}
    sums: dict[str, float] = {}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        name = row["Kernel Name"].split("(")[0]
        if name.startswith(_MARK):
            sums = found.setdefault(name[len(_MARK) :], dict.fromkeys(METRICS, 0.0))
        elif row["ID"]:
            for counter, metric in METRICS.items():
                sums[counter] += float(row[metric].replace(",", ""))
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "compare"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.action == "measure":
        result = {layer: measure(layer) for layer in LAYERS}
        options.file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
