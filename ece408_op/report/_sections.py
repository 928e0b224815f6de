"""The page's sections: tables and charts of the kept results, and what the commands printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ece408_op.bench import plots, results, tables
from ece408_op.core.roofline import Ceilings

from ._commands import COUNTERS, MACHINE, MILESTONES, PROFILE, Asked
from ._runs import Runs

#: The kernel that charts mark like the peers.
BASELINE = "naive"

_LAUNCHES = ["kernel", "function", "launches", "threads per block", "registers", "shared bytes", "spilled bytes"]
_LAUNCHES += ["occupancy, at most"]


#: A table of words; the first row is its head.
Table = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Block:
    """A part of a section: a picture as SVG, tables, or text as a command printed it. folded: shown on demand."""

    title: str
    tables: Sequence[Table] = ()
    text: str = ""
    svg: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A section with what its figures mean; without blocks, the page gives the reason ``why``."""

    title: str
    words: str
    blocks: Sequence[Block]
    why: str = "no run gave a figure for it"


def sections(asked: Asked, runs: Runs) -> list[Section]:
    """The page's sections, in order; those of milestones that were not asked for are left out."""
    facts = runs.result(MACHINE)
    # The advice on what to use instead is in the machine's table and at the end of the page.
    no_gpu = {"why": facts["cannot"]["gpu"].split(": use ")[0].rstrip(".")} if facts and facts["cannot"]["gpu"] else {}
    found = [
        Section(
            "In short",
            "Op Time is the computation of one convolution on all images, in seconds; a network with two convolutions "
            "has two. Accuracy is the share of images that are classified correctly; those of the generated sample "
            "set cannot be compared. The last columns are the seconds of the whole program.",
            _milestones(runs),
        ),
        Section("Machine", "All times in this report were measured on this machine.", _machine(facts)),
    ]
    if "m2" in asked.milestones:
        words = (
            "Each kernel on random images: calls of the operator New into memory that was written before (reused) and "
            "into new memory (fresh), and MXNet's Convolution. auto is what m2.py runs without --impl. Every output "
            "was checked against float64; a wrong one has no time."
        )
        found.append(Section("Each CPU kernel", words, _kernels("cpu", asked, runs)))
    if {"m3", "m4"} & set(asked.milestones):
        words = (
            "Each kernel on random images, with x, w and y on the GPU: the time between two events, with other data "
            "in L2 before each call. Every output was filled with NaN before, and checked against float64; a wrong one "
            "has no time. A kernel's roofline is the larger of the memory roofline and that of the units that it uses. "
            "Registers and spilled bytes (local memory) are per thread, shared memory per block."
        )
        found.append(Section("Each GPU kernel", words, _kernels("gpu", asked, runs), **no_gpu))
        words = "The bytes and the active warps of one call, counted by Nsight Compute."
        found.append(Section("Hardware counters", words, list(_counters(runs)), **no_gpu))
    printed = [(command.line, runs.printed(command.name)) for command in runs.commands if command.group == PROFILE]
    profiles = [Block(line, text=text, folded=True) for line, text in printed if text]
    found.append(Section("Profiles", "What each milestone prints with --profile.", profiles))
    missing = [["reason", "commands", "which"]]
    missing += [[why, str(len(lines)), "; ".join(lines)] for why, lines in runs.missing().items()]
    words, why = "These commands gave no figure.", "everything that was asked for was run"
    found.append(Section("What was not run", words, [Block("", [missing])] * (len(missing) > 1), why))
    return found


def _milestones(runs: Runs) -> list[Block]:
    head = ["script", "network", "images", "data", "context", "convolutions by", "accuracy", "Op Time of each layer"]
    rows = [[*head, "user", "system", "elapsed"]]
    for command in runs.commands:
        run = runs.result(command.name) if command.group in MILESTONES else None
        if run:
            script = run["milestone"]
            times, kernels = ([call[key] for call in run["op_times"]] for key in ("seconds", "implementation"))
            context = "cuDNN in gpu_network" if (script, run["context"]) == ("m1", "gpu_network") else run["context"]
            cells = [script, run["model"], str(run["size"]), run["source"], context, " + ".join(kernels)]
            cells += [f"{run['accuracy']:.4f}", " + ".join(f"{time:.6f}" for time in times)]
            rows.append([*cells, *(f"{run['time'][key]:.2f}" for key in ("user", "system", "real"))])
    return [Block("", [rows])] if len(rows) > 1 else []


def _machine(facts: Any) -> list[Block]:
    def flat(values: Any, prefix: str = "") -> Iterator[list[str]]:
        for key, value in values.items():
            name = f"{prefix}{key}".replace("_", " ")
            if isinstance(value, dict):
                yield from flat(value, f"{key} ")
            elif value is not None:
                yield [name, f"{value:.4g}" if isinstance(value, float) else str(value)]

    return [Block("", [[["what", "which"], *flat(facts)]])] if facts else []


def _kernels(context: str, asked: Asked, runs: Runs) -> list[Block]:
    """Charts of the calls with the most images; then the table of each layer and number of images."""
    size = max(asked.sizes)
    cases = {layer: case for layer in asked.layers for case in [runs.case(context, layer, size)] if case}
    charts = []
    timed = [case for case in cases.values() if any(row.median for row in case.rows)]
    facts = runs.result(MACHINE)
    if context == "gpu" and timed and facts and facts["ceilings"]:
        svg = plots.roofline(timed, Ceilings(**facts["ceilings"]), BASELINE)
        charts.append(Block(f"Roofline, {size} images", svg=plots.embedded("roofline", svg)))
    for case in timed:
        reused = tuple(row for row in case.rows if row.call != results.FRESH)
        svg = plots.bars(results.Case(case.name, size, reused), BASELINE)
        title = f"Time of each kernel on {case.name}, {size} images; the line in a bar is the kernel's roofline"
        charts.append(Block(title, svg=plots.embedded(f"{context}-{case.name}", svg)))
    shown = []
    for command in runs.commands:
        found = runs.result(command.name) if command.group == f"layers-{context}" else None
        if found:
            run = results.from_data(found)
            reasons = "\n".join(tables.reasons(run))
            shown.append(Block(command.line, [tables.rows(run), *_launches(run.cases)], reasons))
    return [*charts, *shown]


def _launches(cases: Sequence[results.Case]) -> list[Table]:
    rows = [
        [
            *(row.kernel, launch["entry"], str(launch["count"]), str(prod(launch["block"])), str(launch["registers"])),
            *(str(launch["static_shared"] + launch["dynamic_shared"]), str(launch["local"])),
            f"{100 * launch['occupancy']:.0f} %",
        ]
        for case in cases
        for row in case.rows
        for launch in row.details.get("launches", ())
    ]
    return [[_LAUNCHES, *rows]] if rows else []


def _counters(runs: Runs) -> Iterator[Block]:
    for command in runs.commands:
        counted = runs.result(command.name) if command.group == COUNTERS else None
        if counted:
            names = list(dict.fromkeys(name for figures in counted.values() for name in figures))
            rows = [[kernel, *(f"{figures.get(name, 0):.4g}" for name in names)] for kernel, figures in counted.items()]
            yield Block(command.line, [[["kernel", *names], *rows]])
