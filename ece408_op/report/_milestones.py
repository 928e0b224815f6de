"""What the course's milestones 1 and 2 asked for, from the kept runs: accuracy, run times, profiles, CPU kernels."""

from __future__ import annotations

from typing import Any

from ece408_op.bench.layers import BUILT_IN
from ece408_op.profile import text

from . import _plots
from ._document import NONE, Block, Section, Table, Text, amount, digits, over, percent, ratio, seconds
from ._jobs import AUTO, Asked, Layer, layers
from ._runs import Runs

#: The tables of a profile: its key, what its entries are called, what they are.
KINDS = {
    "gpu": ("GPU: kernels and copies", f"{text.EXPLANATIONS['gpu'][2]} {text.GATE_SENTENCE}"),
    "calls": ("host: CUDA API calls", text.EXPLANATIONS["calls"][2]),
    "operators": ("host: MXNet operators", text.EXPLANATIONS["operators"][2]),
}


def machine(runs: Runs) -> Section:
    """The machine and the versions."""
    facts = runs.machine
    if facts is None:
        return Section("Machine", [Text("Not found out.")])
    cpu, gpu = facts["cpu"], facts["gpu"]
    rows = [
        ["date", facts["date"]],
        ["system", facts["system"]],
        ["CPU", f"{cpu['cpu']}, {cpu['cores']} cores, {cpu['simd']}"],
        ["memory", amount(facts["memory_bytes"])],
    ]
    if gpu is None:
        rows.append(["GPU", f"none: {facts['cannot']['gpu']}"])
    else:
        capability, ceilings = gpu["capability"], gpu["ceilings"]
        rows += [
            ["GPU", f"{gpu['name']}, compute capability {capability}, {gpu['multiprocessors']} multiprocessors"],
            [
                "GPU memory",
                f"{amount(gpu['memory_bytes'])}, filled at {digits(ceilings['bytes_per_second'] / 1e12)} TB/s",
            ],
            ["GPU float32", f"{digits(ceilings['flops_per_second'] / 1e12)} TFLOP/s by lanes and clock"],
            ["driver", f"{gpu['driver']}, CUDA {gpu['driver_cuda']}; NVRTC {gpu['nvrtc']}"],
        ]
    rows += [[name, version] for name, version in facts["versions"].items()]
    words = "All times in this report were measured on this machine, except those that are marked as published."
    table = Table("The machine, and the versions of what ran", ["what", "which"], rows)
    return Section("Machine", [Text(words), table])


def milestone1(runs: Runs, asked: Asked) -> Section:
    """Milestone 1: MXNet's own network."""
    rows, profiles = [], []
    for network in asked.networks:
        for size in asked.sizes:
            for place, suffix in (("CPU", ""), ("GPU", "gpu")):
                result = runs.milestone("m1", network, size, suffix)
                if result is not None:
                    rows.append([network, str(size), place, f"{result['accuracy']:.4f}", *program(result)])
                watched = runs.milestone("m1", network, size, f"{suffix}-profile".lstrip("-"))
                profiles.append((f"m1, {network}, {size} images, {place}", watched))
    head = ["network", "images", "on", "accuracy", "user, s", "system, s", "elapsed, s"]
    section = Section(
        "Milestone 1: MXNet's own Convolution",
        [
            Text("Accuracy is the share of images classified correctly; times are the whole program's."),
            Table("Accuracy and run time of the whole program", head, rows),
        ],
    )
    return with_profiles(section, profiles)


def milestone2(runs: Runs, asked: Asked) -> Section:
    """Milestone 2: the operator on the CPU."""
    rows, profiles = [], []
    for network in asked.networks:
        for size in asked.sizes:
            for kernel in [AUTO, *asked.cpu_kernels]:
                result = runs.milestone("m2", network, size, kernel)
                if result is not None:
                    rows.append([network, str(size), _label(kernel, result), op_times(result), *program(result)])
            watched = runs.milestone("m2", network, size, "profile")
            profiles.append((f"m2, {network}, {size} images", watched))
    head = ["network", "images", "kernel", "Op Time of each layer", "user, s", "system, s", "elapsed, s"]
    section = Section(
        "Milestone 2: the operator on the CPU",
        [
            Text(
                "Each kernel computes the same convolutions. Op Time is the computation alone; user, system and "
                "elapsed are the whole program's. auto is what m2.py runs without --impl; the kernel that it chose for "
                "each layer is in brackets."
            ),
            Table("Op Times, and run time of the whole program", head, rows),
            *_charts(runs, asked),
            _built_in(runs, asked),
        ],
    )
    return with_profiles(section, profiles)


def _charts(runs: Runs, asked: Asked) -> list[Block]:
    """Bars of each CPU kernel's Op Time on each distinct layer, from the runs with the most images."""
    size, charts = max(asked.sizes), dict[Layer, Block]()
    for network in asked.networks:
        for number, layer in enumerate(layers(network)):
            results = {impl: runs.milestone("m2", network, size, impl) for impl in (AUTO, *asked.cpu_kernels)}
            known = {impl: run["op_times"] for impl, run in results.items() if run and number < len(run["op_times"])}
            calls = {impl: own[number] for impl, own in known.items()}
            times = {_bracketed(impl, [call["implementation"]]): call["seconds"] for impl, call in calls.items()}
            if times and layer not in charts:
                found = (runs.bench(layer, size) or {}).get(BUILT_IN, {}).get("reused", {})
                charts[layer] = _plots.cpu_bars(layer_text(layer), times, size, found.get("median"))
    return list(charts.values())


def _label(impl: str, result: dict[str, Any]) -> str:
    """The name of an m2 run; of auto with the kernels that it chose."""
    return _bracketed(impl, [call["implementation"] for call in result["op_times"]])


def _bracketed(impl: str, chosen: list[str]) -> str:
    return f"{impl} ({' + '.join(chosen)})" if impl == AUTO else impl


def _built_in(runs: Runs, asked: Asked) -> Table:
    images = max(asked.sizes)
    head = ["layer", "output", "implementation", "New", "MXNet Convolution", "times as fast"]
    rows = []
    for layer in dict.fromkeys(layer for network in asked.networks for layer in layers(network)):
        found = runs.bench(layer, images) or {}
        own = next((name for name in found if name.startswith("New ")), "")
        for kind in ("fresh", "reused"):
            new, built_in = (found.get(name, {}).get(kind, {}).get("median") for name in (own, BUILT_IN))
            if new or built_in:
                figures = [seconds(new), seconds(built_in), ratio(over(built_in, new))]
                rows.append([layer_text(layer), kind, own.removeprefix("New ") or NONE, *figures])
    caption = (
        f"The operator New and MXNet's built-in Convolution, {images} images, medians of whole calls; "
        "a fresh output is new memory, a reused one was written before"
    )
    return Table(caption, head, rows)


def layer_text(layer: Layer) -> str:
    """1 x 28 x 28, 50 of 5 x 5."""
    channels, rows, columns, filters, kernel = layer
    return f"{channels} x {rows} x {columns}, {filters} of {kernel} x {kernel}"


def op_times(result: dict[str, Any]) -> str:
    """The Op Times of a run, in the order of the layers."""
    return " + ".join(seconds(call["seconds"]) for call in result["op_times"]) or NONE


def program(result: dict[str, Any]) -> list[str]:
    """User, system and elapsed seconds of a whole program."""
    used = result["time"]
    return [f"{used[key]:.2f}" for key in ("user", "system", "real")]


def with_profiles(section: Section, profiles: list[tuple[str, dict[str, Any] | None]]) -> Section:
    """The section with what took over 90 %, and each profile's tables folded below."""
    rows: list[list[str]] = []
    tables: list[Block] = []
    kinds = []
    for title, result in profiles:
        watched = result and result["profile"]
        for key, (kind, _) in KINDS.items():
            table = watched["tables"][key] if watched else []
            if watched and table:
                kinds.append(key)
                most = {row["name"]: row for row in table[: len(watched["most"][key])]}
                names = ", ".join(f"{name} {row['percent']:.1f}" for name, row in most.items())
                rows.append([title, kind, names])
                tables.append(_profile_table(f"{title}: {kind}", table))
        if watched and watched["shapes"]:
            tables.append(_shape_table(f"{title}: kernel launches", watched["shapes"]))
    if not rows:
        return section
    head = ["program", "kind", "what, and its percent of the kind's time"]
    caption = "What together takes more than 90 % of the time, under the profiler"
    blocks: list[Block] = [Table(caption, head, rows)]
    blocks += [Text(sentence) for key, (_, sentence) in KINDS.items() if key in kinds]
    section.sections.append(Section(f"{section.title.split(':')[0]}: profiles", blocks + tables))
    return section


def _profile_table(caption: str, table: list[dict[str, Any]]) -> Table:
    rows = [
        [
            f"{row['percent']:.2f} %",
            text.time(row["total"]),
            str(row["calls"]),
            *(text.time(row[key]) for key in ("average", "least", "most")),
            row["name"],
        ]
        for row in table
    ]
    return Table(caption, ["Time(%)", "Time", "Calls", "Avg", "Min", "Max", "Name"], rows, folded=True)


def _shape_table(caption: str, shapes: list[dict[str, Any]]) -> Table:
    rows = [
        [
            shape["name"],
            str(shape["launches"]),
            " x ".join(map(str, shape["grid"])),
            " x ".join(map(str, shape["block"])),
            str(shape["registers"]),
            str(shape["static_shared"] + shape["dynamic_shared"]),
            percent(shape["occupancy"]),
        ]
        for shape in shapes
    ]
    head = ["Name", "Launches", "Grid", "Block", "Registers", "Shared, bytes", "Occupancy"]
    return Table(caption, head, rows, folded=True)
