"""python -m ece408_op.bench.sweep: time every GPU kernel on many layers, and record which is fastest where.

Prints one line a layer and kernel: the layer, the kernel, the median time of a call, its rate, its largest error as a
share of the sum of |x||w|. A time is shown only for a result that is right. ``--record`` writes the times into the
table that ``auto`` chooses by.
Exit codes: 0 done, 1 a kernel was wrong, 2 wrong arguments, 3 no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.core import tuning
from ece408_op.core.check import Comparison, compare
from ece408_op.core.kernel import CudaKernel, roofline_milliseconds
from ece408_op.data.atomic import folder_problem, replacing
from ece408_op.errors import DeviceError
from ece408_op.kernels import KERNELS
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip

from ._layers import RANGES, random_layers

#: The course's layers: 2017, 2018 spring, 2018 fall.
COURSE = ((1, 28, 28, 50, 5), (1, 64, 64, 6, 5), (6, 30, 30, 16, 5), (1, 72, 72, 12, 7), (12, 33, 33, 24, 7))
#: Elements of x and y together, and operations, that a drawn layer may have.
_MOST_ELEMENTS = 3 * 10**8
_MOST_FLOPS = 2 * 10**12


#: Bytes that are written before each timed call: enough that a call of a few launches is queued meanwhile, and that
#: none of its data is left in the second-level cache.
_UNRELATED_BYTES = 1 << 30

#: The course's layers are timed with so many times fewer images too: what is best for many is not for few.
_FEWER = (100, 1000)

_EPILOG = """\
example:
  python -m ece408_op.bench.sweep --kernels naive sliding_window --images 1000 --json sweep.json
  python -m ece408_op.bench.sweep --random 24 --record
  python -m ece408_op.bench.sweep --random 40 --seed 1 --ranges C=2-32,M=8-64,K=3-9 --record

exit codes: 0 done, 1 a kernel was wrong, 2 usage, 3 this machine can't (no GPU)"""


def drawn_layers(count: int, seed: int) -> list[ConvProblem]:
    """Layers drawn over the whole range: C 1 to 64, K 1 to 11, M 1 to 256, as many images as fit a fixed size."""
    rng = np.random.default_rng(seed)
    layers = []
    for _ in range(count):
        channels, filters = (int(2 ** rng.uniform(0, top)) for top in (6, 8))
        kernel = int(rng.integers(1, 12))
        height, width = (int(kernel + rng.integers(0, 90)) for _ in range(2))
        one = ConvProblem(1, channels, height, width, filters, kernel)
        batch = min(10_000, _MOST_ELEMENTS * 4 // one.bytes, _MOST_FLOPS // one.flops)
        layers.append(one.with_batch(max(1, batch)))
    return layers


def measure(kernel: CudaKernel, problem: ConvProblem, x: Any, w: Any, out: Any) -> tuple[float, Comparison]:
    """The median time of a queued call in milliseconds, and a check of the first and the last image and one between."""
    out.fill(np.nan)
    unrelated = cuda.cupy().empty(_UNRELATED_BYTES, np.uint8)
    milliseconds = cuda.median_milliseconds(
        lambda: kernel.run(problem, x, w, out), kernel.name, before=lambda: unrelated.fill(0)
    )
    places = sorted({0, problem.batch // 2, problem.batch - 1})
    found = compare(out[places].get(), x[places].get(), w.get(), kernel)
    return milliseconds, found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ece408_op.bench.sweep",
        description="Time every GPU kernel on many layers, check what it gave, and record which is fastest where.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = [kernel.name for kernel in KERNELS if isinstance(kernel, CudaKernel)]
    parser.add_argument("--kernels", nargs="+", choices=known, default=known, metavar="NAME", help=", ".join(known))
    parser.add_argument("--images", type=int, default=10_000, help="images of the course's layers (default 10000)")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="add N layers drawn at random")
    parser.add_argument("--ranges", metavar="WORD", help=f"draw these as ece408-bench does, from such ranges: {RANGES}")
    parser.add_argument("--seed", type=int, default=408, help="seed of the random layers and of all values")
    parser.add_argument("--record", action="store_true", help=f"write the times into {tuning.TABLE.name}")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the chip, and each layer's times, to FILE")
    return parser


def _sweep(kernels: list[CudaKernel], layers: list[ConvProblem], chip: Chip, seed: int) -> tuple[list, bool]:
    cupy = cuda.cupy()
    rng = cupy.random.default_rng(seed)
    rows, all_right = [], True
    for problem in layers:
        x = 2 * rng.random(problem.x_shape, dtype=np.float32) - 1
        w = rng.standard_normal(problem.w_shape, dtype=np.float32)
        out = cupy.empty(problem.y_shape, np.float32)
        times, estimates = {}, {}
        for kernel in kernels:
            reasons = kernel.not_supported_reasons(problem, chip)
            if reasons:
                print(f"{problem}: {kernel.name} does not take it: {'; '.join(reasons)}", file=sys.stderr)
                continue
            milliseconds, found = measure(kernel, problem, x, w, out)
            all_right = all_right and found.passed
            if not found.passed:
                print(f"{problem}: {kernel.name} is WRONG: {found}")
                continue
            rate = problem.flops / milliseconds / 1e9
            print(f"{problem}: {kernel.name} {milliseconds:.4f} ms, {rate:.2f} TFLOP/s, error {found.scaled:.2g}")
            times[kernel.name] = milliseconds
            if kernel.predicted_milliseconds is not roofline_milliseconds:
                estimates[kernel.name] = kernel.predicted_milliseconds(problem, chip)
        rows.append(tuning.Measured(problem, times, estimates))
        del x, w, out
        cupy.get_default_memory_pool().free_all_blocks()
    return rows, all_right


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    problem = folder_problem(asked.json)
    if problem:
        parser.error(f"--json: {problem}")
    if asked.seed < 0:
        parser.error(f"--seed: expected 0 or more, got {asked.seed}")
    if asked.ranges is not None and asked.random < 1:
        parser.error("--ranges: expected the number of layers to draw from them too, as in --random 20")
    try:
        drawn = (
            drawn_layers(asked.random, asked.seed)
            if asked.ranges is None
            else list(random_layers(asked.random, asked.seed, asked.ranges).values())
        )
    except ValueError as error:
        parser.error(f"--{error}")
    try:
        chip = cuda.chip()
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 3
    print(f"{chip.name}, compute capability {chip.capability[0]}.{chip.capability[1]}", file=sys.stderr)
    kernels = [k for k in KERNELS if isinstance(k, CudaKernel) and k.name in asked.kernels]
    batches = dict.fromkeys([asked.images, *(max(1, asked.images // times) for times in _FEWER)])
    layers = [ConvProblem(images, *layer) for images in batches for layer in COURSE]
    layers += drawn
    rows, all_right = _sweep(kernels, layers, chip, asked.seed)
    table = tuning.ChipTable(chip.name, chip.capability, tuple(row for row in rows if row.milliseconds))
    if asked.json is not None:
        with replacing(asked.json) as file:
            file.write(tuning.merged((), table).encode())
    if asked.record and all_right:
        with replacing(tuning.TABLE) as file:
            file.write(tuning.merged(tuning.read(tuning.TABLE), table).encode())
    return 0 if all_right else 1


if __name__ == "__main__":
    from ece408_op import commands

    sys.exit(commands.guard("ece408_op.bench.sweep", main))
