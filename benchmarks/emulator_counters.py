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

import numpy as np

from ece408_op.core import dispatch
from ece408_op.core.kernel import CudaKernel
from ece408_op.emulator.plans import Case, Plans
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip

LAYERS = ("1x28x28x50x5", "6x30x30x16x5", "12x33x33x24x7")
IMAGES = 2
H200 = Chip("NVIDIA H200", (9, 0), 132, 227 * 1024)
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


def emulate(layer: str, folder: Path | None) -> dict[str, dict[str, float]]:
    """Return the emulator's counters by kernel."""
    channels, height, width, filters, kernel = map(int, layer.split("x"))
    problem = ConvProblem(IMAGES, channels, height, width, filters, kernel)
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (problem.x_shape, problem.w_shape))
    found = {}
    for each in ladder():
        plan = each.plan(problem, H200, 16)
        arrays = {"x": x, "w": w, "y": np.zeros(problem.y_shape, np.float32)}
        arrays |= {name: np.zeros(size, np.uint8) for name, size in plan.scratch.items()}
        case = Case(each.name, each.text(plan), plan, tuple(arrays), IMAGES)
        result = Plans([case], folder, counters=True).run(each.name, arrays, dict.fromkeys(arrays, 256))
        totals = result.totals
        found[each.name] = {
            "load_sectors": totals.load_sectors,
            "store_sectors": totals.store_sectors,
            "load_instructions": totals.global_loads,
            "store_instructions": totals.global_stores,
            "shared_load_wavefronts": totals.load_wavefronts,
            "shared_store_wavefronts": totals.store_wavefronts,
            "shared_load_instructions": totals.shared_loads,
            "shared_store_instructions": totals.shared_stores,
            "load_requests": totals.global_loads,
        }
        if result.findings:
            print(each.name, result.findings[:3])
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", nargs="+")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.action == "measure":
        result = {layer: measure(layer) for layer in LAYERS}
        options.file.write_text(json.dumps(result, indent=1) + "\n")
        return
    reference = json.loads(options.file.read_text())
    for layer in options.layers or LAYERS:
        ours = emulate(layer, options.folder)
        print(f"{layer}\n{'':20}", *(f"{name[:12]:>18}" for name in METRICS))
        for name, row in reference[layer].items():
            cells = (
                f"{row[key]:.0f} {100 * (ours[name][key] / row[key] - 1) if row[key] else 0:+.1f}%" for key in METRICS
            )
            print(f"{name:20}", *(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
