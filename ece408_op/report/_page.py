"""The page: tables and charts of the kept results, and the output of the commands."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ece408_op.bench import plots, results, tables
from ece408_op.core.roofline import Ceilings
from ece408_op.runtime import templates

from ._commands import COUNTERS, MILESTONES, PROFILE
from ._runs import Runs

#: The kernel that charts mark in the same way as the peers.
BASELINE = "naive"

_MILESTONES = ["script", "network", "images", "data", "context", "convolutions by", "accuracy"]
_MILESTONES += ["Op Time of each layer", "user", "system", "elapsed"]
_LAUNCHES = ["kernel", "function", "launches", "threads per block", "registers", "shared bytes", "spilled bytes"]
_LAUNCHES += ["occupancy, at most"]

#: A table of words; the first row is its head.
Table = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Block:
    """A part of a section: a picture as SVG, tables, or a command's output. folded: whether it is shown on demand."""

    title: str = ""
    tables: Sequence[Table] = ()
    text: str = ""
    svg: str = ""
    folded: bool = False


def as_page(asked: Namespace, runs: Runs) -> str:
    """Return the page as one HTML file that fetches nothing, with all text escaped.

    Its sections are in report.html.j2; sections of milestones that were not asked for are left out.
    """
    milestones, done = set(asked.milestones), runs.done
    no_gpu = runs.facts["cannot"]["gpu"] if runs.facts else None
    profiles = [each for each in done("m") if each[0].name.endswith(PROFILE)]
    missing = [[reason, str(len(lines)), "; ".join(lines)] for reason, lines in runs.missing().items()]
    shown = {
        "on_cpu": "m2" in milestones,
        "on_gpu": bool({"m3", "m4"} & milestones),
        # The machine's table and the end of the page have the advice that this line omits.
        "no_gpu": no_gpu and no_gpu.split(": use ")[0].rstrip("."),
        "milestones": _blocks([_MILESTONES, *_milestones(runs)]),
        "machine": _blocks([["item", "value"], *_facts(runs.facts or {})]),
        "cpu": _kernels("cpu", max(asked.sizes), runs),
        "gpu": _kernels("gpu", max(asked.sizes), runs),
        "counters": [Block(command.line, [_counters(figures)]) for command, figures, _ in done(COUNTERS)],
        "profiles": [Block(command.line, text=printed, folded=True) for command, _, printed in profiles],
        "missing": _blocks([["reason", "commands", "which"], *missing]),
    }
    return templates.render(Path(__file__).with_name("report.html.j2"), shown)


def _blocks(table: Table) -> list[Block]:
    """Return a block with the table; none if the table has only a head."""
    return [Block(tables=[table])] if len(table) > 1 else []


def _milestones(runs: Runs) -> Iterator[list[str]]:
    for command, run, _ in (one for script in MILESTONES for one in runs.done(script)):
        if command.name.endswith(PROFILE):
            continue
        times, kernels = ([call[key] for call in run["op_times"]] for key in ("seconds", "implementation"))
        cudnn = (run["milestone"], run["context"]) == ("m1", "gpu_network")
        cells = [run["milestone"], run["model"], str(run["size"]), run["source"]]
        cells += ["cuDNN in gpu_network" if cudnn else run["context"], " + ".join(kernels), f"{run['accuracy']:.4f}"]
        cells.append(" + ".join(f"{time:.6f}" for time in times))
        yield cells + [f"{run['time'][key]:.2f}" for key in ("user", "system", "real")]


def _facts(values: Any, prefix: str = "") -> Iterator[list[str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _facts(value, f"{key} ")
        elif value is not None:
            yield [f"{prefix}{key}".replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value)]


def _counters(counted: dict[str, dict[str, float]]) -> Table:
    names = list(dict.fromkeys(name for figures in counted.values() for name in figures))
    rows = [[kernel, *(f"{figures.get(name, 0):.4g}" for name in names)] for kernel, figures in counted.items()]
    return [["kernel", *names], *rows]


def _kernels(context: str, size: int, runs: Runs) -> list[Block]:
    """Return charts of the calls with ``size`` images, then a table per layer and number of images."""
    measured = [(command.line, results.from_data(run)) for command, run, _ in runs.done(f"layers-{context}")]
    cases = [(case, run.ceilings) for _, run in measured for case in run.cases if case.images == size]
    timed = [(case, ceilings) for case, ceilings in cases if any(row.median for row in case.rows)]
    blocks = []
    if context == "gpu" and timed and timed[0][1]:
        svg = plots.roofline([case for case, _ in timed], Ceilings(**timed[0][1]), BASELINE)
        blocks.append(Block(f"Roofline, {size} images", svg=plots.embedded("roofline", svg)))
    for case, _ in timed:
        reused = tuple(row for row in case.rows if row.call != results.FRESH)
        svg = plots.bars(replace(case, rows=reused), BASELINE)
        title = f"Time of each kernel on {case.name}, {size} images; the line in a bar is the kernel's roofline"
        blocks.append(Block(title, svg=plots.embedded(f"{context}-{case.name}", svg)))
    for line, run in measured:
        blocks.append(Block(line, [tables.rows(run), *_launches(run.cases)], "\n".join(tables.reasons(run))))
    return blocks


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
