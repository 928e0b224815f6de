"""What m1.py to m4.py share: arguments, the printed lines of the course, checks, and exit codes.

    m1   the network as MXNet computes it
    m2   the operator on the CPU

Exit codes: 0 done, 1 failed, 2 usage, 3 this machine can't.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import call_record, dispatch, mxnet_import, process_usage
from .data import load_test
from .data.atomic import replacing
from .errors import DeviceError, Ece408Error
from .models import files, shapes

#: Images of the test set.
DATA_SET = 10_000

OK, FAILED, USAGE, CANNOT = 0, 1, 2, 3


@dataclass(frozen=True)
class Milestone:
    """One script: its name, what --help says, the network it runs by default, and whether ``New`` computes it."""

    script: str
    summary: str
    model: str
    operator: bool


MILESTONES = {
    "m1": Milestone("m1.py", "Milestone 1: inference with MXNet's own Convolution.", "baseline", operator=False),
    "m2": Milestone("m2.py", "Milestone 2: inference with the operator New on the CPU.", "ece408-high", operator=True),
}


def main(name: str, arguments: Sequence[str] | None = None) -> int:
    """Run the script of that name ("m1", ...) with the command line's arguments; returns its exit code."""
    milestone = MILESTONES[name]
    parser = _parser(milestone)
    options = parser.parse_args(arguments)
    options.model, options.size = _positional(parser, milestone, options.positional)
    os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")  # MXNet tells of each fused graph otherwise
    try:
        return _run(milestone, options)
    except DeviceError as error:
        print(f"{milestone.script}: {error}", file=sys.stderr)
        return CANNOT
    except (Ece408Error, OSError) as error:
        print(f"{milestone.script}: {error}", file=sys.stderr)
        return FAILED
    finally:
        if options.time:
            print(process_usage.measure().as_text(), file=sys.stderr)


def _parser(milestone: Milestone) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=milestone.script,
        usage=f"{milestone.script} [MODEL] [SIZE] [options]",
        description=milestone.summary,
        epilog=f"example: python {milestone.script} ece408-low 100; models: {', '.join(files.list_names())}",
    )
    parser.add_argument(
        "positional",
        nargs="*",
        metavar="MODEL SIZE",
        help=f"network (default {milestone.model}), images (default {DATA_SET}); a number alone is the size",
    )
    if milestone.operator:
        parser.add_argument(
            "--impl",
            choices=[dispatch.AUTO, *dispatch.names("cpu")],
            default=dispatch.AUTO,
            help="the operator's implementation (default: the fastest that supports each layer)",
        )
        parser.add_argument(
            "--verify", action="store_true", help="compare every layer and prediction with MXNet's Convolution"
        )
    else:
        parser.add_argument("--context", choices=["cpu", "gpu"], default="cpu", help="where MXNet computes")
    parser.add_argument("--data", metavar="FOLDER", help="folder with the Fashion-MNIST files")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE as well")
    parser.add_argument("--time", action="store_true", help="print the program's time and memory to stderr at the end")
    return parser


def _positional(parser: argparse.ArgumentParser, milestone: Milestone, given: Sequence[str]) -> tuple[str, int]:
    """MODEL and SIZE; one argument that is a number is the size. Ends the program with usage where they are wrong."""
    model, size = milestone.model, str(DATA_SET)
    if len(given) == 1 and given[0].lstrip("+-").isdecimal():
        size = given[0]
    elif len(given) == 1:
        model = given[0]
    elif len(given) == 2:
        model, size = given
    elif given:
        parser.error(f"expected at most MODEL and SIZE, got {len(given)} arguments: {' '.join(given)}")
    if model not in files.list_names():
        parser.error(f"MODEL: expected one of {', '.join(files.list_names())}; got {model!r}")
    if not size.lstrip("+-").isdecimal() or not 1 <= int(size) <= DATA_SET:
        parser.error(f"SIZE: expected a number of images from 1 to {DATA_SET}, got {size!r}")
    return model, int(size)


def _run(milestone: Milestone, options: argparse.Namespace) -> int:
    mx = mxnet_import.load()
    from . import inference

    context = _context(mx, "cpu" if milestone.operator else options.context)
    network = files.find(options.model)
    channels, rows, columns = shapes.info(network).image
    if channels != 1 or rows != columns:
        raise Ece408Error(
            f"{network.symbol}: expected a network for square images of one channel, as Fashion-MNIST's are, "
            f"got one for {channels} x {rows} x {columns}"
        )
    print("New Inference")
    print("Loading fashion-mnist data...", end="", flush=True)
    images, labels, source = load_test(rows, options.size, options.data)
    print(" done")
    print("Loading model...", end="", flush=True)
    plain = inference.built_in(network)
    loaded = inference.with_operator(network, options.impl, "cpu") if milestone.operator else plain
    print(" done", flush=True)

    call_record.clear_op_times()
    predictions = inference.predict(loaded, images, context)
    calls = call_record.op_times()
    accuracy = float((predictions == labels).mean())
    for call in calls:
        print(f"Op Time: {call.seconds:f}")
    if milestone.operator:
        print(f"Correctness: {accuracy} Model: {network.title}")
    else:
        print(f"EvalMetric: {{'accuracy': {accuracy}}}")
    verification = None
    if milestone.operator and options.verify:
        verification = inference.verify(loaded, plain, images, predictions)
        print(f"Largest difference from MXNet's Convolution: {verification.largest_difference:.3g}")
        print(f"Agreeing predictions: {verification.agreeing} of {verification.compared}")
    if options.json is not None:
        _write_json(
            options.json,
            {
                "version": 1,
                "milestone": milestone.script[:-3],
                "model": network.name,
                "title": network.title,
                "size": options.size,
                "image": [channels, rows, columns],
                "source": source,
                "context": str(context),
                "op_times": [_call(call) for call in calls],
                "accuracy": accuracy,
                "verification": verification and asdict(verification),
                "time": asdict(process_usage.measure()),
                "versions": _versions(mx),
            },
        )
    return FAILED if verification is not None and not verification.passed else OK


def _context(mx: Any, device: str) -> Any:
    if device == "cpu":
        return mx.cpu()
    if not mx.runtime.Features().is_enabled("CUDA"):
        raise DeviceError(
            "--context gpu: expected a GPU build of MXNet, found its CPU build; install the extra cu117 on a machine "
            "with an NVIDIA GPU, or leave --context out"
        )
    if not mx.context.num_gpus():
        raise DeviceError("--context gpu: expected an NVIDIA GPU, found none; leave --context out to use the CPU")
    return mx.gpu()


def _call(call: call_record.OpTime) -> dict[str, Any]:
    problem = call.problem
    return {
        "layer": call.layer,
        "x": problem.x_shape,
        "w": problem.w_shape,
        "y": problem.y_shape,
        "implementation": call.implementation,
        "device": call.device,
        "seconds": call.seconds,
    }


def _versions(mx: Any) -> dict[str, str]:
    return {"python": platform.python_version(), "numpy": np.__version__, "mxnet": mx.__version__}


def _write_json(path: Path, results: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write((json.dumps(results, indent=2) + "\n").encode())
