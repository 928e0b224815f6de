"""The commands that a report runs: the milestones, ``ece408-bench layers`` and the hardware's counters."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ece408_op.core import dispatch
from ece408_op.models import shapes

#: A command's requirement; GPU and COUNTERS are keys of ``cannot`` in the machine's facts.
NOTHING, GPU, COUNTERS = "", "gpu", "counters"
MILESTONES = ("m1", "m2", "m3", "m4")
#: The suffix of the name of a milestone's command with --profile.
PROFILE = "-profile"


@dataclass(frozen=True)
class Command:
    """A command that writes JSON: the name of its result, its arguments of Python, its requirement of the machine.

    A name begins with the milestone, "layers-cpu", "layers-gpu" or "counters".
    """

    name: str
    arguments: tuple[str, ...]
    needs: str = NOTHING

    @property
    def line(self) -> str:
        """The command line for people; the report adds --json FILE."""
        return " ".join(("python", *self.arguments))


def layers(networks: Iterable[str]) -> list[str]:
    """Return the distinct layers of networks as CxHxWxMxK; raises GraphError if a network's files are wrong."""
    found = (layer for network in networks for layer in shapes.info(network).convolutions)
    return list(dict.fromkeys("x".join(map(str, (*one.x[1:], one.w[0], one.w[2]))) for one in found))


def all_commands(asked: Namespace) -> list[Command]:
    """Return the commands in the order in which they run, for the command line's options ``asked``.

    Raises GraphError if a network's files are wrong.
    """
    found = [one for network in asked.networks for size in asked.sizes for one in _milestones(asked, network, size)]
    cpu, gpu = ([name for name in dispatch.names(device) if name in asked.impl] for device in ("cpu", "gpu"))
    if "m2" in asked.milestones:
        found += _layers(asked, "cpu", [dispatch.AUTO, *cpu], NOTHING)
    if {"m3", "m4"} & set(asked.milestones) and gpu:
        found += _layers(asked, "gpu", gpu, GPU)
        size = max(asked.sizes)
        for layer in layers(asked.networks):
            given = ("-m", "ece408_op.profile.counters", layer, "--images", str(size), "--impl", *gpu)
            found.append(Command(f"counters-{layer}-{size}", given, COUNTERS))
    return found


def _milestones(asked: Namespace, network: str, size: int) -> Iterator[Command]:
    """Yield the commands of each milestone, with and without --profile; the first milestone's also on the GPU."""
    data = ("--data", asked.data) if asked.data else ()
    for script in asked.milestones:
        needs = GPU if script in ("m3", "m4") else NOTHING
        for suffix, need, context in (("", needs, ()), ("-gpu", GPU, ("--context", "gpu"))):
            if suffix and script != "m1":
                continue
            for profile, option in (("", ()), (PROFILE, ("--profile",))):
                given = ("-m", "ece408_op", script, network, str(size), *context, *option, *data)
                yield Command(f"{script}-{network}-{size}{suffix}{profile}", given, need)


def _layers(asked: Namespace, context: str, impls: Sequence[str], needs: str) -> Iterator[Command]:
    for layer in layers(asked.networks):
        for size in asked.sizes:
            given = ("layers", "--context", context, "--layer", layer, "--images", str(size), "--impl", *impls)
            yield Command(f"layers-{context}-{layer}-{size}", ("-m", "ece408_op", "bench", *given), needs)
