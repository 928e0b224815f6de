"""What the course's milestones 3 and 4 asked for, from the kept runs: the GPU's kernels, ladders, plots."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from . import _plots
from ._document import NONE, Block, Items, Section, Table, Text, amount, over, percent, ratio, seconds
from ._jobs import AUTO, Asked, Layer, layers
from ._milestones import layer_text, op_times, program, with_profiles
from ._published import LADDERS, Ladder, team
from ._runs import Runs

BASELINE = "naive"

#: What a run calls its images.
SOURCES = {
    "fashion-mnist": "Images: the test set of Fashion-MNIST.",
    "sample": "Images: the generated sample set, since Fashion-MNIST was not at hand. Accuracies are not comparable.",
}


def milestones34(runs: Runs, asked: Asked) -> Section:
    """Milestones 3 and 4: the operator on the GPU."""
    distinct = list(dict.fromkeys(layer for network in asked.networks for layer in layers(network)))
    profiles = [
        (f"{script}, {network}, {size} images", runs.milestone(script, network, size, "profile"))
        for script in ("m3", "m4")
        for network in asked.networks
        for size in asked.sizes
    ]
    section = Section(
        "Milestones 3 and 4: the operator on the GPU",
        [
            Text("Ratios of Op Times, such as m2 / m4, say how many times as fast the second is."),
            _cpu_against_gpu(runs, asked),
            _programs(runs, asked),
        ],
        [_kernels(runs, asked, distinct), _ladders(runs, asked), _changes(runs, asked, distinct)],
    )
    return with_profiles(section, profiles)


def summary(runs: Runs, asked: Asked) -> Section:
    """The few figures that most people look for."""
    size = max(asked.sizes)
    rows = []
    sources = set()
    for network in asked.networks:
        results = {script: runs.milestone(script, network, size) for script in ("m1", "m3", "m4")}
        results["m2"] = runs.milestone("m2", network, size, AUTO)
        known = [found for script in ("m4", "m3", "m2", "m1") for found in [results[script]] if found is not None]
        sources |= {found["source"] for found in known}
        if known:
            operator_runs = (results[script] for script in ("m2", "m3", "m4"))
            m2, m3, m4 = (op_times(found) if found else NONE for found in operator_runs)
            on_cpu = [_fastest_on_cpu(runs, asked, network, size, layer) for layer in range(len(layers(network)))]
            rows.append([network, f"{known[0]['accuracy']:.4f}", m2, " + ".join(on_cpu), m3, m4])
    head = ["network", "accuracy", "CPU, m2", "fastest CPU kernel", "GPU, first kernel, m3", "GPU, fastest kernel, m4"]
    # A column of dashes says nothing: the end of the report lists what was not run, with the reason.
    shown = [n for n in range(len(head)) if n < 2 or any(set(row[n]) - set(f"{NONE} +") for row in rows)]
    table = Table(
        f"Accuracy and Op Time of each layer, {size} images",
        [head[n] for n in shown],
        [[row[n] for n in shown] for row in rows],
    )
    words = (
        "Op Time is the computation of one convolution on all images; a network with two has two, in their order. "
        "m2 is what m2.py runs without --impl. The fastest CPU kernel is the one with the least Op Time measured here."
    )
    section = Section("In short", [Text(words), table])
    section.blocks += [Text(SOURCES.get(source, f"Images: {source}.")) for source in sorted(sources)]
    return section


def _cpu_against_gpu(runs: Runs, asked: Asked) -> Table:
    rows = []
    for network in asked.networks:
        for size in asked.sizes:
            cpu, first, last = (
                runs.op_times("m2", network, size, AUTO),
                runs.op_times("m3", network, size),
                runs.milestone("m4", network, size),
            )
            for number, layer in enumerate(layers(network)):
                best = last["op_times"][number] if last else None
                ours = best["seconds"] if best else None
                on_cpu, naive = (times[number] if times else None for times in (cpu, first))
                if naive is None and ours is None:
                    continue
                rows.append(
                    [
                        network,
                        layer_text(layer),
                        str(size),
                        seconds(on_cpu),
                        _fastest_on_cpu(runs, asked, network, size, number),
                        *map(seconds, (naive, ours)),
                        best["implementation"] if best else NONE,
                        ratio(over(on_cpu, naive)),
                        ratio(over(on_cpu, ours)),
                        ratio(over(naive, ours)),
                    ]
                )
    head = ["network", "layer", "images", "m2", "fastest CPU kernel", "m3", "m4", "m4's kernel"]
    head += ["m2 / m3", "m2 / m4", "m3 / m4"]
    return Table("Op Times, CPU against GPU, in whole runs of the network", head, rows)


def _fastest_on_cpu(runs: Runs, asked: Asked, network: str, size: int, layer: int) -> str:
    """Op Time and name of the fastest CPU kernel on one convolution."""
    best = runs.fastest_on_cpu(network, size, layer, [AUTO, *asked.cpu_kernels])
    return f"{seconds(best[1])}, {best[0]}" if best else NONE


def _programs(runs: Runs, asked: Asked) -> Table:
    rows = []
    for script in ("m3", "m4"):
        for network in asked.networks:
            for size in asked.sizes:
                result, watched = (runs.milestone(script, network, size, suffix) for suffix in ("", "profile"))
                if result is not None:
                    own = [f"{watched['time']['real']:.2f}", op_times(watched)] if watched else [NONE, NONE]
                    cells = [script, network, str(size), f"{result['accuracy']:.4f}", *program(result)]
                    rows.append([*cells, op_times(result), *own])
    head = ["script", "network", "images", "accuracy", "user, s", "system, s", "elapsed, s", "Op Time"]
    head += ["elapsed under the profiler, s", "Op Time under the profiler"]
    return Table("Whole programs, alone and under the profiler", head, rows)


def _kernels(runs: Runs, asked: Asked, distinct: list[Layer]) -> Section:
    """Every kernel on every layer: a table for each size, bars and a roofline for the largest."""
    section = Section("Each kernel")
    timed = [run for size in asked.sizes for layer in distinct for run in [runs.gpu_layer(layer, size)] if run]
    section.blocks += [
        Text(
            "Each kernel on each layer's own images, input and filters already on the GPU. Outputs were filled with "
            "NaN first and held against float64 within the kernel's bound; no time is shown for a wrong one. A time is "
            f"{method}. In brackets: times as fast as {BASELINE}."
        )
        for method in dict.fromkeys(run["method"] for run in timed)
    ]
    for size in asked.sizes:
        found = {layer: runs.gpu_rows(layer, size) for layer in distinct}
        if any(found.values()):
            section.blocks.append(_kernel_table(found, size))
    without = {
        f"{row['kernel']}, {layer_text(layer)}: {' '.join(row['reason'].split())}": None
        for size in asked.sizes
        for layer in distinct
        for row in runs.gpu_rows(layer, size)
        if "seconds" not in row
    }
    if without:
        section.blocks += [Text("Without a time:"), Items(list(without))]
    size = max(asked.sizes)
    measured = {layer: layer_run for layer in distinct for layer_run in [runs.gpu_layer(layer, size)] if layer_run}
    facts = runs.machine
    if measured and facts is not None and facts["gpu"] is not None:
        titles = {layer_text(layer): run for layer, run in measured.items()}
        section.blocks.append(_plots.roofline(titles, facts["gpu"]["ceilings"], size, BASELINE))
        section.blocks += [_plots.bars(title, run, size, BASELINE) for title, run in titles.items()]
    return section


def _kernel_table(found: dict[Layer, list[dict[str, Any]]], size: int) -> Table:
    names: dict[str, str] = {}
    for rows in found.values():
        names.update({row["kernel"]: row["precision"] for row in rows})
    columns = [layer for layer, rows in found.items() if rows]
    table = []
    for name, precision in names.items():
        cells = []
        for layer in columns:
            times = {row["kernel"]: row.get("seconds") for row in found[layer]}
            row = next((row for row in found[layer] if row["kernel"] == name), None)
            own, base = times.get(name), times.get(BASELINE)
            if own is not None:
                cells.append(seconds(own) + (f" ({ratio(over(base, own))})" if base else ""))
            else:
                cells.append(NONE if row is None else "wrong" if row.get("right") is False else "not supported")
        table.append([name, precision, *cells])
    head = ["kernel", "precision", *(layer_text(layer) for layer in columns)]
    return Table(f"Time of each kernel, {size} images", head, table)


def _ladders(runs: Runs, asked: Asked) -> Section:
    section = Section("The teams' ladders, walked again")
    section.blocks.append(
        Text(
            "Each rung's gain is the time before over the time after. Theirs are of GPUs of 2016 to 2018, ours of the "
            "machine above, with the kernels of this package that do the same thing. A dash: they published no "
            "figure, or no run here gave one."
        )
    )
    section.blocks += [_ladder(runs, ladder) for ladder in LADDERS if ladder.network in asked.networks]
    return section


def _ladder(runs: Runs, ladder: Ladder) -> Table:
    rows = []
    for step in ladder.steps:
        before, after = (
            runs.gpu_seconds(kernel, ladder.network, step.images, step.layer)
            for kernel in (step.ours_before, step.ours_after)
        )
        if before is None and after is None:
            continue
        rows.append(
            [
                step.what,
                *map(seconds, (step.before, step.after)),
                ratio(over(step.before, step.after)),
                f"{step.ours_before} to {step.ours_after}",
                *map(seconds, (before, after)),
                ratio(over(before, after)),
            ]
        )
    head = ["rung", "their time before", "after", "their gain", "kernels here", "our time before", "after", "our gain"]
    return Table(f"The ladder of {team(ladder.report, ladder.network)}", head, rows)


def _changes(runs: Runs, asked: Asked, distinct: list[Layer]) -> Section:
    """What each kernel takes of the chip, and what it moves."""
    size = max(asked.sizes)
    section = Section("What each optimisation changed")
    blocks: list[Block] = []
    for layer in distinct:
        run = runs.gpu_layer(layer, size)
        if run is None:
            continue
        counted = runs.counters(layer, size)
        rows = [_change(row, counted.get(row["kernel"], {})) for row in run["rows"] if row.get("launches")]
        head = [
            "kernel",
            "time",
            "launches",
            "threads a block",
            "registers",
            "shared memory",
            "spilled",
            "occupancy, at most",
        ]
        head += ["occupancy, measured", "read", "written", "through the cache"]
        caption = f"{layer_text(layer)}, {size} images; at least {amount(run['bytes'])} have to be moved"
        blocks.append(Table(caption, head, rows))
    if blocks:
        words = (
            "Registers are a thread's, shared memory is a block's, spilled bytes are a thread's in local memory; of a "
            "kernel that launches several functions, each one's, in their order. Occupancy is the share "
            "of a multiprocessor's warps: at most as many as fit, by the driver; measured as they were there, the mean "
            "of all launches, long and short. That, "
            "and the bytes read from and written to the GPU's memory and moved through its second-level cache, are "
            "hardware counters of one call by Nsight Compute, over all launches; a dash where they were not read."
        )
        section.blocks = [Text(words), *blocks]
    return section


def _change(row: dict[str, Any], counted: dict[str, Any]) -> list[str]:
    launches = row["launches"]
    functions = {launch["entry"]: launch for launch in launches}.values()

    def of_each(figure: Callable[[dict[str, Any]], str]) -> str:
        return " / ".join(figure(launch) for launch in functions)

    return [
        row["kernel"],
        seconds(row.get("seconds")),
        str(sum(launch["count"] for launch in launches)),
        of_each(lambda launch: str(prod(launch["block"]))),
        of_each(lambda launch: str(launch["registers"])),
        of_each(lambda launch: amount(launch["static_shared"] + launch["dynamic_shared"])),
        amount(max(launch["local"] for launch in launches)),
        of_each(lambda launch: percent(launch["occupancy"])),
        percent(counted.get("occupancy")),
        *(amount(counted.get(key)) for key in ("read", "written", "cache")),
    ]
