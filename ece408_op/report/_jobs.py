"""Which runs a report is made of, from what was asked for and what the networks' files say."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from ece408_op.models import shapes

#: What a run needs of a machine, a key of the machine's ``cannot``.
NOTHING, GPU, DEVICE, COUNTERS = "", "gpu", "device", "counters"

MACHINE = "machine"
#: The m2 run without an option: the implementation that the operator chooses.
AUTO = "auto"
MILESTONES = ("m1", "m2", "m3", "m4")

_SCRIPT = "import sys; from ece408_op.milestones.cli import main; sys.exit(main({name!r}))"

Layer = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Job:
    """One run: its name, which is its file's too, what Python is given, what it needs, the command for people."""

    name: str
    arguments: tuple[str, ...]
    needs: str = NOTHING
    shown: str = ""

    @property
    def command(self) -> list[str]:
        """The command line, to which ``--json FILE`` is added."""
        return [sys.executable, *self.arguments]


@dataclass(frozen=True)
class Asked:
    """What a report is asked for: names of networks, numbers of images, milestones, kernels of CPU and GPU."""

    networks: Sequence[str]
    sizes: Sequence[int]
    milestones: Sequence[str]
    cpu_kernels: Sequence[str]
    gpu_kernels: Sequence[str]
    data: str | None = None


def plan(asked: Asked) -> list[Job]:
    """All runs, in the order in which they are made. Raises GraphError where a network's files are wrong."""
    jobs = [Job(MACHINE, ("-m", "ece408_op.report.machine"), shown="python -m ece408_op.report.machine")]
    for network in asked.networks:
        for size in asked.sizes:
            jobs += _milestones(asked, network, size)
    jobs += _built_in(asked)
    if {"m3", "m4"} & set(asked.milestones):
        jobs += _kernels(asked)
    return jobs


@cache
def layers(network: str) -> tuple[Layer, ...]:
    """(C, H, W, M, K) of a network's convolutions, in order."""
    found = shapes.info(network).convolutions
    return tuple((layer.x[1], layer.x[2], layer.x[3], layer.w[0], layer.w[2]) for layer in found)


def first_with_its_layers(networks: Sequence[str]) -> dict[str, str]:
    """For each network the first one whose convolutions have the same shapes: kernels are timed on that one alone."""
    seen: dict[tuple[Layer, ...], str] = {}
    return {network: seen.setdefault(layers(network), network) for network in networks if layers(network)}


def _milestones(asked: Asked, network: str, size: int) -> Iterator[Job]:
    def job(script: str, needs: str, suffix: str, *options: str) -> Job:
        given = (network, str(size), *options)
        data = () if asked.data is None else ("--data", asked.data)
        name = "-".join(filter(None, (script, network, str(size), suffix)))
        shown = " ".join(("python", f"{script}.py", *given))
        return Job(name, ("-c", _SCRIPT.format(name=script), *given, *data), needs, shown)

    if "m1" in asked.milestones:
        yield job("m1", NOTHING, "")
        yield job("m1", NOTHING, "profile", "--profile")
        yield job("m1", DEVICE, "gpu", "--context", "gpu")
        yield job("m1", DEVICE, "gpu-profile", "--context", "gpu", "--profile")
    if "m2" in asked.milestones:
        yield job("m2", NOTHING, AUTO)
        for kernel in asked.cpu_kernels:
            yield job("m2", NOTHING, kernel, "--impl", kernel)
        yield job("m2", NOTHING, "profile", "--profile")
    for script in ("m3", "m4"):
        if script in asked.milestones:
            yield job(script, GPU, "")
            yield job(script, GPU, "profile", "--profile")


def _built_in(asked: Asked) -> Iterator[Job]:
    """The operator on the CPU compared with MXNet's Convolution, layer by layer."""
    if "m2" not in asked.milestones:
        return
    images = max(asked.sizes)
    for layer in dict.fromkeys(layer for network in asked.networks for layer in layers(network)):
        word = layer_word(layer)
        given = ("layers", "--impl", AUTO, "--layer", word, "--images", str(images))
        shown = " ".join(("ece408-bench", *given))
        yield Job(f"bench-{word}-{images}", ("-m", "ece408_op.bench", *given), NOTHING, shown)


def _kernels(asked: Asked) -> Iterator[Job]:
    if not asked.gpu_kernels:
        return
    distinct = list(dict.fromkeys(first_with_its_layers(asked.networks).values()))
    data = () if asked.data is None else ("--data", asked.data)
    for network in distinct:
        for size in asked.sizes:
            given = (network, str(size), "--kernels", *asked.gpu_kernels)
            module = ("-m", "ece408_op.report.kernels")
            shown = f"python -m ece408_op.report.kernels {network} {size}"
            words = "+".join(layer_word(layer) for layer in layers(network))
            yield Job(f"kernels-{words}-{size}", (*module, *given, *data), GPU, shown)
    images = max(asked.sizes)
    for layer in dict.fromkeys(layer for network in distinct for layer in layers(network)):
        word = layer_word(layer)
        given = (word, "--images", str(images))
        shown = " ".join(("python -m ece408_op.report.counters", *given))
        arguments = ("-m", "ece408_op.report.counters", *given, "--kernels", *asked.gpu_kernels)
        yield Job(f"counters-{word}-{images}", arguments, COUNTERS, shown)


def layer_word(layer: Layer) -> str:
    """CxHxWxMxK, as ece408-bench takes it."""
    return "x".join(map(str, layer))
