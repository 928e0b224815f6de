"""The commands that a report runs: the milestones, ``ece408-bench layers`` and the hardware's counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from ece408_op.core import dispatch
from ece408_op.models import shapes

#: What a command needs of the machine, a key of ``cannot`` in the machine's facts.
NOTHING, GPU, COUNTERS = "", "gpu", "counters"

#: Commands' groups, besides COUNTERS, "layers-cpu" and "layers-gpu".
MACHINE, PROFILE = "machine", "profile"
MILESTONES = ("m1", "m2", "m3", "m4")


@dataclass(frozen=True)
class Command:
    """A command that writes JSON: its result's name, Python's arguments, what it needs of the machine, its group."""

    name: str
    arguments: tuple[str, ...]
    needs: str = NOTHING
    group: str = MACHINE

    @property
    def line(self) -> str:
        """The command line for people; the report adds --json FILE."""
        return " ".join(("python", *self.arguments))


@dataclass(frozen=True)
class Asked:
    """The networks, numbers of images, milestones and implementations that a report is about."""

    networks: Sequence[str]
    sizes: Sequence[int]
    milestones: Sequence[str]
    impls: Sequence[str]
    data: str | None = None

    def on(self, device: str) -> list[str]:
        """The implementations for "cpu" or "gpu"."""
        return [name for name in dispatch.names(device) if name in self.impls]

    @property
    def layers(self) -> list[str]:
        """The distinct layers of the networks as CxHxWxMxK."""
        return list(dict.fromkeys(layer for network in self.networks for layer in layers(network)))


@cache
def layers(network: str) -> tuple[str, ...]:
    """The convolutions of a network, in order, as CxHxWxMxK; raises GraphError where the network's files are wrong."""
    found = shapes.info(network).convolutions
    return tuple("x".join(map(str, (*layer.x[1:], layer.w[0], layer.w[2]))) for layer in found)


def all_commands(asked: Asked) -> list[Command]:
    """The commands in the order in which they run. Raises GraphError where a network's files are wrong."""
    found = [Command(MACHINE, ("-m", "ece408_op.report.machine"))]
    for network in asked.networks:
        for size in asked.sizes:
            found += _milestones(asked, network, size)
    if "m2" in asked.milestones:
        impls = [dispatch.AUTO, *asked.on("cpu")]
        found += [_layers("cpu", layer, size, impls, NOTHING) for layer in asked.layers for size in asked.sizes]
    kernels, size = asked.on("gpu"), max(asked.sizes)
    if {"m3", "m4"} & set(asked.milestones) and kernels:
        found += [_layers("gpu", layer, size, kernels, GPU) for layer in asked.layers for size in asked.sizes]
        for layer in asked.layers:
            given = (layer, "--images", str(size), "--impl", *kernels)
            found.append(
                Command(f"counters-{layer}-{size}", ("-m", "ece408_op.profile.counters", *given), COUNTERS, COUNTERS)
            )
    return found


def _milestones(asked: Asked, network: str, size: int) -> Iterator[Command]:
    def command(script: str, needs: str = NOTHING, suffix: str = "", *options: str) -> Command:
        name = "-".join(filter(None, (script, network, str(size), suffix)))
        data = ("--data", asked.data) if asked.data else ()
        group = PROFILE if "--profile" in options else script
        return Command(name, ("-m", "ece408_op", script, network, str(size), *options, *data), needs, group)

    for script in asked.milestones:
        needs = GPU if script in ("m3", "m4") else NOTHING
        yield command(script, needs)
        yield command(script, needs, "profile", "--profile")
        if script == "m1":
            yield command(script, GPU, "gpu", "--context", "gpu")
            yield command(script, GPU, "gpu-profile", "--context", "gpu", "--profile")


def _layers(context: str, layer: str, size: int, impls: Sequence[str], needs: str) -> Command:
    given = ("layers", "--context", context, "--layer", layer, "--images", str(size), "--impl", *impls)
    group = f"layers-{context}"
    return Command(f"{group}-{layer}-{size}", ("-m", "ece408_op", "bench", *given), needs, group)
