"""The benchmark's command line: ece408-bench [layers | networks | transfers | one-image | sweep]."""

from __future__ import annotations

import sys

from ece408_op import commands

if __name__ == "__main__":  # above the other imports, which Ctrl-C ends with one line only inside of commands.run
    sys.exit(commands.run("bench"))

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from ece408_op.commands import CANNOT, FAILED, OK, print_lines, whole_number
from ece408_op.core import dispatch, roofline, tuning
from ece408_op.core.roofline import Ceilings
from ece408_op.data.atomic import output_file, output_file_problem, output_folder
from ece408_op.errors import DataError, DeviceError, Ece408Error, GraphError, MXNetImportError
from ece408_op.models import files
from ece408_op.plugin import bridge, mxnet_import
from ece408_op.problem import ConvProblem

from . import _calls, _cpu_roofline, _layer_names, _networks, _sweep, _training, layers, plots, results, tables
from .results import Case, Results

_DESCRIPTION = """\
Measure this package's convolutions and their peers in one process, on the same arrays.
Without a subcommand, layers: the operator and MXNet's Convolution (and PyTorch's, if installed) on the course's layers
on the CPU, in up to 3 minutes on two cores.
The outputs are checked; a wrong one has no time. The table goes to stdout, progress to stderr. With --json FILE, the
file is rewritten after each layer or network; after Ctrl-C, the same command with the same FILE goes on from there."""

_EXITS = "exit codes: 0 done, 1 failed or an output was wrong, 2 usage, 3 this machine can't (no MXNet, no GPU)"

_MOST_THREADS, _MOST_LAYERS = 1024, 10_000


@dataclass(frozen=True)
class _Plan:
    """The measurements of a subcommand: a function per case name, which takes the ceilings if there are any."""

    cases: Mapping[str, Callable[..., Case]]
    on_gpu: bool
    ceilings: Callable[[], Ceilings] | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or (words[0] not in _COMMANDS and words[0] not in ("-h", "--help")):
        words.insert(0, "layers")
    parser, subparsers = _parser()
    options = parser.parse_args(words)
    # MXNet reads these variables on import. Otherwise it uses half of the cores, and prints each graph that it fuses.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")
    try:
        if options.plots:
            plots.check()
        measured = _measure(_COMMANDS[options.command][0](options), options, " ".join(["ece408-bench", *words]))
        if options.command == "sweep" and options.record and measured.passed:
            _sweep.record(measured)
        print_lines([tables.table(measured)])
        for path in plots.draw(measured, options.plots) if options.plots else ():
            print(path, file=sys.stderr)
    except (Ece408Error, ValueError, OSError, MemoryError) as error:
        if isinstance(error, ValueError) and not isinstance(error, (DataError, GraphError)):
            subparsers[options.command].error(str(error))
        print(f"ece408-bench: {error}", file=sys.stderr)
        return CANNOT if isinstance(error, (MXNetImportError, DeviceError)) else FAILED
    return OK if measured.passed else FAILED


def _measure(plan: _Plan, options: argparse.Namespace, command_line: str) -> Results:
    kept = {key: value for key, value in vars(options).items() if key not in ("command", "json", "plots", "record")}
    machine = results.this_machine(options.threads, plan.on_gpu)
    measured = Results(options.command, machine, kept, command_line=command_line, complete=False)
    if options.json:
        measured = results.resumed(options.json, measured)
    done = {case.name for case in measured.cases}
    if done:
        print(f"{options.json}: {len(done)} of {len(plan.cases)} cases taken from the interrupted run", file=sys.stderr)
    if plan.ceilings and measured.ceilings is None:
        measured = replace(measured, ceilings=asdict(plan.ceilings()))
    ceilings = Ceilings(**measured.ceilings) if measured.ceilings else None
    with tqdm(total=len(plan.cases), initial=len(done), unit="case", disable=None, leave=False) as bar:
        for name, measure in plan.cases.items():
            if name in done:
                continue
            bar.set_description(name)
            cases = (*measured.cases, measure(ceilings) if ceilings else measure())
            measured = replace(measured, cases=cases, complete=len(cases) == len(plan.cases))
            if options.json:
                results.write(options.json, measured)
            bar.update()
    return measured


def _layers_plan(options: argparse.Namespace) -> _Plan:
    on_gpu = options.context == "gpu"
    if options.precision != "float32" and not on_gpu:
        raise ValueError("--precision: expected float32 on the CPU; --context gpu has the others")
    if options.split_form and (options.gradient or not on_gpu):
        raise ValueError("--split-form: expected --context gpu and no --gradient")
    options.images = options.images or _layer_names.SET_IMAGES[options.set]
    words = options.layer or _layer_names.SETS[options.set]
    problems = {word: _layer_names.parse(word, options.images) for word in words}
    if options.random:
        problems = _layer_names.random_layers(options.random, options.seed, most=options.images)
    if options.gradient:
        problems = {name: getattr(problem, f"{options.gradient}_gradient") for name, problem in problems.items()}
    impls = layers.known_impls(options.impl, options.context)
    if on_gpu:
        how = {"seed": options.seed, "precision": options.precision, "split_form": options.split_form}
        return _on_gpu(problems, layers.Settings(impls, options.repeats or 20, **how))
    for name, problem in problems.items():
        elements, both = max(map(math.prod, problem.shapes)), 2 * problem.bytes  # a fresh output and a reused one
        if elements >= 1 << 31 or both > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise ValueError(
                "--images: expected arrays that this machine's memory and MXNet can hold, fewer than 2**31 elements, "
                f"got {elements} elements of {name}; use fewer images"
            )
    mxnet_import.load()
    # Without --repeats: three calls, but no further call after 5 seconds.
    settings = layers.Settings(impls, options.repeats or 3, math.inf if options.repeats else 5.0, seed=options.seed)
    cases = {name: partial(layers.cpu_case, name, problem, settings) for name, problem in problems.items()}
    return _Plan(cases, False, partial(_cpu_roofline.measure, options.threads))


def _on_gpu(problems: dict[str, ConvProblem], settings: layers.Settings) -> _Plan:
    cases = {name: partial(layers.gpu_case, name, problem, settings) for name, problem in problems.items()}
    return _Plan(cases, True, roofline.measure)


def _sweep_plan(options: argparse.Namespace) -> _Plan:
    for name in ("random", "images") if options.again else ():
        if getattr(options, name):
            raise ValueError(f"--again: expected no --{name}, since the layers are the tuning table's")
    problem = output_file_problem(tuning.TABLE) if options.record else None
    if problem:  # fail here, not at the end of a sweep of hours
        raise Ece408Error(f"--record: the tuning table: {problem}")
    given = options.images or _layer_names.IMAGES, options.random or 0, options.seed
    problems = _sweep.recorded() if options.again else _sweep.layers(*given)
    impls = layers.known_impls(options.impl, "gpu")
    settings = layers.Settings(impls, options.repeats or 10, 0.3, 3, options.seed, peers=False, tune=True)
    return _on_gpu(problems, settings)


def _networks_plan(options: argparse.Namespace) -> _Plan:
    if options.gpus > 1 and not options.training:
        raise ValueError("--gpus: expected --training; --context gpu times inference on all GPUs by itself")
    mx, own = mxnet_import.load(), files.list_names()
    chosen = options.network or _networks.SETS[options.set]
    for name in chosen:
        try:
            name in own or mx.gluon.model_zoo.vision.get_model(name)
        except ValueError as error:
            names = " ".join(str(error).split())
            raise ValueError(f"--network: expected {', '.join(own)}, or one of Gluon's: {names}") from None
        if name in own and (options.images or 0) > _layer_names.IMAGES:
            raise ValueError(f"--images: expected at most {_layer_names.IMAGES} with {name}, got {options.images}")
    if options.training:
        words = (options.images, options.repeats or 10, options.gpus, options.seed)
        return _Plan({name: partial(_training.case, name, *words) for name in chosen}, on_gpu=True)
    given = (options.images, options.context, options.repeats or 5, options.seed)
    return _Plan({name: partial(_networks.case, name, *given) for name in chosen}, options.context == "gpu")


def _one_image_plan(options: argparse.Namespace) -> _Plan:
    mxnet_import.load()
    if options.context == "gpu":
        bridge.require_mxnet_gpu()
    case = partial(_calls.one_image, options.context, options.repeats or 2000)
    return _Plan({"2017": case}, options.context == "gpu")


def _transfers_plan(options: argparse.Namespace) -> _Plan:
    (impl,) = layers.known_impls([options.impl], "gpu")
    mxnet_import.load()
    return _Plan({"2017": partial(_calls.transfers, impl, options.images, options.repeats or 3)}, True)


#: Each subcommand's plan, title, description and example.
_COMMANDS = {
    "layers": (
        _layers_plan,
        "time implementations of New and their peers on layers",
        """\
On the CPU: calls of the operator with fresh outputs (new memory) and with reused ones (out=), MXNet's Convolution, and
PyTorch's if installed. With --context gpu: kernels on arrays of the GPU, and cuDNN through PyTorch. An implementation
that does not support a layer is a row that says why. With --gradient, MXNet's backward pass and PyTorch's, and the
operator's kernels alone.""",
        "ece408-bench layers --impl direct auto --layer 2017 3x32x32x16x5 --images 1000 --json layers.json",
    ),
    "networks": (
        _networks_plan,
        "time whole networks, and compare their predictions with MXNet's",
        """\
forward: from MXNet's memory to NumPy's. With --context gpu the convolutions run on the GPU, and gpu_network and PyTorch
take part, also with images that are on the GPU already (gpu). --training: gpu_network and PyTorch.""",
        "ece408-bench networks --context gpu --network ece408-high resnet18_v1 --json networks.json",
    ),
    "transfers": (
        _transfers_plan,
        "time the operator on mx.cpu() arrays with device='gpu'",
        "The peer is a copy of the output alone from the GPU, by the same staging buffers.",
        "ece408-bench transfers --impl sliding_window --repeats 5 --json transfers.json",
    ),
    "one-image": (
        _one_image_plan,
        "time the operator on one image",
        "The peer is a Custom operator that does nothing. first: the first call of a fresh process.",
        "ece408-bench one-image --context cpu --json one-image.json",
    ),
    "sweep": (
        _sweep_plan,
        "time every GPU kernel on many layers, and record the tuning table",
        "The layers are the course's, with three numbers of images, and random ones.",
        "ece408-bench sweep --random 24 --record",
    ),
}


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    style: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    ending = f"example:\n  {{}}\n\n{_EXITS}"
    epilog = ending.format("ece408-bench --threads 2 --json layers.json")
    parser = argparse.ArgumentParser(prog="ece408-bench", description=_DESCRIPTION, epilog=epilog, **style)
    chosen = parser.add_subparsers(dest="command", metavar="{" + ",".join(_COMMANDS) + "}")
    found = {}
    for name, (_, title, description, example) in _COMMANDS.items():
        text, epilog = f"{title[0].upper()}{title[1:]}.\n{description}", ending.format(example)
        found[name] = chosen.add_parser(name, help=title, description=text, epilog=epilog, **style)

    def option(commands: str, name: str, help_text: str, **given: Any) -> None:
        for command in commands.split():
            found[command].add_argument(name, help=help_text, **given)

    every = " ".join(_COMMANDS)
    number: Any = {"type": whole_number(1), "metavar": "N"}
    several: Any = {"nargs": "+", "metavar": "NAME"}
    flag: Any = {"action": "store_true"}
    text = "where the operator computes (default: cpu)"
    option("layers networks one-image", "--context", text, choices=["cpu", "gpu"], default="cpu")
    text = "implementations, such as direct; or all (default: {})"
    option("layers", "--impl", text.format("auto"), **several, default=["auto"])
    option("sweep", "--impl", text.format("all"), **several, default=["all"])
    option("transfers", "--impl", "the implementation (default: auto)", metavar="NAME", default="auto")
    option("layers", "--gradient", "time the layers' gradients to these instead", choices=("data", "weight"))
    text = "of auto and cuDNN (default: float32)"
    option("layers", "--precision", text, choices=list(dispatch.SERVES), default="float32")
    text = "on a GPU, also layers whose activations stay split, NHWC, as inside gpu_network"
    option("layers", "--split-form", text, **flag)
    option("networks", "--training", "time training steps, on a GPU", **flag)
    option("networks", "--gpus", "with --training, GPUs that share a step's images (default: 1)", **number, default=1)
    for command, sets in (("layers", _layer_names.SETS), ("networks", _networks.SETS)):
        text = f"the course's {command}, or those of known image classifiers, with 128 images (default: course)"
        option(command, "--set", text, choices=list(sets), default="course")
    text = "names, or sizes CxHxWxMxK such as 3x32x32x16x5 or 96x35x35x96x3s2p1, in place of --set"
    option("layers", "--layer", text, **several)
    option("networks", "--network", "of models/, or of Gluon's such as resnet50_v1, in place of --set", **several)
    few_layers: Any = {**number, "type": whole_number(1, _MOST_LAYERS)}
    option("layers", "--random", "N random layers instead", **few_layers)
    option("sweep", "--random", "N random layers as well", **few_layers)
    text = f"images of each case; random layers have as many at most (default: {_layer_names.IMAGES})"
    option("layers networks sweep", "--images", text, **number)
    option("transfers", "--images", text, **number, default=_layer_names.IMAGES)
    for command, seed in (("layers", 0), ("networks", 0), ("sweep", 408)):
        text = f"of data and random layers (default: {seed})"
        option(command, "--seed", text, type=whole_number(0, 2**32 - 1), default=seed)
    option("sweep", "--again", "the layers that the tuning table has of this GPU, instead", **flag)
    option("sweep", "--record", "write the times into the tuning table, in place of older ones", **flag)
    cores = len(os.sched_getaffinity(0))
    # More threads than cores would only wait for each other.
    few: Any = {**number, "type": whole_number(1, _MOST_THREADS), "default": cores}
    option(every, "--threads", f"threads of all contestants (default: {cores})", **few)
    option(every, "--repeats", "timed calls of each kind (fewer by default where a call takes seconds)", **number)
    option(every, "--json", "write all figures there, case by case", type=output_file, metavar="FILE")
    text = "draw bars, and a roofline of layers, there"
    option(every, "--plots", text, type=output_folder, metavar="FOLDER")
    return parser, found
