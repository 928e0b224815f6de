"""Measure counters by Nsight Compute on a GPU, with which the tests compare the emulator's.

    python benchmarks/emulator_counters.py benchmarks/results/emulator-counters-h200.json

It runs every kernel of ``kernels/cuda/ladder`` on three layers, two images each; tests/emulator/test_ladder_emulated.py
emulates the same launches. Memory instructions are counted when they reach the memory, because ncu's executed
instructions include those with all lanes switched off.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ece408_op.core import dispatch
from ece408_op.profile import counters
from ece408_op.runtime import cuda

IMAGES = 2
#: The layers by their sizes, CxHxWxMxK.
LAYERS = ("1x28x28x50x5", "6x30x30x16x5", "12x33x33x24x7")
#: The counters that are compared; each is the sum of these metrics of ncu.
METRICS = {
    name: [f"{metric}_{operation}.sum" for metric in metrics for operation in ("ld", "st")]
    for name, metrics in {
        "sectors": ["l1tex__t_sectors_pipe_lsu_mem_global_op"],
        "wavefronts": ["l1tex__data_pipe_lsu_wavefronts_mem_shared_op"],
        "instructions": ["l1tex__t_requests_pipe_lsu_mem_global_op", "smsp__inst_executed_op_shared"],
    }.items()
}


def measure(layer: str) -> dict[str, dict[str, float]]:
    """Return ncu's counters by kernel, summed over each kernel's launches."""
    kernels = {name: dispatch.find(name) for name in dispatch.names("gpu")}
    names = [name for name, one in kernels.items() if one.sources and one.sources[-1].parent.name == "ladder"]
    arguments = [*counters.COMMAND, layer, "--images", str(IMAGES), "--impl", *names, "--launch"]
    return counters.collect_metrics(arguments, METRICS, {})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where to write the counters, as JSON")
    file = parser.parse_args().file
    result = {"device": cuda.chip().name, "layers": {layer: measure(layer) for layer in LAYERS}}
    # A kernel per line.
    file.write_text(json.dumps(result).replace("}, ", "},\n ") + "\n", encoding="utf-8")
