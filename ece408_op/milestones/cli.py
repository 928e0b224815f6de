"""What m1.py to m4.py share: arguments, the printed lines of the course, checks, and exit codes.

    m1   the network as MXNet computes it
    m2   the operator on the CPU
    m3   the operator on the GPU, with the first kernel that a course's student writes
    m4   the operator on the GPU, with the fastest kernel known

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

from ece408_op.commands import CANNOT, FAILED, OK
from ece408_op.core import dispatch
from ece408_op.core.check import agreement
from ece408_op.data import find_test, load_test
from ece408_op.data.atomic import folder_problem, output_folder_problem, replacing
from ece408_op.errors import DeviceError, Ece408Error
from ece408_op.models import files, shapes
from ece408_op.plugin import bridge, mxnet_import, op_times
from ece408_op.profile import session
from ece408_op.runtime import process_usage

#: Images of the test set.
DATA_SET = 10_000


@dataclass(frozen=True)
class Milestone:
    """One script: what --help says, the network it runs, and where and by which kernel ``New`` computes it.

    device: "cpu" or "gpu"; None where MXNet's own Convolution computes. option: how a kernel is chosen.
    """

    script: str
    summary: str
    model: str = "ece408-high"
    device: str | None = None
    option: str = "--impl"
    kernel: str = dispatch.AUTO


MILESTONES = {
    "m1": Milestone("m1.py", "Milestone 1: inference with MXNet's own Convolution.", model="baseline"),
    "m2": Milestone("m2.py", "Milestone 2: inference with the operator New on the CPU.", device="cpu", option="--impl"),
    "m3": Milestone("m3.py", "Milestone 3: inference with a first kernel on the GPU.", device="gpu", kernel="naive"),
    "m4": Milestone("m4.py", "Milestone 4: inference with the fastest kernel on the GPU.", device="gpu"),
}

#: The libraries that compute milestone 1 where MXNet's own GPU kernels cannot.
CUDNN = "cudnn"

#: What --impl takes to run them all.
ALL = "all"


def main(name: str, arguments: Sequence[str] | None = None) -> int:
    """Run the script of that name ("m1", ...) with the command line's arguments; returns its exit code."""
    milestone = MILESTONES[name]
    parser = _parser(milestone)
    options = parser.parse_intermixed_args(arguments)
    for option, problem in (
        ("--json", folder_problem(options.json)),
        ("--profile-out", output_folder_problem(options.profile_out)),
    ):
        if problem:
            parser.error(f"{option}: {problem}")
    options.model, options.size = _positional(parser, milestone, options.positional)
    if milestone.device is not None and options.fuse and options.kernel == ALL:
        parser.error("--fuse: expected one kernel, got all: some of them have no tanh and maxima in the same pass")
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
    if milestone.device is not None:
        known = [dispatch.AUTO, *dispatch.names(milestone.device), *([ALL] if milestone.device == "gpu" else [])]
        parser.add_argument(
            milestone.option,
            dest="kernel",
            choices=known,
            default=milestone.kernel,
            metavar="NAME",
            help=f"the kernel, one of {', '.join(known)} (default: {milestone.kernel})",
        )
        parser.add_argument(
            "--verify", action="store_true", help="compare every layer and prediction with MXNet's Convolution"
        )
        parser.add_argument(
            "--fuse", action="store_true", help="compute a convolution, its tanh and 2 x 2 maxima of that in one"
        )
    if milestone.device != "cpu":
        if milestone.device is not None:
            parser.add_argument(
                "--precision",
                choices=tuple(dispatch.SERVES),
                default="float32",
                help="the least that the auto kernel's products may have (default: float32)",
            )
        parser.add_argument(
            "--context",
            choices=["cpu", "gpu"],
            default=None if milestone.device else "cpu",
            help="where MXNet's arrays live" + (" (default: what this machine can)" if milestone.device else ""),
        )
    parser.add_argument("--data", metavar="FOLDER", help="folder with the Fashion-MNIST files")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE as well")
    parser.add_argument("--time", action="store_true", help="print the program's time and memory to stderr at the end")
    session.add_options(parser)
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
    watched = session.start(options, on_gpu="gpu" in (milestone.device, getattr(options, "context", None)))
    mx = mxnet_import.load()
    from ece408_op.models import inference

    from . import _kernel_table

    context, whole = _context(mx, milestone, getattr(options, "context", "cpu"))
    network = files.find(options.model)
    channels, rows, columns = shapes.info(network).image
    if channels != 1 or rows != columns:
        raise Ece408Error(
            f"{network.symbol}: expected a network for square images of one channel, as Fashion-MNIST's are, "
            f"got one for {channels} x {rows} x {columns}"
        )
    print("New Inference", flush=True)
    found = find_test(options.data)
    print("Loading fashion-mnist data...", end="", flush=True)
    images, labels, source = load_test(rows, options.size, found=found)
    print(" done")
    print("Loading model...", end="", flush=True)
    plain = inference.built_in(network)
    every = milestone.device is not None and options.kernel == ALL
    loaded, precision = plain, getattr(options, "precision", "float32")
    if milestone.device is not None:
        impl = dispatch.AUTO if every else options.kernel
        # Where the whole network is one node, that node has the precision, and sees itself to what it fuses.
        given = ("float32", False) if whole else (precision, options.fuse)
        loaded = inference.with_operator(network, impl, milestone.device, *given)
    print(" done", flush=True)
    if milestone.device is not None:
        _check_replaced(milestone, network.name, loaded)
    running = loaded
    if whole:
        running = inference.on_gpu(loaded, CUDNN if milestone.device is None else dispatch.AUTO, precision)

    results: dict[str, Any] = {
        "version": 1,
        "milestone": milestone.script[:-3],
        "model": network.name,
        "title": network.title,
        "size": options.size,
        "image": [channels, rows, columns],
        "source": source,
        "context": "gpu_network" if whole else str(context),
    }
    if every:
        table = _kernel_table.measure(loaded, images, context)
        print(_kernel_table.as_text(table))
        results["kernels"] = [asdict(row) for row in table]
        passed = all(row.right for row in table)
    else:
        networks = (running, loaded, plain)
        passed = _infer(milestone, options, networks, (images, labels), context, network.title, results)
    results.update(time=asdict(process_usage.measure()), versions=_versions(mx), profile=session.finish(watched))
    if options.json is not None:
        _write_json(options.json, results)
    return OK if passed else FAILED


def _check_replaced(milestone: Milestone, name: str, loaded: Any) -> None:
    """Say which Convolutions ``New`` does not compute; raises Ece408Error where it computes none."""
    from ece408_op.models import inference

    for layer, reason in loaded.left.items():
        print(f"{milestone.script}: {layer} stays MXNet's Convolution: {reason}", file=sys.stderr)
    if not inference.layers(loaded.symbol):
        raise Ece408Error(
            f"{name}: expected a convolution that New can take the place of, got "
            f"{len(loaded.left) or 'none'}{' that it cannot (see above)' if loaded.left else ''}; run it with m1.py"
        )


def _infer(
    milestone: Milestone,
    options: argparse.Namespace,
    networks: tuple[Any, Any, Any],
    data: tuple[np.ndarray, np.ndarray],
    context: Any,
    title: str,
    results: dict[str, Any],
) -> bool:
    """Run the network, print the course's lines, and put the figures into results; whether nothing was wrong.

    networks: the one to run, the one with ``New`` in it (they differ where the whole network runs on the GPU as one
    node), and the one with MXNet's own Convolution.
    """
    from ece408_op.models import inference

    (running, loaded, plain), (images, labels) = networks, data
    op_times.clear_op_times()
    predictions = inference.predict(running, images, context)
    calls = op_times.op_times()
    accuracy = agreement(predictions, labels).share
    if milestone.device is None:
        print(f"EvalMetric: {{'accuracy': {accuracy}}}")
    else:
        for call in calls:
            print(f"Op Time: {call.seconds:f}")
            if options.time:
                print(f"{call.layer}: whole call {call.call_seconds:.6f}", file=sys.stderr)
        print(f"Correctness: {accuracy} Model: {title}")
    results.update(op_times=[_call(call) for call in calls], accuracy=accuracy, verification=None)
    if milestone.device is None or not options.verify:
        return True
    verification = inference.verify(loaded, plain, images, predictions)
    print(f"Largest difference from MXNet's Convolution: {verification.largest_difference:.3g}")
    if verification.worst is not None:
        print(f"Largest error against float64: {verification.worst:.3g} of what the kernel is allowed")
    print(f"Agreeing predictions: {verification.agreeing} of {verification.compared}")
    results["verification"] = asdict(verification)
    reduced = any(dispatch.find(call.implementation).precision != "float32" for call in calls)
    passed = verification.right and (verification.agreeing == verification.compared or reduced)
    if not passed:
        what = "other predictions" if verification.right else "an output that is NaN or errs by more than it may"
        print("\n".join([f"{milestone.script}: verification FAILED: {what}", *verification.failures]), file=sys.stderr)
    return passed


def _context(mx: Any, milestone: Milestone, asked: str | None) -> tuple[Any, bool]:
    """The MXNet context to run in, and whether the whole network goes to the GPU from there as one node.

    That is where a GPU was asked for that MXNet's own kernels are not built for. Raises DeviceError, with what to do,
    where this machine cannot.
    """
    if milestone.device != "gpu":
        problem = bridge.gpu_problem("device") if asked == "gpu" else None
    elif asked is None:
        asked = "gpu" if bridge.gpu_problem("device") is None else "cpu"
        problem = bridge.gpu_problem("host") if asked == "cpu" else None
    else:
        problem = bridge.gpu_problem("device" if asked == "gpu" else "host")
    if problem is None:
        return mx.gpu() if asked == "gpu" else mx.cpu(), False
    if asked != "gpu" or bridge.gpu_problem("host") is not None:
        raise DeviceError(problem)
    print(f"{milestone.script}: MXNet itself cannot use this GPU; ece408_op.gpu_network runs on it", file=sys.stderr)
    return mx.cpu(), True


def _call(call: op_times.OpTime) -> dict[str, Any]:
    problem = call.problem
    return {
        "layer": call.layer,
        "x": problem.x_shape,
        "w": problem.w_shape,
        "y": problem.y_shape,
        "implementation": call.implementation,
        "device": call.device,
        "seconds": call.seconds,
        "copy_seconds": call.copy_seconds,
        "call_seconds": call.call_seconds,
    }


def _versions(mx: Any) -> dict[str, str]:
    return {"python": platform.python_version(), "numpy": np.__version__, "mxnet": mx.__version__}


def _write_json(path: Path, results: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write((json.dumps(results, indent=2) + "\n").encode())
