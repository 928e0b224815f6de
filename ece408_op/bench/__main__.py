"""The benchmark's command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ece408_op.errors import MXNetImportError, UnsupportedError
from ece408_op.problem import ConvProblem

from .layers import IMAGES, LAYERS, parse, random_layers

OK, FAILED, USAGE, CANNOT = 0, 1, 2, 3

_DESCRIPTION = """\
Time the operator New beside MXNet's built-in Convolution, and beside PyTorch where it is installed: in one process,
on the same arrays, with fresh outputs (new memory, as y = mx.nd.Custom(...) makes it) and with reused ones (out=).
Every timed output is checked: 16 of its images against float64, all others for being finite. The table goes to
stdout, progress to stderr."""

_EXAMPLE = """\
example:
  python -m ece408_op.bench --threads 2 --json bench.json
  python -m ece408_op.bench --impl direct --layers 2017 2018fa-2 3x32x32x16x5 --images 1000

exit codes: 0 done, 1 an output was wrong, 2 usage, 3 MXNet is missing"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    # MXNet reads it when it is imported, and uses half of the cores without it.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    try:
        layers = {word: parse(word, options.images) for word in options.layers}
        if options.random:
            layers = random_layers(options.random, options.seed)
        return _run(layers, options)
    except MXNetImportError as error:
        print(error, file=sys.stderr)
        return CANNOT
    except (UnsupportedError, ValueError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ece408-bench",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--impl", nargs="+", default=["direct", "im2col", "loops"], metavar="NAME", help="implementations of New (all)"
    )
    parser.add_argument(
        "--layers", nargs="+", default=list(LAYERS), metavar="LAYER", help="names, or CxHxWxMxK (the five)"
    )
    parser.add_argument("--random", type=_positive, metavar="N", help="N random layers of about that size instead")
    parser.add_argument("--images", type=_positive, default=IMAGES, metavar="N", help=f"images a layer ({IMAGES})")
    parser.add_argument("--threads", type=_positive, default=cores, metavar="N", help=f"for all contestants ({cores})")
    parser.add_argument("--repeats", type=_positive, default=5, metavar="N", help="timed calls of each kind (5)")
    parser.add_argument("--seed", type=int, default=0, help="of data and random layers (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def _run(layers: dict[str, ConvProblem], options: argparse.Namespace) -> int:
    # Late: MXNet reads the environment when it is imported, and a machine without it still gets --help.
    from ece408_op import dispatch, mxnet_import
    from ece408_op.data.atomic import replacing

    from . import contestants, measure, report

    mxnet_import.load()
    entrants = contestants.contestants(options.impl)
    plain_sum = dispatch.find("loops")  # all are held to the bound of a float32 sum
    results = []
    for number, (name, problem) in enumerate(layers.items(), 1):
        given = contestants.make_input(problem, options.seed)
        timings = {}
        for entrant, prepare in entrants.items():
            print(f"[{number}/{len(layers)}] {name}: {entrant} ...", end=" ", file=sys.stderr, flush=True)
            timings[entrant] = measure.measure(prepare(given), given.x, given.w, plain_sum, options.repeats)
            print(", ".join(f"{kind} {timing}" for kind, timing in timings[entrant].items()), file=sys.stderr)
        results.append(report.LayerResult(name, problem, timings))
    print(report.table(results))
    if options.json:
        with replacing(options.json) as file:
            file.write(json.dumps(report.as_data(results, options.threads), indent=1).encode() + b"\n")
    return OK if all(result.passed for result in results) else FAILED


if __name__ == "__main__":
    sys.exit(main())
