"""The tables of the page, from the kept results. The page leaves out tables without rows, and names them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from ece408_op.bench import results
from ece408_op.bench.layers import BUILT_IN
from ece408_op.core import dispatch
from ece408_op.profile import text

from ._commands import MACHINE, Asked, layers
from ._format import NONE, Table, amount, percent, rate, ratio, seconds, table, total
from ._runs import Runs

BASELINE = "naive"
#: Stands in published.json for the fastest float32 kernel that was measured here.
FASTEST = "the fastest float32 kernel"


def layer_text(layer: str) -> str:
    """1x28x28x50x5 as "1 x 28 x 28, 50 of 5 x 5"."""
    channels, rows, columns, filters, kernel = layer.split("x")
    return f"{channels} x {rows} x {columns}, {filters} of {kernel} x {kernel}"


def _op_times(run: Any) -> str:
    return " + ".join(seconds(call["seconds"]) for call in run["op_times"]) or NONE if run else NONE


@cache
def published() -> Any:
    """The figures that the course's teams and staff published."""
    return json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))


def team(report: str, network: str) -> str:
    """A team's report with its term and network; the staff's figures are named as they are."""
    return f"{published()['terms'][network]}, {network}: report {report}" if report.startswith("0") else report


class Tables:
    """The tables of a report."""

    def __init__(self, runs: Runs, asked: Asked) -> None:
        self.runs, self.asked = runs, asked
        self._cases = [(network, size) for network in asked.networks for size in asked.sizes]
        self._size = max(asked.sizes)

    def summary(self) -> Table:
        """Accuracy and Op Times with the most images."""
        rows = []
        for network in self.asked.networks:
            known = [run for run in (self._largest(script, network) for script in ("m4", "m3", "m2", "m1")) if run]
            if known:
                m2, m3, m4 = (_op_times(self._largest(script, network)) for script in ("m2", "m3", "m4"))
                fastest = [self._fastest_on_cpu(layer, self._size) for layer in layers(network)]
                rows.append([network, f"{known[0]['accuracy']:.4f}", m2, " + ".join(fastest), m3, m4])
        head = ["network", "accuracy", "CPU, m2", "fastest CPU kernel", "GPU, first kernel, m3"]
        head += ["GPU, fastest kernel, m4"]
        return table(f"Accuracy and Op Time of each layer, {self._size} images", head, rows)

    def sources(self) -> list[str]:
        """Where the images came from, as the milestones report it."""
        found = [self._largest(script, network) for script in self.asked.milestones for network in self.asked.networks]
        return sorted({run["source"] for run in found if run})

    def machine(self) -> Table:
        """The machine and the versions."""
        facts, rows = self.runs.result(MACHINE), []
        if facts:
            machine, gpu, ceilings = facts["machine"], facts["machine"]["gpu"], facts["ceilings"]
            rows += [["date", facts["date"]], ["system", facts["system"]]]
            rows.append(["CPU", f"{machine['cpu']}, {machine['cores']} cores, {machine['simd']}"])
            rows.append(["memory", amount(facts["memory_bytes"])])
            if gpu:
                capability = ".".join(map(str, gpu["capability"]))
                kind = f"compute capability {capability}, {gpu['multiprocessors']} multiprocessors"
                memory = f"{amount(gpu['memory_bytes'])}, filled at {rate(ceilings['bytes_per_second'])} TB/s"
                rows += [["GPU", f"{gpu['name']}, {kind}"], ["GPU memory", memory]]
                units = f"{rate(ceilings['flops_per_second'])} TFLOP/s float32"
                if ceilings["tensor_flops_per_second"]:
                    units += f", {rate(ceilings['tensor_flops_per_second'])} TFLOP/s fp16 on tensor cores"
                rows.append(["GPU arithmetic, by units and clock", units])
                rows.append(["CUDA", f"driver {gpu['driver']}, runtime {gpu['runtime']}, NVRTC {gpu['nvrtc']}"])
            else:
                rows.append(["GPU", f"none: {facts['cannot']['gpu']}"])
            rows += [[name, version] for name, version in machine["versions"].items()]
        return table("The machine, and the versions of what ran", ["what", "which"], rows)

    def programs(self, *scripts: str) -> Table:
        """These milestones as whole programs, alone and under the profiler."""
        rows = []
        for network, size in self._cases:
            for script in scripts:
                for variant in ["", "gpu"] if script == "m1" else [""]:
                    run, profiled = (self.runs.result(script, network, size, variant, s) for s in ("", "profile"))
                    if run:
                        kernel = " + ".join(call["implementation"] for call in run["op_times"])
                        if script == "m1":
                            kernel = run["context"].replace("gpu_network", "cuDNN in gpu_network")
                        cells = [script, network, str(size), kernel, f"{run['accuracy']:.4f}"]
                        cells += [_op_times(run), *(f"{run['time'][key]:.2f}" for key in ("user", "system", "real"))]
                        cells.append(f"{profiled['time']['real']:.2f}" if profiled else NONE)
                        rows.append([*cells, _op_times(profiled)])
        head = ["script", "network", "images", "convolutions by", "accuracy", "Op Time of each layer", "user, s"]
        head += ["system, s", "elapsed, s", "elapsed under the profiler, s", "Op Time under the profiler"]
        return table(f"{' and '.join(scripts)} as whole programs", head, rows)

    def cpu_kernels(self) -> list[Table]:
        """New by every CPU kernel and MXNet's Convolution, a table per number of images."""
        return [self._cpu_kernels(size) for size in self.asked.sizes]

    def _cpu_kernels(self, size: int) -> Table:
        rows = []
        for layer in self.asked.layers:
            case = self.runs.case("cpu", layer, size)
            for new in (row for row in case.rows if row.impl and row.median) if case else ():
                built_in = case.row(BUILT_IN, new.call) if case else None
                theirs = built_in.median if built_in else None
                name = new.kernel if new.impl != dispatch.AUTO else f"{new.impl} ({new.kernel})"
                cells = [layer_text(layer), new.call, name, seconds(new.median), seconds(theirs)]
                rows.append([*cells, ratio(theirs, new.median)])
        caption = (
            f"The operator New and MXNet's built-in Convolution on the CPU, {size} images, medians of whole calls; "
            "a fresh output is new memory, a reused one was written before"
        )
        return table(caption, ["layer", "output", "kernel", "New", "MXNet Convolution", "times as fast"], rows)

    def cpu_against_gpu(self) -> Table:
        """Op Times of m2, m3 and m4, layer by layer."""
        rows = []
        for network, size in self._cases:
            calls = [self.runs.op_times(script, network, size) for script in ("m2", "m3", "m4")]
            for number, layer in enumerate(layers(network)):
                m2, m3, m4 = (own[number]["seconds"] if own else None for own in calls)
                if m3 is None and m4 is None:
                    continue
                fastest = self._fastest_on_cpu(layer, size)
                kernel = calls[2][number]["implementation"] if calls[2] else NONE
                cells = [network, layer_text(layer), str(size), seconds(m2), fastest, seconds(m3), seconds(m4), kernel]
                rows.append([*cells, ratio(m2, m3), ratio(m2, m4), ratio(m3, m4)])
        head = ["network", "layer", "images", "m2", "fastest CPU kernel", "m3", "m4", "m4's kernel"]
        head += ["m2 / m3", "m2 / m4", "m3 / m4"]
        return table("Op Times, CPU against GPU, in whole runs of the network", head, rows)

    def kernels(self) -> list[Table]:
        """The time of every GPU kernel on every layer, a table per number of images."""
        return [self._kernels(size) for size in self.asked.sizes]

    def _kernels(self, size: int) -> Table:
        cases = {layer: case for layer in self.asked.layers for case in [self.runs.case("gpu", layer, size)] if case}
        names: dict[str, str] = {}
        for row in (row for case in cases.values() for row in case.rows):
            names[row.contestant] = names.get(row.contestant) or row.precision
        rows = [[name, names[name] or NONE, *(_kernel_time(case, name) for case in cases.values())] for name in names]
        return table(f"Time of each kernel, {size} images", ["kernel", "precision", *map(layer_text, cases)], rows)

    def without_time(self) -> list[str]:
        """Every GPU kernel without a time on a layer, with the reason."""
        found = dict.fromkeys(
            f"{row.contestant}, {layer_text(layer)}: {' '.join(row.reason.split())}"
            for size in self.asked.sizes
            for layer in self.asked.layers
            for case in [self.runs.case("gpu", layer, size)]
            for row in (case.rows if case else ())
            if row.median is None
        )
        return list(found)

    def changes(self) -> list[Table]:
        """For each layer the time, share of the roofline, launches, resources and memory traffic of every kernel."""
        tables = []
        head = ["kernel", "time", "of its roofline", "launches", "threads per block", "registers", "shared memory"]
        head += ["spilled", "occupancy, at most", "occupancy, measured", "read", "written", "through L2"]
        for layer in self.asked.layers:
            case = self.runs.case("gpu", layer, self._size)
            if case and case.problem:
                counters = self.runs.result("counters", layer, self._size) or {}
                rows = [_change(row, counters.get(row.kernel, {})) for row in case.rows if "launches" in row.details]
                least = f"at least {amount(case.problem.bytes)} have to be moved"
                tables.append(table(f"{layer_text(layer)}, {self._size} images; {least}", head, rows))
        return tables

    def ladders(self) -> list[Table]:
        """What the teams changed in order, with their gains and those of the kernels here that do the same."""
        tables = []
        for ladder in published()["ladders"]:
            network, rows = ladder["network"], []
            for step in ladder["steps"] if network in self.asked.networks else ():
                names = step["our_before"], step["our_after"]
                layer = layers(network)[step["layer"]]
                ours = [self._seconds("gpu", name, layer, step["images"]) for name in names]
                if any(ours):
                    theirs = step["before"], step["after"]
                    cells = [step["what"], *map(seconds, theirs), ratio(*theirs), " to ".join(names)]
                    rows.append([*cells, *map(seconds, ours), ratio(*ours)])
            head = ["step", "their time before", "after", "their gain", "kernels here", "our time before", "after"]
            tables.append(table(f"The ladder of {team(ladder['report'], network)}", [*head, "our gain"], rows))
        return tables

    def published(self) -> list[Table]:
        """The published Op Times and accuracies of networks and numbers of images that were run here."""
        times, accuracies = [], []
        for entry in published()["op_times"]:
            ours = self._ours(entry, entry["ours"], entry["device"])
            if ours is not None:
                naive, base = entry.get("naive_seconds"), entry.get("our_naive")
                gain = ratio(sum(naive), sum(entry["seconds"])) if naive else "no naive kernel published"
                cells = [team(entry["report"], entry["network"]), str(entry["images"]), entry["what"]]
                cells += [" + ".join(map(seconds, entry["seconds"])), gain, seconds(ours), entry["ours"]]
                times.append([*cells, ratio(self._ours(entry, base, "gpu"), ours) if base else NONE])
        for entry in published()["accuracies"]:
            network, images = entry["network"], entry["images"]
            run = self.runs.result("m1", network, images)
            if run:
                both = [f"{value:.4f}" for value in (entry["accuracy"], run["accuracy"])]
                accuracies.append([team(entry["report"], network), network, str(images), *both])
        head = ["report", "images", "what", "theirs", "to their naive", "ours", "our kernel", "to our naive"]
        caption = "Accuracy; the weights here are not theirs, so these are other networks of the same form"
        accuracy = table(caption, ["report", "network", "images", "theirs", "ours, milestone 1"], accuracies)
        return [table("Op Times; ours are sums over the layers", head, times), accuracy]

    def profiles(self, *scripts: str) -> list[Table]:
        """What takes over 90 % of the time in each profile, then each profile's tables, folded."""
        rows, folded = [], []
        for script in scripts:
            for network, size in self._cases:
                for suffix in ("profile", "gpu-profile"):
                    run = self.runs.result(script, network, size, suffix)
                    if run:
                        title = f"{script}, {network}, {size} images" + (", GPU" if suffix != "profile" else "")
                        rows += _most(title, run["profile"])
                        folded += _profile_tables(title, run["profile"])
        caption = "What together takes more than 90 % of the time, under the profiler"
        return [table(caption, ["program", "kind", "what, and its percent of the kind's time"], rows), *folded]

    def missing(self) -> Table:
        """The commands without a result, by the reason."""
        found = [[why, str(len(lines)), "; ".join(lines)] for why, lines in self.runs.missing().items()]
        return table("Commands without a result", ["reason", "commands", "which"], found)

    def _largest(self, script: str, network: str) -> Any:
        return self.runs.result(script, network, self._size)

    def _fastest_on_cpu(self, layer: str, size: int) -> str:
        """Time and name of the kernel with the least time on a layer."""
        times = [(row.median, row.kernel) for row in self._rows("cpu", layer, size) if row.median]
        least, kernel = min(times, default=(None, ""))
        return f"{seconds(least)}, {kernel}" if least else NONE

    def _ours(self, entry: dict[str, Any], kernel: str, device: str) -> float | None:
        network, images = entry["network"], entry["images"]
        if network not in self.asked.networks:
            return None
        return total([self._seconds(device, kernel, layer, images) for layer in layers(network)])

    def _rows(self, device: str, layer: str, images: int) -> list[results.Row]:
        """The rows of a device's kernels with times: on the CPU of calls into memory that was written before."""
        case = self.runs.case(device, layer, images)
        return [r for r in case.rows if r.impl and r.median and r.call != results.FRESH] if case else []

    def _seconds(self, device: str, kernel: str, layer: str, images: int) -> float | None:
        """A kernel's time on a layer; None where it was not measured."""
        rows = self._rows(device, layer, images)
        if kernel == FASTEST:
            return min((row.median for row in rows if row.precision == "float32" and row.median), default=None)
        return next((row.median for row in rows if row.kernel == kernel), None)


def _kernel_time(case: results.Case, name: str) -> str:
    """The time, and in brackets how many times as fast as BASELINE; or the reason for none."""
    row, base = case.row(name, results.KERNEL), case.row(BASELINE, results.KERNEL)
    if row is None or row.median is None:
        return NONE if row is None else "wrong" if row.status == results.FAILED else "not supported"
    return seconds(row.median) + (f" ({ratio(base.median, row.median)})" if base and base.median else "")


def _change(row: results.Row, counters: dict[str, float]) -> list[str]:
    launches = row.details["launches"]
    functions = {launch["entry"]: launch for launch in launches}.values()

    def of_each(figure: Callable[[dict[str, Any]], str]) -> str:
        return " / ".join(figure(launch) for launch in functions)

    return [
        row.kernel,
        seconds(row.median),
        percent(row.roofline_seconds / row.median if row.median and row.roofline_seconds else None),
        str(sum(launch["count"] for launch in launches)),
        of_each(lambda launch: str(prod(launch["block"]))),
        of_each(lambda launch: str(launch["registers"])),
        of_each(lambda launch: amount(launch["static_shared"] + launch["dynamic_shared"])),
        amount(max(launch["local"] for launch in launches)),
        of_each(lambda launch: percent(launch["occupancy"])),
        percent(counters.get("occupancy")),
        *(amount(counters.get(key)) for key in ("read", "written", "l2")),
    ]


def _most(title: str, profile: dict[str, Any]) -> list[list[str]]:
    found = []
    for key, (kind, *_) in text.EXPLANATIONS.items():
        most = profile["tables"][key][: len(profile["most"][key])]
        if most:
            found.append([title, kind, ", ".join(f"{row['name']} {row['percent']:.1f}" for row in most)])
    return found


def _profile_tables(title: str, profile: dict[str, Any]) -> list[Table]:
    tables = []
    for key, (kind, *_) in text.EXPLANATIONS.items():
        rows = []
        for row in profile["tables"][key]:
            times = (text.time(row[name]) for name in ("average", "least", "most"))
            rows.append([f"{row['percent']:.2f} %", text.time(row["total"]), str(row["calls"]), *times, row["name"]])
        tables.append(table(f"{title}: {kind}", ["Time(%)", "Time", "Calls", "Avg", "Min", "Max", "Name"], rows, True))
    rows = [
        [
            shape["name"],
            str(shape["launches"]),
            *(" x ".join(map(str, shape[key])) for key in ("grid", "block")),
            str(shape["registers"]),
            str(shape["static_shared"] + shape["dynamic_shared"]),
            percent(shape["occupancy"]),
        ]
        for shape in profile["shapes"]
    ]
    head = ["Name", "Launches", "Grid", "Block", "Registers", "Shared, bytes", "Occupancy"]
    return [one for one in (*tables, table(f"{title}: kernel launches", head, rows, True)) if one.rows]
