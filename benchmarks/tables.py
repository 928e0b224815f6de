#!/usr/bin/env python3
"""Write the tables of README.md and docs/, measured tables from the JSON files in benchmarks/results/.

    python benchmarks/tables.py            rewrite every table that differs
    python benchmarks/tables.py --check    change nothing; exit code 1 if a table differs

A page may have a table anywhere, between two comments:

    <!-- table: layers-h200 -->
    <!-- end of table -->

Every number comes from a file that ece408-bench wrote with --json, or from the tuning table. A table names the machine
and the versions of its file. To update a table, replace its JSON file and run this command. The list of operators comes
from their definitions, so this needs NumPy and llvmlite.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ece408_op.bench import results  # noqa: E402
from ece408_op.bench.results import Case, Results, mean_and_least  # noqa: E402
from ece408_op.problem import layer_name  # noqa: E402

BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

#: The course's layers: the tables' names by the benchmark's names.
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
def read(name: str) -> Results:
    """Return the results in a file of benchmarks/results, by its stem."""
    return results.read(ROOT / "benchmarks" / "results" / f"{name}.json")


def markdown(head: Sequence[str], rows: Iterable[Iterable[str]], above: str = "") -> str:
    """Return a table as Markdown, with a paragraph above it if there is one."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    table = "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
    return f"{above}\n\n{table}" if above else table


def number(value: float) -> str:
    """Return the number with three significant digits, without an exponent."""
    return f"{value:#.3g}" if value < 99.95 else f"{value:.0f}"


def ms(seconds: float) -> str:
    """Return seconds as milliseconds, as ``number`` formats them."""
    return number(1e3 * seconds)


def scientific(value: float) -> str:
    """Return the number with one digit after the point, and a power of ten."""
    return f"{value:.1e}".replace("e-0", "e-")


def machine(name: str) -> str:
    """Return the machine and the versions of a file as a sentence; for kernels on a GPU's arrays, without the host."""
    one = read(name).machine
    versions = ", ".join(f"{word} {one.versions[key]}" for key, word in PACKAGES.items() if key in one.versions)
    chip = f"ne {one.gpu.name}" if one.gpu else ""
    if chip and not name.startswith("networks"):
        return f"O{chip}; {versions}."
    host = f"{one.threads} threads on {one.cores} cores of an {CPUS.get(name.split('-')[1], one.cpu)}"
    return f"{host}, {SIMD[one.simd]}{f', and o{chip}' if chip else ''}; {versions}."


def median(case: Case, contestant: str, call: str = "kernel") -> float:
    """Return the median seconds of a contestant."""
    return case.row(contestant, call).median


def peer(case: Case, family: str = "cuDNN", call: str = "kernel") -> float:
    """Return the least median, in seconds, of the contestants whose names begin with ``family``."""
    found = (one.median for one in case.rows if one.contestant.startswith(family) and one.call == call)
    return min(median for median in found if median)


def gpu_layers(name: str, listed: bool = True) -> str:
    """Return the table of ``auto`` and cuDNN's faster layout on each layer of a file, or on all layers in two rows.

    If the file has times on activations that stay split, the table has them too.
    """
    rows, ratios, split_ratios = [], [], []
    for case in read(name).cases:
        if case.problem.groups != 1:
            continue
        own = case.row("auto", "kernel")
        ratios.append(case.ratio(own, "cuDNN"))
        rows.append([case.name, f"`{own.kernel}`", ms(own.median), ms(peer(case))])
        rows[-1] += [f"{ratios[-1]:.2f}", f"{own.median / case.roofline_seconds:.2f}"]
        if split := case.row(SPLIT_FORM, "kernel"):
            split_ratios.append(case.ratio(split, "cuDNN"))
            rows[-1] += [ms(split.median), f"{split_ratios[-1]:.2f}"]
    rows = rows if listed else []
    for which, word in enumerate(("geometric mean", "least")):
        rows.append([word, "", "", "", f"{mean_and_least(ratios)[which]:.2f}", ""])
        rows[-1] += ["", f"{mean_and_least(split_ratios)[which]:.2f}"] if split_ratios else []
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
        for cells, case in zip(rows, read(f"layers-h200-{word}").cases):
            own = case.row("auto", "kernel")
            cells += [f"`{own.kernel}`", ms(own.median), ms(peer(case))]
    return markdown(head, rows, machine("layers-h200-tf32"))


def float32_kernels() -> str:
    """The plain float32 kernels of the GPU."""
    kernels = ("register_blocked", "register_blocked_uniform", "sliding_window")
    windows = {case.name: median(case, kernels[2]) for case in read("layers-h200-window").cases}
    rows = []
    for case in read("layers-h200-float32").cases:
        times = [*(median(case, kernel) for kernel in kernels[:2]), windows.get(case.name, math.inf)]
        words = [ms(time) if time < math.inf else "" for time in times]
        rows.append([COURSE[case.name], *words, ms(peer(case)), f"{min(times) / case.roofline_seconds:.2f}"])
    head = ["layer", *(f"`{kernel}`, ms" for kernel in kernels), "cuDNN float32, ms", "best, of the roofline"]
    return markdown(head, rows, machine("layers-h200-float32"))


def ladder() -> str:
    """Every GPU kernel on the course's layers with 10,000 images, from the tuning table."""
    tables = json.loads((ROOT / "ece408_op/core/tuning.json").read_text(encoding="utf-8"))["chips"]
    (table,) = [chip for chip in tables if "H200" in chip["name"]]
    sizes = [list(case.problem.sizes.values()) for case in read("layers-h200").cases]
    times = [next(row["milliseconds"] for row in table["layers"] if row["layer"] == size) for size in sizes]
    # The slowest kernel first, like the course's ladder: by time on the 2017 layer or, if not supported, on the last.
    names: list[str] = []
    for layer in (times[0], *times[:0:-1]):
        names += sorted(layer.keys() - {*names}, key=lambda name: -layer[name])
    rows = [[f"`{name}`", *(number(t[name]) if name in t else "" for t in times)] for name in names]
    return markdown(["kernel", *COURSE.values()], rows, f"One {table['name']}, ms.")


def cpu_layers(name: str) -> str:
    """``auto``, MXNet's Convolution and PyTorch's better layout, fresh and reused outputs."""
    rows = []
    for case in read(name).cases:
        own, mxnet = ([median(case, who, c) for c in ("fresh", "reused")] for who in ("New auto", BUILT_IN))
        times = [*own, *mxnet, peer(case, "PyTorch", "fresh")]
        rows.append([COURSE[case.name], *map(ms, times), f"{mxnet[1] / own[1]:.2f}"])
        rows[-1].append(f"{own[1] / case.roofline_seconds:.2f}")
    rows.append(["geometric mean", *[""] * 5, f"{cpu_ratios(name, 'MXNet', 'reused')[0]:.2f}", ""])
    head = ["layer", "New, fresh, ms", "reused", "MXNet, fresh", "reused", "PyTorch, fresh", "times MXNet, reused"]
    return markdown([*head, "of the roofline"], rows, machine(name))


def contestant(name: str) -> str:
    """The contestant of a file of CPU layers: "New auto", or "New direct" where auto was not measured."""
    names = {one.contestant for one in read(name).cases[0].rows}
    return "New auto" if "New auto" in names else "New direct"


def cpu_ratios(name: str, family: str, call: str) -> tuple[float, float]:
    """Return the speed-up of ``New`` over a peer: the geometric mean of the layers, and the least."""
    return mean_and_least(case.ratio(case.row(contestant(name), call), family) for case in read(name).cases)


def cpu_others() -> str:
    """The ratios of each CPU file."""
    rows = []
    for name in ("layers-zen5", "layers-zen5-avx2", "layers-zen4", "layers-zen3"):
        rows.append([CPUS[name.split("-")[1]], SIMD[read(name).machine.simd], contestant(name)])
        for family, call in (("MXNet", "fresh"), ("MXNet", "reused"), ("PyTorch", "fresh")):
            rows[-1] += [f"{ratio:.2f}" for ratio in cpu_ratios(name, family, call)]
    head = ["two cores", "instructions", "contestant", "MXNet, fresh: mean", "least", "MXNet, reused: mean", "least"]
    return markdown([*head, "PyTorch, fresh: mean", "least"], rows)


def networks() -> str:
    """Whole networks: seconds of a forward by contestant, with ``New`` on a CPU and on a GPU."""
    rows, files = [], {"CPU": "networks-zen5", "GPU": "networks-h200"}
    for where, case in ((where, case) for where, name in files.items() for case in read(name).cases):
        timed = [one for one in case.rows if one.call == "forward" and one.contestant[:3] in ("MXN", "New")]
        rows.append([f"{case.name}, {where}", *(f"{one.median:.3f}" for one in timed)])
    above = "\n".join(f"{where}: {machine(name)}" for where, name in files.items())
    return markdown(["seconds", *(one.contestant for one in timed)], rows, above)


def networks_on_gpu() -> str:
    """gpu_network and the fastest of PyTorch's settings on the course's networks and on image classifiers."""
    rows = []
    for case in (case for name in ("networks-h200", "networks-h200-zoo") for case in read(name).cases):
        rows.append([case.name])
        for call in ("gpu", "forward"):
            ours, theirs = median(case, "gpu_network auto", call), peer(case, "PyTorch", call)
            rows[-1] += [ms(ours), ms(theirs), f"{theirs / ours:.2f}"]
    head = ["network", "on the GPU, ms", "PyTorch", "times as fast", "from memory, ms", "PyTorch", "times as fast"]
    return markdown(head, rows)


def errors() -> str:
    """The largest errors of auto and of cuDNN's layouts on the course's layers, mixed signs."""
    rows = []
    for case in read("layers-h200").cases:
        own, *peers = (case.row(name, "kernel") for name in ("auto", "cuDNN float32 NCHW", "cuDNN float32 NHWC"))
        errors = (own.error, *(one.error for one in peers), own.bound)
        rows.append([COURSE[case.name], f"`{own.kernel}`", *map(scientific, errors)])
    head = ["layer", "kernel", "auto", "cuDNN NCHW", "cuDNN NHWC", "the kernel's bound"]
    return markdown(head, rows, machine("layers-h200"))


def summary() -> str:
    """README's table: the course's layers on a GPU and on a CPU."""
    rows = []
    for on_gpu, on_cpu in zip(read("layers-h200").cases, read("layers-zen5").cases):
        _, *sizes = on_gpu.problem.sizes.values()
        times = [median(on_gpu, "auto"), peer(on_gpu)]
        times += [median(on_cpu, name, "reused") for name in ("New auto", BUILT_IN)]
        rows.append([f"{COURSE[on_gpu.name]}: {layer_name(sizes)}", *map(ms, times)])
    head = ["layer", "GPU, New", "GPU, cuDNN", "CPU, New", "CPU, MXNet"]
    ratio, _ = cpu_ratios("layers-zen3", "MXNet", "reused")
    return (
        f"{markdown(head, rows)}\n\nGPU: {machine('layers-h200')}\nCPU: {machine('layers-zen5')}\n"
        f"With AVX2 alone, on two cores of a Zen 3, `New` is {ratio:.1f} times as fast as MXNet in geometric mean."
    )


def tutorial() -> str:
    """The benchmark's rows of the tutorial's CPU kernel."""
    cases = read("tutorial-cpu").cases
    rows = [
        [case.name, name, *(ms(median(case, name, call)) for call in ("fresh", "reused"))]
        for case in cases
        for name in dict.fromkeys(one.contestant for one in case.rows)
    ]
    above = f"{machine('tutorial-cpu')} {cases[0].images} images."
    return markdown(["layer", "implementation", "fresh, ms", "reused, ms"], rows, above)


def operators() -> str:
    """Return the operators of gpu_network, grouped by the attributes for which they support several values."""
    from ece408_op.network._network import OPERATORS

    found: dict[str, list[str]] = {}
    for op, kind in OPERATORS.items():
        attributes = (one for one in fields(kind) if one.metadata and one.metadata["expected"] != str(one.default))
        found.setdefault(", ".join(f"`{one.name}`" for one in attributes), []).append(f"`{op}`")
    lines = (f"- {', '.join(ops)}{': ' if attributes else ''}{attributes}" for attributes, ops in found.items())
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ") for line in lines)


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
    "errors": errors,
    "tutorial": tutorial,
    "operators": operators,
}


def updated(text: str) -> str:
    """Return a page's text with every table rewritten; raises KeyError with the name of an unknown table."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def main() -> int:
    """Run the command; return its exit code."""
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
