"""Compare the emulator's counters with Nsight Compute's on the ladder's kernels.

    python benchmarks/emulator_counters.py measure FILE    # on a GPU: runs ncu, writes its counters as JSON
    python benchmarks/emulator_counters.py compare FILE    # anywhere: emulates the same launches, prints the table

Both run every kernel of ``kernels/cuda/ladder`` on three layers, two images each. Memory instructions are those that
reach the memory: ncu's instructions executed also count those whose lanes are all switched off.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from ece408_op.core import dispatch
from ece408_op.core.kernel import CudaKernel
from ece408_op.emulator.plans import Case, Plans
from ece408_op.problem import COURSE_LAYERS
from ece408_op.profile import counters
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip

IMAGES = 2
#: The layers by their sizes, CxHxWxMxK.
LAYERS = {
    "x".join(map(str, [*layer.sizes.values()][1:])): layer.with_batch(IMAGES)
    for layer in (COURSE_LAYERS[name] for name in ("2017", "2018sp-2", "2018fa-2"))
}
H200 = Chip("NVIDIA H200", (9, 0), 132, 227 * 1024)
#: Counters that are compared: ncu's metrics, summed.
METRICS = {
    "sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"),
    "wavefronts": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    ),
    "instructions": (
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
        "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
        "smsp__inst_executed_op_shared_ld.sum",
        "smsp__inst_executed_op_shared_st.sum",
    ),
    "executed": ("smsp__inst_executed_op_global_ld.sum", "smsp__inst_executed_op_global_st.sum"),
}
COMPARED = ("sectors", "wavefronts", "instructions")


def ladder() -> list[CudaKernel]:
    """Return the kernels whose sources are in kernels/cuda/ladder."""
    found = (dispatch.find(name) for name in dispatch.names("gpu"))
    kernels = (k for k in found if isinstance(k, CudaKernel) and k.sources)
    return [k for k in kernels if k.sources[-1].parent.name == "ladder"]


def measure(layer: str) -> dict[str, dict[str, float]]:
    """Return ncu's counters by kernel, summed over its launches."""
    names = [kernel.name for kernel in ladder()]
    arguments = [*counters.AGAIN, layer, "--images", str(IMAGES), "--impl", *names, "--launch"]
    found = counters.measured(arguments, [name for names in METRICS.values() for name in names])
    return {
        kernel: {key: sum(one[metric] for one in launches for metric in metrics) for key, metrics in METRICS.items()}
        for kernel, launches in found.items()
    }


def emulate(kernel: CudaKernel, layer: str, folder: Path | None = None) -> dict[str, float]:
    """Return the emulator's counters."""
    problem = LAYERS[layer]
    rng = np.random.default_rng(0)
    plan = kernel.plan(problem, H200, 256)
    arrays = {
        "x": rng.standard_normal(problem.x_shape, np.float32),
        "w": rng.standard_normal(problem.w_shape, np.float32),
    }
    arrays["y"] = np.zeros(problem.y_shape, np.float32)
    arrays |= {name: np.zeros(size, np.uint8) for name, size in plan.scratch.items()}
    plans = Plans([Case(kernel.name, kernel.text(plan), plan, tuple(arrays), IMAGES)], folder, counters=True)
    totals = plans.run(kernel.name, arrays, dict.fromkeys(arrays, 256)).totals
    return {
        "sectors": totals.sectors,
        "wavefronts": totals.wavefronts,
        "instructions": totals.global_requests + totals.shared_requests,
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", nargs="+", default=LAYERS, choices=LAYERS, help="(default: all three)")
    options = parser.parse_args()
    if options.action == "measure":
        result = {"device": cuda.chip().name, "layers": {layer: measure(layer) for layer in options.layers}}
        options.file.write_text(json.dumps(result, indent=1) + "\n")
        return
    reference = json.loads(options.file.read_text())
    print(f"ncu on an {reference['device']}, and how far the emulator is from it")
    for layer in options.layers:
        print(f"{layer:20}", *(f"{name:>22}" for name in COMPARED))
        for kernel in ladder():
            theirs, ours = reference["layers"][layer][kernel.name], emulate(kernel, layer)
            shares = (100 * (ours[key] / theirs[key] - 1) if theirs[key] else 0.0 for key in COMPARED)
            cells = (f"{theirs[key]:.0f} {share:+.2f} %" for key, share in zip(COMPARED, shares))
            print(f"{kernel.name:20}", *(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
