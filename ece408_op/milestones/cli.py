"""What m1.py to m4.py share: arguments, the printed lines of the course, checks, and exit codes.

    m1   the network as MXNet computes it
    m2   the operator on the CPU
    m3   the operator on the GPU, with the first kernel that a student writes
    m4   the operator on the GPU, with the fastest kernel known

Exit codes: 0 done, 1 failed, 2 usage, 3 this machine can't.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.commands import CANNOT, FAILED, OK, whole_number
from ece408_op.core import dispatch
from ece408_op.core.check import agreement
from ece408_op.data import find_test, load_test
from ece408_op.data.atomic import output_file, write_text
from ece408_op.errors import DeviceError, Ece408Error
from ece408_op.models import files, shapes
from ece408_op.plugin import bridge, mxnet_import, op_times
from ece408_op.profile import session
from ece408_op.runtime import cuda, process_usage
from ece408_op.submission.sources import SUFFIXES, device_of

from ._own_file import own_file

#: Images of the test set.
DATA_SET = 10_000


@dataclass(frozen=True)
class Milestone:
    """What a script does: its title in --help, the network, and the device and implementation of ``New``.

    device: "cpu" or "gpu"; empty where MXNet's own Convolution computes.
    """

    title: str
    device: str = ""
    impl: str = dispatch.AUTO
    model: str = "ece408-high"


MILESTONES = {
    "m1": Milestone("Milestone 1: inference with MXNet's own Convolution.", model="baseline"),
    "m2": Milestone("Milestone 2: inference with the operator New on the CPU.", "cpu"),
    "m3": Milestone("Milestone 3: inference with a first kernel on the GPU.", "gpu", "naive"),
    "m4": Milestone("Milestone 4: inference with the fastest kernel on the GPU.", "gpu"),
}

#: gpu_network's implementation for milestone 1 where MXNet's own GPU kernels cannot run.
CUDNN = "cudnn"

#: What --impl takes to run all GPU kernels, and how often each is timed.
ALL, _REPEATS = "all", 5


def main(name: str, arguments: Sequence[str] | None = None) -> int:
    """Run the script of that name ("m1", ...) with the command line's arguments; returns its exit code."""
    milestone, script = MILESTONES[name], f"{name}.py"
    parser = _parser(milestone, script)
    options = parser.parse_intermixed_args(arguments)
    options.model, options.size = _positional(parser, milestone, options.positional)
    if options.fuse and options.impl == ALL:
        parser.error("--fuse: expected one kernel, got all: some of them cannot fuse tanh and max-pooling")
    if isinstance(options.impl, Path):
        if options.fuse or options.context == "gpu":
            parser.error("--impl: a file is not fused, and takes arrays of --context cpu, which it may copy to a GPU")
        options.context = "cpu"
    os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")  # MXNet names each fused graph otherwise
    try:
        return _Script(milestone, script, options).run()
    except (Ece408Error, OSError) as error:
        print(f"{script}: {error}", file=sys.stderr)
        return CANNOT if isinstance(error, DeviceError) else FAILED
    finally:
        if options.time:
            print(process_usage.measure().as_text(), file=sys.stderr)


def _parser(milestone: Milestone, script: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=script,
        usage=f"{script} [MODEL] [SIZE] [options]",
        description=milestone.title,
        epilog=f"example: python {script} ece408-low 100; models: {', '.join(files.list_names())}",
    )
    # Milestones without an option have its value all the same.
    parser.set_defaults(impl=milestone.impl, verify=False, fuse=False, precision="float32", context="cpu")
    positional = f"network (default {milestone.model}), images (default {DATA_SET}); a number alone is the size"
    parser.add_argument("positional", nargs="*", metavar="MODEL SIZE", help=positional)
    if milestone.device:
        known = [dispatch.AUTO, *dispatch.names(milestone.device), *([ALL] if milestone.device == "gpu" else [])]
        impl = f"the implementation: a file of yours, or one of {', '.join(known)} (default: {milestone.impl})"
        check = _implementation(milestone.device, known)
        parser.add_argument("--impl", type=check, default=milestone.impl, metavar="NAME or FILE", help=impl)
        verify = "compare every layer and prediction with MXNet's Convolution"
        parser.add_argument("--verify", action="store_true", help=verify)
        fuse = "compute a convolution, its tanh and the 2 x 2 max-pooling in one pass"
        parser.add_argument("--fuse", action="store_true", help=fuse)
    if milestone.device == "gpu":
        precision = "the least precise products that auto may take (default: float32)"
        parser.add_argument("--precision", choices=tuple(dispatch.SERVES), default="float32", help=precision)
    if milestone.device != "cpu":
        default, context = (None, "what this machine can") if milestone.device else ("cpu", "cpu")
        context = f"where MXNet's arrays are (default: {context})"
        parser.add_argument("--context", choices=["cpu", "gpu"], default=default, help=context)
    parser.add_argument("--data", metavar="FOLDER", help="folder with the Fashion-MNIST files")
    parser.add_argument("--json", metavar="FILE", type=output_file, help="write the results to FILE as well")
    parser.add_argument("--time", action="store_true", help="print the program's time and memory to stderr at the end")
    session.add_options(parser)
    return parser


def _implementation(device: str, known: Sequence[str]) -> Callable[[str], str | Path]:
    """Return the check of --impl: it gives a known name as it is, and a file for that device as a path."""

    def check(text: str) -> str | Path:
        path = Path(text)
        if text in known:
            return text
        if path.suffix.lower() not in SUFFIXES:
            names, suffixes = ", ".join(known), ", ".join(SUFFIXES)
            raise argparse.ArgumentTypeError(f"got {text!r}, expected one of {names}, or a file ({suffixes})")
        if not path.is_file():
            raise argparse.ArgumentTypeError(f"expected the path of a file, found no {text}")
        if device_of(path) != device:
            script = {"cpu": "m3.py or m4.py", "gpu": "m2.py"}[device]
            raise argparse.ArgumentTypeError(f"expected a file for the {device}, got {text}; run it with {script}")
        return path

    return check


def _positional(parser: argparse.ArgumentParser, milestone: Milestone, given: Sequence[str]) -> tuple[str, int]:
    """MODEL and SIZE; one argument that is a number is the size. Ends the program with usage where they are wrong."""
    model, size = milestone.model, str(DATA_SET)
    if len(given) > 2:
        parser.error(f"expected at most MODEL and SIZE, got {len(given)} arguments: {' '.join(given)}")
    if len(given) == 1 and given[0].lstrip("+-").isdecimal():
        size = given[0]
    else:
        model, size = [*given, *(model, size)[len(given) :]]
    if model not in files.list_names():
        parser.error(f"MODEL: expected one of {', '.join(files.list_names())}; got {model!r}")
    try:
        return model, whole_number(1, DATA_SET)(size)
    except argparse.ArgumentTypeError as error:
        parser.error(f"SIZE: {error}")


class _Script:
    """One run of a script; it prints the course's lines and collects the results as data."""

    def __init__(self, milestone: Milestone, name: str, options: argparse.Namespace) -> None:
        self.milestone, self.name, self.options = milestone, name, options
        self.results: dict[str, Any] = {"version": 1, "milestone": name[:-3]}

    def run(self) -> int:
        """Run the network; returns the exit code."""
        options = self.options
        watched = session.start(options, on_gpu="gpu" in (self.milestone.device, options.context))
        mx = mxnet_import.load()
        context, as_one_node = _context(mx, self.milestone, self.name, options.context)
        network = shapes.info(files.find(options.model))
        own = isinstance(options.impl, Path)
        with own_file(options, network) if own else nullcontext(options.impl) as options.impl:
            passed = self._run_network(network, context, as_one_node)
        versions = {"python": platform.python_version(), "numpy": np.__version__, "mxnet": mx.__version__}
        self.results.update(time=asdict(process_usage.measure()), versions=versions)
        self.results["profile"] = watched and watched.finish()
        if options.json is not None:
            write_text(options.json, json.dumps(self.results, indent=2) + "\n")
        return OK if passed else FAILED

    def _run_network(self, described: shapes.NetworkInfo, context: Any, as_one_node: bool) -> bool:
        """Load and run the network; returns whether its results passed."""
        from ece408_op.models import inference

        network, options, device = described.network, self.options, self.milestone.device
        channels, rows, columns = described.image
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
        plain = loaded = running = inference.built_in(network)
        if device:
            impl = dispatch.AUTO if options.impl == ALL else options.impl
            # gpu_network applies the precision to its node, and fuses by itself.
            precision, fuse = ("float32", False) if as_one_node else (options.precision, options.fuse)
            loaded = running = inference.with_operator(network, impl, device, precision, fuse)
        print(" done", flush=True)
        if device:
            self._check_replaced(network.name, loaded)
        if as_one_node:
            running = inference.on_gpu(loaded, dispatch.AUTO if device else CUDNN, options.precision)
        self.results.update(model=network.name, title=network.title, size=options.size, image=list(described.image))
        self.results.update(source=source, context="gpu_network" if as_one_node else str(context))
        if options.impl == ALL:
            return self._run_all_kernels(loaded, images)
        op_times.clear_op_times()
        predictions = inference.predict(running, images, context)
        self._report(agreement(predictions, labels), op_times.op_times())
        return not options.verify or self._verify(loaded, plain, images, predictions)

    def _check_replaced(self, network: str, loaded: Any) -> None:
        """Print which Convolutions ``New`` does not compute; raises Ece408Error where it computes none."""
        from ece408_op.models import inference

        for layer, reason in loaded.left.items():
            print(f"{self.name}: {layer} stays MXNet's Convolution: {reason}", file=sys.stderr)
        if not inference.layers(loaded.symbol):
            raise Ece408Error(
                f"{network}: expected a convolution that New can take the place of, got "
                f"{len(loaded.left) or 'none'}{' that it cannot (see above)' if loaded.left else ''}; run it with m1.py"
            )

    def _report(self, accuracy: float, calls: Sequence[op_times.OpTime]) -> None:
        """Print the course's lines, and with --time that of each whole call to stderr."""
        if self.milestone.device:
            for call in calls:
                print(f"Op Time: {call.seconds:f}")
                if self.options.time:
                    print(f"{call.layer}: whole call {call.call_seconds:.6f}", file=sys.stderr)
            print(f"Correctness: {accuracy} Model: {self.results['title']}")
        else:
            print(f"EvalMetric: {{'accuracy': {accuracy}}}")
        self.results.update(op_times=[_call(call) for call in calls], accuracy=accuracy, verification=None)

    def _run_all_kernels(self, network: Any, images: np.ndarray) -> bool:
        """Time and check every GPU kernel on every ``New`` of the network, on copies of its arrays on the GPU."""
        import mxnet as mx
        from tqdm import tqdm

        from ece408_op.bench import layers, results, tables
        from ece408_op.core import roofline
        from ece408_op.models import inference

        ceilings, cases = roofline.measure(), []
        for layer in inference.layers(network.symbol):
            given = [array.asnumpy() for array in inference.run(mx.sym.Group(layer.inputs[:2]), network, images)]
            problem = layer.attributes.problem(given[0].shape, given[1].shape)
            names = tqdm(dispatch.names("gpu"), desc=layer.name, unit="kernel", disable=None, leave=False)
            x, w = map(cuda.cupy().asarray, given)
            rows = layers.gpu_rows(problem, x, w, layers.Settings(names, _REPEATS, peers=False))
            cases.append(layers.case_of(layer.name, problem, rows, ceilings))
        measured = results.Results("layers", results.this_machine(gpu=True), cases=tuple(cases))
        print(tables.table(measured))
        self.results["layers"] = [asdict(case) for case in cases]
        return measured.passed

    def _verify(self, network: Any, plain: Any, images: np.ndarray, predictions: np.ndarray) -> bool:
        """Compare layers and predictions with those of ``plain``, the network with MXNet's own Convolution.

        Prints the result and returns whether it is right.
        """
        from ece408_op.models import inference

        found = inference.verify(network, plain, images, predictions)
        print(f"Largest difference from MXNet's Convolution: {found.largest_difference:.3g}")
        if found.worst is not None:
            print(f"Largest error against float64: {found.worst:.3g} of the kernel's bound")
        print(f"Agreeing predictions: {found.agreeing} of {found.compared}")
        self.results["verification"] = asdict(found)
        used = {call["implementation"] for call in self.results["op_times"]}
        reduced = any(dispatch.find(name).precision != "float32" for name in used)
        passed = found.right and (found.agreeing == found.compared or reduced)
        if not passed:
            what = "other predictions" if found.right else "an output that is NaN or errs by more than it may"
            print("\n".join([f"{self.name}: verification FAILED: {what}", *found.failures]), file=sys.stderr)
        return passed


def _context(mx: Any, milestone: Milestone, script: str, asked: str | None) -> tuple[Any, bool]:
    """Return the MXNet context, and whether gpu_network runs the whole network as one node of mx.cpu().

    It does where the GPU was asked for and MXNet's own kernels cannot run on it. Raises DeviceError, with what to do,
    where this machine has no such GPU.
    """
    if asked is None:
        asked = "gpu" if bridge.gpu_problem("device") is None else "cpu"
    if asked == "cpu" and milestone.device != "gpu":
        return mx.cpu(), False
    problem = bridge.gpu_problem("device" if asked == "gpu" else "host")
    if problem is None:
        return mx.gpu() if asked == "gpu" else mx.cpu(), False
    if asked != "gpu" or bridge.gpu_problem("host") is not None:
        raise DeviceError(problem)
    print(f"{script}: MXNet itself cannot use this GPU; ece408_op.gpu_network runs on it", file=sys.stderr)
    return mx.cpu(), True


def _call(call: op_times.OpTime) -> dict[str, Any]:
    shapes_of = {"x": call.problem.x_shape, "w": call.problem.w_shape, "y": call.problem.y_shape}
    names = ("layer", "implementation", "device", "seconds", "copy_seconds", "call_seconds")
    return {**shapes_of, **{name: getattr(call, name) for name in names}}
