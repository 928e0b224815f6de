"""The benchmark's command line."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ece408_op import commands
from ece408_op.commands import CANNOT, FAILED, OK
from ece408_op.core.roofline import Ceilings
from ece408_op.data.atomic import folder_problem, output_folder_problem, replacing
from ece408_op.errors import DeviceError, MXNetImportError, UnsupportedError
from ece408_op.problem import ConvProblem

from ._layers import IMAGES, LAYERS, RANGES, parse, random_layers
from ._plots import check as check_plots
from ._record import Record

PRECISIONS = ("float32", "tf32", "fp16")

_CPU_REPEATS, _GPU_REPEATS, _NETWORK_REPEATS = 3, 20, 5

#: After so many seconds of timed calls, no further one is timed unless --repeats asks for it: the default run ends
#: within 3 minutes on two cores.
_CPU_BUDGET = 5.0

_DESCRIPTION = """\
Time this package's convolutions beside their peers, in one process, on the same arrays.
On the CPU: the operator New beside MXNet's built-in Convolution, and beside PyTorch where it is installed, with fresh
outputs (new memory, as y = mx.nd.Custom(...) makes it) and with reused ones (out=).
On the GPU (--context gpu): the kernels on arrays of the GPU, beside cuDNN where PyTorch is installed.
Without --impl, only auto is timed: the implementation that the operator picks for the layer. The default run takes up
to 3 minutes on two cores.
Every timed output is checked: some of its images against float64, all others for being finite. The table goes to
stdout, progress and the expected time to stderr.
With --json FILE, the file is rewritten after each layer (each network). After Ctrl-C, the same command with the same
FILE goes on from there."""

_EXAMPLE = """\
example:
  python -m ece408_op.bench --threads 2 --json bench.json
  python -m ece408_op.bench --impl direct --layers 2017 2018fa-2 3x32x32x16x5 --images 1000
  python -m ece408_op.bench --context gpu --random 20 --json bench.json --plots plots

exit codes: 0 done, 1 an output was wrong, 2 usage, 3 this machine can't (no MXNet, no GPU)"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.context == "cpu" and options.precision != "float32":
        parser.error("--precision: expected float32 on the CPU; --context gpu has the others")
    problems = {"--json": folder_problem(options.json), "--plots": output_folder_problem(options.plots)}
    for option, problem in problems.items():
        if problem:
            parser.error(f"{option}: {problem}")
    # MXNet reads it when it is imported, and uses half of the cores without it.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    try:
        if options.plots:
            check_plots()
        if options.one_image:
            return _run_one_image(options)
        if options.networks:
            return _run_networks(options)
        layers = {word: parse(word, options.images) for word in options.layers}
        if options.random:
            layers = random_layers(options.random, options.seed, options.ranges)
        options.impl = _impls(options.impl, options.context)
        return (_run_gpu if options.context == "gpu" else _run_cpu)(layers, options)
    except (MXNetImportError, DeviceError) as error:
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
    parser.add_argument("--context", choices=["cpu", "gpu"], default="cpu", help="where it computes (cpu)")
    parser.add_argument(
        "--impl", nargs="+", metavar="NAME", help="implementations of New, such as direct or loops (auto alone)"
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="float32", help="of kernels and peers on the GPU (float32)"
    )
    parser.add_argument(
        "--layers", nargs="+", default=list(LAYERS), metavar="LAYER", help="names, or CxHxWxMxK (the five)"
    )
    parser.add_argument(
        "--networks",
        action="store_true",
        help="whole networks in MXNet's memory instead, convolutions where --context says, beside MXNet's on the CPU",
    )
    parser.add_argument(
        "--one-image", action="store_true", help="one image's call instead, beside a Custom operator that does nothing"
    )
    parser.add_argument("--random", type=_positive, metavar="N", help="N random layers of about that size instead")
    parser.add_argument("--ranges", default=RANGES, metavar="WORD", help=f"what these are drawn from ({RANGES})")
    parser.add_argument("--images", type=_positive, default=IMAGES, metavar="N", help=f"images a layer ({IMAGES})")
    parser.add_argument("--threads", type=_positive, default=cores, metavar="N", help=f"for all contestants ({cores})")
    parser.add_argument(
        "--repeats",
        type=_positive,
        metavar="N",
        help="timed calls of each kind (3 on the CPU, fewer where a call takes seconds; networks: 5; the GPU: 20)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of data and random layers (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, layer by layer")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw a roofline and bars there")
    return parser


def _impls(asked: list[str] | None, device: str) -> list[str]:
    """The implementations to run; raises UnsupportedError where one is unknown or another device's."""
    # Late: dispatch knows every kernel, and a machine without a kernel's needs still gets --help.
    from ece408_op.core import dispatch

    for impl in asked or ():
        if dispatch.device_of(impl, device) != device:
            known = ", ".join([dispatch.AUTO, *dispatch.names(device)])
            raise UnsupportedError(f"impl: expected one for the {device} ({known}), got {impl!r}; see --context")
    return asked or [dispatch.AUTO]


def _kept(options: argparse.Namespace) -> dict[str, Any]:
    """The options that decide what is measured; an interrupted run goes on only where they are the same."""
    return {name: value for name, value in vars(options).items() if name not in ("json", "plots", "one_image")}


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def _run_cpu(layers: dict[str, ConvProblem], options: argparse.Namespace) -> int:
    # Late: MXNet reads the environment when it is imported, and a machine without it still gets --help.
    from ece408_op.core import dispatch
    from ece408_op.plugin import mxnet_import

    from . import _cpu_roofline, _estimate, _measure, _plots, contestants, report

    mxnet_import.load()
    record = Record(options.json, {"options": _kept(options), **report.facts(options.threads)})
    results = report.from_data(record.begun)
    record.say_taken(len(results), len(layers), "layers")
    ceilings = Ceilings(**record.begun["ceilings"]) if record.begun else _cpu_roofline.measure(options.threads)
    entrants = contestants.contestants(options.impl)
    limits = (options.repeats or _CPU_REPEATS, math.inf if options.repeats else _CPU_BUDGET)
    left = list(layers.items())[len(results) :]
    expected = _estimate.words(_estimate.seconds(dict(left).values(), list(entrants), ceilings, *limits))
    print(f"{len(left)} layers x {len(entrants)} contestants ({', '.join(entrants)}): {expected}", file=sys.stderr)
    plain_sum = dispatch.find("loops")  # all are held to the bound of a float32 sum
    for number, (name, problem) in enumerate(left, len(results) + 1):
        given = contestants.make_input(problem, options.seed)
        timings = {}
        for entrant, prepare in entrants.items():
            print(f"[{number}/{len(layers)}] {name}: {entrant} ...", end=" ", file=sys.stderr, flush=True)
            timings[entrant] = _measure.measure(prepare(given), given.x, given.w, plain_sum, *limits)
            print(", ".join(f"{kind} {timing}" for kind, timing in timings[entrant].items()), file=sys.stderr)
        results.append(report.LayerResult(name, problem, timings))
        record.write(report.as_data(results, ceilings), number == len(layers))
    print(report.table(results, ceilings))
    if options.plots:
        title = f"{report.machine(options.threads)['cpu']}, {options.threads} threads"
        _tell(_plots.draw(report.points(results), ceilings, options.plots, title))
    return OK if all(result.passed for result in results) else FAILED


def _run_one_image(options: argparse.Namespace) -> int:
    from ece408_op.plugin import mxnet_import

    mxnet_import.load()

    from ece408_op.plugin import bridge

    from . import _one_image, report

    if options.context == "gpu":
        bridge.require_mxnet_gpu()
    result = _one_image.measure(options.context, calls=2000, processes=3)
    print(_one_image.table(result, options.context))
    data = {"one_image": asdict(result), "machine": report.machine(options.threads), "versions": report.versions()}
    _write(data, options.json)
    return OK


def _run_networks(options: argparse.Namespace) -> int:
    from ece408_op.plugin import mxnet_import

    os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")  # MXNet tells of each graph that it fuses otherwise
    mx = mxnet_import.load()

    from ece408_op.runtime import cuda

    from . import _networks, report

    machine, versions = report.machine(options.threads), {**report.versions(), "mxnet": mx.__version__}
    if options.context == "gpu":
        machine["gpu"], versions["cupy"] = cuda.chip().name, cuda.cupy().__version__
    record = Record(options.json, {"options": _kept(options), "machine": machine, "versions": versions})
    results = _networks.from_data(record.begun)
    done = {result.network for result in results}
    record.say_taken(len(done), len(_networks.NETWORKS), "networks")
    for name in _networks.NETWORKS:
        if name not in done:
            results += _networks.measure(name, options.images, options.repeats or _NETWORK_REPEATS, options.context)
            record.write(_networks.as_data(results), name == _networks.NETWORKS[-1])
    print(_networks.table(results))
    return OK if all(result.passed for result in results) else FAILED


def _run_gpu(layers: dict[str, ConvProblem], options: argparse.Namespace) -> int:
    # Late: a machine without CuPy still gets --help.
    from ece408_op.core import roofline
    from ece408_op.runtime import cuda

    from . import _gpu, _gpu_report, _plots

    chip = cuda.chip()
    record = Record(options.json, {"options": _kept(options), **_gpu_report.facts(chip)})
    results = _gpu_report.from_data(record.begun)
    record.say_taken(len(results), len(layers), "layers")
    ceilings = Ceilings(**record.begun["ceilings"]) if record.begun else roofline.measure()
    left = list(layers.items())[len(results) :]
    for number, (name, problem) in enumerate(left, len(results) + 1):
        timings = {}
        repeats = options.repeats or _GPU_REPEATS
        for entrant, timing in _gpu.contest(problem, options.impl, options.precision, repeats, options.seed):
            print(f"[{number}/{len(layers)}] {name}: {entrant} {timing}", file=sys.stderr)
            timings[entrant] = timing
        results.append(_gpu_report.GpuResult(name, problem, timings, 1e3 * ceilings.roofline_seconds(problem)))
        cuda.cupy().get_default_memory_pool().free_all_blocks()
        record.write(_gpu_report.as_data(results, ceilings, options.precision), number == len(layers))
    print(_gpu_report.table(results))
    if options.plots:
        _tell(_plots.draw(_gpu_report.points(results), ceilings, options.plots, chip.name))
    return OK if all(result.passed for result in results) else FAILED


def _tell(paths: list[Path]) -> None:
    for path in paths:
        print(path, file=sys.stderr)


def _write(data: dict[str, Any], path: Path | None) -> None:
    if path:
        with replacing(path) as file:
            file.write(json.dumps(data, indent=1).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(commands.guard("ece408-bench", main))
