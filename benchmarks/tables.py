#!/usr/bin/env python3
"""Write the tables of README.md and docs/: measured ones from the JSON files in benchmarks/results/.

    python benchmarks/tables.py            rewrite every table that differs
    python benchmarks/tables.py --check    change nothing; exit code 1 if a table differs

A table stands between two comments, which a page may have anywhere:

    <!-- table: layers-h200 -->
    <!-- end of table -->

Every number comes from a file that ece408-bench wrote with --json (the format is that of ece408_op.bench.results), from
the tuning table, or from experiments.json. A table names the machine and the versions of its file. To update a table,
replace its JSON file and run this command. The list of operators comes from their definitions, so this needs NumPy and
llvmlite.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

#: The course's layers by the benchmark's names, as people say them.
COURSE = {
    "2017": "2017",
    "2018sp-1": "2018 spring, first",
    "2018sp-2": "2018 spring, second",
    "2018fa-1": "2018 fall, first",
    "2018fa-2": "2018 fall, second",
}
#: The CPUs of the files: /proc/cpuinfo says "AMD EPYC" of them all.
CPUS = {"zen5": "AMD EPYC (Zen 5)", "zen4": "AMD EPYC (Zen 4)", "zen3": "AMD EPYC (Zen 3)"}
SIMD = {"avx512": "AVX-512", "avx2": "AVX2", "sse": "SSE"}
BUILT_IN = "MXNet Convolution"
SPLIT_FORM = "auto, split NHWC"
PACKAGES = {"mxnet": "MXNet", "cupy": "CuPy", "torch": "PyTorch"}


@cache
def read(name: str) -> dict[str, Any]:
    """A file of benchmarks/results by its stem."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]], above: str = "") -> str:
    """A table with its head, and a paragraph above it."""
    head = list(head)
    table = "\n".join([_row(head), "|---" * len(head) + "|", *map(_row, rows)])
    return f"{above}\n\n{table}" if above else table


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def mean(ratios: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:#.3g}" if value < 99.95 else f"{value:.0f}"


def ms(seconds: float) -> str:
    """Milliseconds."""
    return number(1e3 * seconds)


def scientific(value: float) -> str:
    """One digit after the point, and a power of ten."""
    return f"{value:.1e}".replace("e-0", "e-")


def machine(name: str) -> str:
    """The machine and the versions of a file, as a sentence; of kernels on a GPU's arrays, without the host."""
    one = read(name)["machine"]
    versions = ", ".join(f"{word} {one['versions'][key]}" for key, word in PACKAGES.items() if key in one["versions"])
    chip = f"ne {one['gpu']['name']}" if one["gpu"] else ""
    if chip and not name.startswith("networks"):
        return f"O{chip}; {versions}."
    host = f"{one['threads']} threads on {one['cores']} cores of an {CPUS.get(name.split('-')[1], one['cpu'])}"
    return f"{host}, {SIMD[one['simd']]}{f', and o{chip}' if chip else ''}; {versions}."


def row(case: dict[str, Any], contestant: str, call: str = "kernel") -> dict[str, Any]:
    """The row of a contestant and kind of call."""
    return next(one for one in case["rows"] if (one["contestant"], one["call"]) == (contestant, call))


def peer(case: dict[str, Any], family: str, call: str) -> float:
    """The least median, in seconds, of the contestants with names that begin with ``family``."""
    return min(one["median"] for one in case["rows"] if one["contestant"].startswith(family) and one["call"] == call)


def cudnn(case: dict[str, Any]) -> float:
    """The median of cuDNN's faster layout."""
    return peer(case, "cuDNN", "kernel")


def gpu_layers(name: str, listed: bool = True) -> str:
    """Each layer of one group by ``auto``, and by cuDNN's faster layout; or all of them in two rows.

    Where the file has them, also on activations that stay split.
    """
    rows, ratios, split_ratios = [], [], []
    for case in read(name)["cases"]:
        if case["problem"].get("groups", 1) != 1:
            continue
        own = row(case, "auto")
        ratios.append(cudnn(case) / own["median"])
        rows.append([case["name"], f"`{own['kernel']}`", ms(own["median"]), ms(cudnn(case))])
        rows[-1] += [f"{ratios[-1]:.2f}", f"{own['median'] / case['roofline_seconds']:.2f}"]
        for split in (one for one in case["rows"] if one["contestant"] == SPLIT_FORM):
            split_ratios.append(cudnn(case) / split["median"])
            rows[-1] += [ms(split["median"]), f"{split_ratios[-1]:.2f}"]
    rows = rows if listed else []
    for word, of_all in (("geometric mean", mean), ("least", min)):
        rows.append([word, "", "", "", f"{of_all(ratios):.2f}", ""])
        rows[-1] += ["", f"{of_all(split_ratios):.2f}"] if split_ratios else []
    head = ["layer", "kernel that auto takes", "auto, ms", "cuDNN, ms", "times as fast", "of the roofline"]
    head += ["split NHWC, ms", "times as fast"] if split_ratios else []
    if not listed:
        head, rows = ["layers", "times as fast"], [[f"{each[0]} of {len(ratios)}", each[4]] for each in rows]
    return markdown(head, rows, machine(name))


def precisions() -> str:
    """The course's layers in tf32 and fp16."""
    head, rows = ["layer"], [[title] for title in COURSE.values()]
    for word in ("tf32", "fp16"):
        head += [f"{word}: kernel", "auto, ms", "cuDNN, ms"]
        for cells, case in zip(rows, read(f"layers-h200-{word}")["cases"]):
            own = row(case, "auto")
            cells += [f"`{own['kernel']}`", ms(own["median"]), ms(cudnn(case))]
    return markdown(head, rows, machine("layers-h200-tf32"))


def float32_kernels() -> str:
    """The plain float32 kernels of the GPU."""
    kernels = ("register_blocked", "register_blocked_uniform", "sliding_window")
    windows = {case["name"]: row(case, kernels[2])["median"] for case in read("layers-h200-window")["cases"]}
    rows = []
    for case in read("layers-h200-float32")["cases"]:
        times = [*(row(case, kernel)["median"] for kernel in kernels[:2]), windows.get(case["name"], math.inf)]
        words = [ms(time) if time < math.inf else "" for time in times]
        share = f"{min(times) / case['roofline_seconds']:.2f}"
        rows.append([COURSE[case["name"]], *words, ms(cudnn(case)), share])
    head = ["layer", *(f"`{kernel}`, ms" for kernel in kernels), "cuDNN float32, ms", "best, of the roofline"]
    return markdown(head, rows, machine("layers-h200-float32"))


def ladder() -> str:
    """Every GPU kernel on the course's layers with 10,000 images, from the tuning table."""
    tables = json.loads((ROOT / "ece408_op/core/tuning.json").read_text(encoding="utf-8"))["chips"]
    (table,) = [chip for chip in tables if "H200" in chip["name"]]
    sizes = [list(case["problem"].values()) for case in read("layers-h200")["cases"]]
    times = [next(row["milliseconds"] for row in table["layers"] if row["layer"] == size) for size in sizes]
    # The slowest first, as the course's ladder goes; by the 2017 layer, and by the last for those that refuse it.
    names: list[str] = []
    for layer in (times[0], *times[:0:-1]):
        names += sorted(layer.keys() - {*names}, key=lambda name: -layer[name])
    rows = [[f"`{name}`", *(number(t[name]) if name in t else "" for t in times)] for name in names]
    return markdown(["kernel", *COURSE.values()], rows, f"One {table['name']}, ms.")


def cpu_layers(name: str) -> str:
    """``auto``, MXNet's Convolution and PyTorch's better layout, fresh and reused outputs."""
    rows = []
    for case in read(name)["cases"]:
        own, mxnet = ([row(case, who, c)["median"] for c in ("fresh", "reused")] for who in ("New auto", BUILT_IN))
        times = [*own, *mxnet, peer(case, "PyTorch", "fresh")]
        rows.append([COURSE[case["name"]], *map(ms, times), f"{mxnet[1] / own[1]:.2f}"])
        rows[-1].append(f"{own[1] / case['roofline_seconds']:.2f}")
    rows.append(["geometric mean", *[""] * 5, f"{mean(cpu_ratios(name, 'MXNet', 'reused')):.2f}", ""])
    head = ["layer", "New, fresh, ms", "reused", "MXNet, fresh", "reused", "PyTorch, fresh", "times MXNet, reused"]
    return markdown([*head, "of the roofline"], rows, machine(name))


def contestant(name: str) -> str:
    """The contestant of a file of CPU layers: "New auto", or "New direct" where auto was not measured."""
    names = {one["contestant"] for one in read(name)["cases"][0]["rows"]}
    return "New auto" if "New auto" in names else "New direct"


def cpu_ratios(name: str, family: str, call: str) -> list[float]:
    """How many times as fast as a peer ``New`` is, on each layer."""
    cases, own = read(name)["cases"], contestant(name)
    return [peer(case, family, call) / row(case, own, call)["median"] for case in cases]


def cpu_others() -> str:
    """The ratios of each CPU file."""
    rows = []
    for name in ("layers-zen5", "layers-zen5-avx2", "layers-zen4", "layers-zen3"):
        rows.append([CPUS[name.split("-")[1]], SIMD[read(name)["machine"]["simd"]], contestant(name)])
        for family, call in (("MXNet", "fresh"), ("MXNet", "reused"), ("PyTorch", "fresh")):
            ratios = cpu_ratios(name, family, call)
            rows[-1] += [f"{mean(ratios):.2f}", f"{min(ratios):.2f}"]
    head = ["two cores", "instructions", "contestant", "MXNet, fresh: mean", "least", "MXNet, reused: mean", "least"]
    return markdown([*head, "PyTorch, fresh: mean", "least"], rows)


def networks() -> str:
    """Whole networks: seconds of a forward by contestant, with ``New`` on a CPU and on a GPU."""
    rows, files = [], {"CPU": "networks-zen5", "GPU": "networks-h200"}
    for where, case in ((where, case) for where, name in files.items() for case in read(name)["cases"]):
        timed = [one for one in case["rows"] if one["call"] == "forward" and one["contestant"][:3] in ("MXN", "New")]
        rows.append([f"{case['name']}, {where}", *(f"{one['median']:.3f}" for one in timed)])
    above = "\n".join(f"{where}: {machine(name)}" for where, name in files.items())
    return markdown(["seconds", *(one["contestant"] for one in timed)], rows, above)


def networks_on_gpu() -> str:
    """gpu_network and the fastest of PyTorch's settings on the course's networks and on image classifiers."""
    rows = []
    for case in (case for name in ("networks-h200", "networks-h200-zoo") for case in read(name)["cases"]):
        rows.append([case["name"]])
        for call in ("gpu", "forward"):
            timed = [one for one in case["rows"] if one["call"] == call and one.get("seconds")]
            times = {one["contestant"]: one["median"] for one in timed}
            ours = times["gpu_network auto"]
            peer = min(time for contestant, time in times.items() if contestant.startswith("PyTorch"))
            rows[-1] += [number(1000 * ours), number(1000 * peer), f"{peer / ours:.2f}"]
    head = ["network", "on the GPU, ms", "PyTorch", "times as fast", "from memory, ms", "PyTorch", "times as fast"]
    return markdown(head, rows)


def errors() -> str:
    """The largest errors of auto and of cuDNN's layouts on the course's layers, mixed signs."""
    rows = []
    for case in read("layers-h200")["cases"]:
        own = row(case, "auto")
        shown = [own["error"], *(row(case, f"cuDNN float32 {layout}")["error"] for layout in ("NCHW", "NHWC"))]
        rows.append([COURSE[case["name"]], f"`{own['kernel']}`", *map(scientific, [*shown, own["bound"]])])
    head = ["layer", "kernel", "auto", "cuDNN NCHW", "cuDNN NHWC", "the kernel's bound"]
    return markdown(head, rows, machine("layers-h200"))


def changes(group: str) -> str:
    """The changes to one family of kernels, with the times before and after."""

    def span(value: float | list[float]) -> str:
        return " to ".join(f"{v:g}" for v in value) if isinstance(value, list) else f"{value:g}"

    found = [one for one in read("experiments")["changes"] if one["group"] == group]
    rows = [
        [one["change"], code(one["kernel"]), one["layer"], span(one["before"]), f"{span(one['after'])} {one['unit']}"]
        + ["yes" if one["kept"] else "no"]
        for one in found
    ]
    used = {one["machine"] for one in found}
    machines = "; ".join(f"{key}: {text}" for key, text in read("experiments")["machines"].items() if key in used)
    return markdown(["change", "kernel", "layer", "before", "after", "kept"], rows, f"{machines}.")


def code(word: str) -> str:
    """A kernel's name as code; other words as they are."""
    return word if " " in word else f"`{word}`"


def experiment(name: str, columns: dict[str, str], write: Callable[[float], str], above: str = "") -> str:
    """A table of experiments.json: its columns' titles by key; ``write`` is for numbers."""

    def cell(value: Any, key: str) -> str:
        if isinstance(value, list):
            return " to ".join(f"{v:g}" for v in value)
        if isinstance(value, (int, float)):
            return str(value) if key == "steps" else write(value)
        return code(value) if key == "kernel" else COURSE.get(value, value)

    rows = [[cell(one.get(key, ""), key) for key in columns] for one in read("experiments")[name]]
    return markdown(columns.values(), rows, above)


def same(*words: str) -> dict[str, str]:
    """Columns with their keys as titles."""
    return {word: word for word in words}


def summary() -> str:
    """README's table: the course's layers on a GPU and on a CPU."""
    rows = []
    for on_gpu, on_cpu in zip(read("layers-h200")["cases"], read("layers-zen5")["cases"]):
        _, c, h, w, m, k = on_gpu["problem"].values()
        times = [row(on_gpu, "auto")["median"], cudnn(on_gpu)]
        times += [row(on_cpu, name, "reused")["median"] for name in ("New auto", BUILT_IN)]
        rows.append([f"{COURSE[on_gpu['name']]}: {c} x {h} x {w}, {m} filters of {k} x {k}", *map(ms, times)])
    head = ["layer", "GPU, New", "GPU, cuDNN", "CPU, New", "CPU, MXNet"]
    ratio = mean(cpu_ratios("layers-zen3", "MXNet", "reused"))
    return (
        f"{markdown(head, rows)}\n\nGPU: {machine('layers-h200')}\nCPU: {machine('layers-zen5')}\n"
        f"With AVX2 alone, on two cores of a Zen 3, `New` is {ratio:.1f} times as fast as MXNet in geometric mean."
    )


def tutorial() -> str:
    """The benchmark's rows of the tutorial's CPU kernel."""
    cases = read("tutorial-cpu")["cases"]
    rows = [
        [case["name"], name, *(ms(row(case, name, call)["median"]) for call in ("fresh", "reused"))]
        for case in cases
        for name in dict.fromkeys(one["contestant"] for one in case["rows"])
    ]
    above = f"{machine('tutorial-cpu')} {cases[0]['images']} images."
    return markdown(["layer", "implementation", "fresh, ms", "reused, ms"], rows, above)


def operators() -> str:
    """The operators of gpu_network, those with the same attributes of more than one value together."""
    sys.path.insert(0, str(ROOT))
    from ece408_op.network._operators import OPERATORS

    found: dict[str, list[str]] = {}
    for op, kind in OPERATORS.items():
        attributes = (one for one in fields(kind) if one.metadata and one.metadata["expected"] != one.default)
        found.setdefault(", ".join(code(one.name) for one in attributes), []).append(code(op))
    lines = (f"- {', '.join(ops)}{': ' if attributes else ''}{attributes}" for attributes, ops in found.items())
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ") for line in lines)


LOOPS = {"what": "loop", "value": "measured", "unit": "unit"}
PARTS = ("all", "no load", "no conversion", "no store", "no reads of shared memory", "no products", "products alone")
PROMOTION = {"before": "without promotion", "after": "every 6 k-steps", "cudnn": "cuDNN float32"}
EXTRA_BITS = {"zero": "0 extra bits", "one": "1", "two": "2", "three": "3"}
ZEROS = ("dense", "half zero", "three quarters zero", "nine tenths zero")

TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    **{name: partial(gpu_layers, name) for name in ("layers-h200", "layers-h200-split")},
    **{name: partial(gpu_layers, name, listed=False) for name in ("layers-h100", "random-h200")},
    "precisions": precisions,
    "float32-kernels": float32_kernels,
    "ladder": ladder,
    "layers-zen5": partial(cpu_layers, "layers-zen5"),
    "cpu-others": cpu_others,
    "networks": networks,
    "networks-on-gpu": networks_on_gpu,
    "changes-split-precision": partial(changes, "split precision"),
    "changes-float32": partial(changes, "float32"),
    "changes-cpu": partial(changes, "CPU"),
    "changes-copies": partial(changes, "calls and copies"),
    "parts": partial(experiment, "parts", {"kernel": "ms", **same("layer", *PARTS)}, number),
    "microbenchmarks": lambda: experiment(
        "microbenchmarks", LOOPS, "{:g}".format, read("experiments")["machines"]["H200"]
    ),
    "errors": errors,
    "promotion": partial(
        experiment, "promotion", {**same("layer", "kernel"), "steps": "k-steps", **PROMOTION}, scientific
    ),
    "truncation": partial(
        experiment, "truncation", {**same("layer", "data"), **EXTRA_BITS, **same("measured")}, "{:g}".format
    ),
    "worst-ratios": partial(
        experiment, "worst_ratios", {**same("data", "layer"), "ratio": "error / cuDNN NCHW's"}, "{:.2f}".format
    ),
    "winograd": partial(experiment, "winograd", same("layer", *ZEROS), "{:g}".format),
    "tutorial": tutorial,
    "operators": operators,
}


def updated(text: str) -> str:
    """A page's text with every table written again; raises KeyError with the name of a table that is not known."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Write the tables of README.md and docs/ from benchmarks/results/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table differs")
    check = parser.parse_args().check
    different = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        new = updated(text)
        if new != text:
            different.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(new, encoding="utf-8")
    for name in different:
        print(f"{name}: {'differs from benchmarks/results; run python benchmarks/tables.py' if check else 'rewritten'}")
    return 1 if check and different else 0


if __name__ == "__main__":
    sys.exit(main())
