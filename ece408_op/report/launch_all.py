"""What counters.py watches: every GPU kernel once on one layer, with nothing else on the GPU in between.

The memory behind the arrays is filled by a memset, which is no kernel, with the bytes of small positive numbers.
Which kernel made how many launches, in order, is written to a file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ece408_op.core import dispatch
from ece408_op.errors import DeviceError
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

from .kernels import chosen, launches

#: A call of more launches is left out: watching each takes some hundred times as long as making it.
MOST_LAUNCHES = 64

#: Four of these bytes are 0.0115 in float32.
_BYTE = 0x3C


def run(problem: ConvProblem, names: Sequence[str] | None) -> list[dict[str, Any]]:
    """Launch them; for each kernel the number of launches, or the reason for none. Raises DeviceError without a GPU."""
    cupy = cuda.cupy()
    chip = cuda.chip()
    x, w, y = (cupy.empty(shape, "f") for shape in (problem.x_shape, problem.w_shape, problem.y_shape))
    for array in (x, w, y):
        array.data.memset(_BYTE, array.nbytes)
    made = []
    for kernel in chosen(names):
        reasons = kernel.not_supported_reasons(problem, chip)
        count = 0
        if not reasons:
            aligned = cuda.alignment(x.data.ptr, w.data.ptr, y.data.ptr)
            count = sum(launches(kernel.plan(problem, chip, aligned), problem.batch).values())
            if count > MOST_LAUNCHES:
                reasons, count = [f"{count} launches are too many to watch each"], 0
        if not reasons:
            kernel.run(problem, x, w, y)
            cuda.wait(kernel.name, cupy.cuda.get_current_stream())
        made.append({"kernel": kernel.name, "launches": count, "reason": "; ".join(reasons)})
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m ece408_op.report.launch_all", description=__doc__.split("\n")[0])
    parser.add_argument("layer", type=int, nargs=5, help="channels, rows, columns, filters, kernel size")
    parser.add_argument("--images", type=int, required=True)
    parser.add_argument("--kernels", nargs="+", metavar="NAME", choices=dispatch.names("gpu"))
    parser.add_argument("--made", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        made = run(ConvProblem(options.images, *options.layer), options.kernels)
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 3
    options.made.write_text(json.dumps(made), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
