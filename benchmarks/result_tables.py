"""What each performance table says: one function per table, from the JSON files in benchmarks/results/ to Markdown."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TUNING = ROOT / "ece408_op/core/tuning.json"

#: The course's layers by the benchmark's names, as people say them.
COURSE = {
    "2017": "2017",
    "2018sp-1": "2018 spring, first",
    "2018sp-2": "2018 spring, second",
    "2018fa-1": "2018 fall, first",
    "2018fa-2": "2018 fall, second",
}
#: What the chips of the CPU files are called: /proc/cpuinfo says "AMD EPYC" of them all.
CPUS = {"zen5": "AMD EPYC (Zen 5)", "zen4": "AMD EPYC (Zen 4)", "zen3": "AMD EPYC (Zen 3)"}
SIMD = {"avx512": "AVX-512", "avx2": "AVX2", "sse": "SSE"}
PEER, BUILT_IN = "cuDNN", "MXNet Convolution"

Rows = list[list[str]]


def read(name: str) -> dict[str, Any]:
    """A file of benchmarks/results by its stem."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def markdown(head: Iterable[str], rows: Rows) -> str:
    """A table with its head."""
    head = list(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def mean(ratios: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:#.3g}" if value < 99.95 else f"{value:.0f}"


def span(value: float | list[float]) -> str:
    """A number, or the smallest and largest of a pair."""
    return " to ".join(f"{v:g}" for v in value) if isinstance(value, list) else f"{value:g}"


def sentence(data: dict[str, Any], cpu: str = "") -> str:
    """The chip and the versions of a file."""
    machine, versions = data["machine"], data["versions"]
    names = {"python": "Python", "mxnet": "MXNet", "numpy": "NumPy", "cupy": "CuPy", "torch": "PyTorch"}
    told = ", ".join(f"{names[key]} {versions[key]}" for key in names if key in versions)
    chip = machine.get("name") or machine.get("gpu")
    if "name" in machine:
        return f"One {chip}, CUDA driver API {machine['driver'] / 1000:.1f}, {told}; cuDNN is PyTorch's."
    host = f"{machine['threads']} threads on {machine['cores']} cores of an {cpu or machine['cpu']}"
    return f"{host}, {SIMD[machine['simd']]}{f', and one {chip}' if chip else ''}; {told}."


# ---------------------------------------------------------------------------------------------------- GPU layers


def peers(layer: dict[str, Any]) -> list[float]:
    """The medians of cuDNN's layouts."""
    return [result["median"] for name, result in layer["results"].items() if name.startswith(PEER)]


def gpu_layers(name: str) -> str:
    """Each layer by ``auto``, and by cuDNN's faster layout."""
    data = read(name)
    rows, ratios = [], []
    for layer in data["layers"]:
        own, theirs = layer["results"]["auto"], min(peers(layer))
        ratios.append(theirs / own["median"])
        rate = layer["flops"] / own["median"] / 1e9
        rows.append(
            [layer["name"], str(layer["problem"]["batch"]), f"`{own['kernel']}`", number(own["median"]), number(theirs)]
            + [f"{ratios[-1]:.2f}", f"{own['median'] / layer['roofline_milliseconds']:.2f}", f"{rate:.1f}"]
        )
    rows.append(["geometric mean", "", "", "", "", f"{mean(ratios):.2f}", "", ""])
    rows.append(["least", "", "", "", "", f"{min(ratios):.2f}", "", ""])
    head = ["layer", "images", "kernel that auto takes", "auto, ms", "cuDNN, ms", "times as fast", "of the roofline"]
    return f"{sentence(data)}\n\n{markdown([*head, 'TFLOP/s'], rows)}"


def precisions() -> str:
    """The five layers in tf32 and fp16."""
    files = {word: read(f"layers-h200-{word}") for word in ("tf32", "fp16")}
    head, rows = ["layer"], []
    for word in files:
        head += [f"{word}: kernel", "auto, ms", "cuDNN, ms"]
    for row, layer_name in enumerate(COURSE):
        rows.append([COURSE[layer_name]])
        for data in files.values():
            layer = data["layers"][row]
            own = layer["results"]["auto"]
            rows[-1] += [f"`{own['kernel']}`", number(own["median"]), number(min(peers(layer)))]
    return f"{sentence(files['tf32'])}\n\n{markdown(head, rows)}"


def float32_kernels() -> str:
    """The plain float32 kernels of the GPU."""
    strips, window = read("layers-h200-float32"), read("layers-h200-window")
    windows = {layer["name"]: layer["results"]["sliding_window"]["median"] for layer in window["layers"]}
    rows = []
    for layer in strips["layers"]:
        times = [layer["results"][kernel]["median"] for kernel in ("register_blocked", "register_blocked_uniform")]
        times.append(windows.get(layer["name"], math.inf))
        words = [number(time) if time < math.inf else "not taken" for time in times]
        share = f"{min(times) / layer['roofline_milliseconds']:.2f}"
        rows.append([COURSE[layer["name"]], *words, number(min(peers(layer))), share])
    head = [
        "layer",
        "`register_blocked`, ms",
        "`register_blocked_uniform`, ms",
        "`sliding_window`, ms",
        "cuDNN float32, ms",
        "best, of the roofline",
    ]
    return f"{sentence(strips)}\n\n{markdown(head, rows)}"


def ladder() -> str:
    """Every GPU kernel on the course's layers with 10,000 images, from the tuning table."""
    (table,) = [chip for chip in json.loads(TUNING.read_text(encoding="utf-8"))["chips"] if "H200" in chip["name"]]
    sizes = [[10000, 1, 28, 28, 50, 5], [10000, 1, 64, 64, 6, 5], [10000, 6, 30, 30, 16, 5]]
    sizes += [[10000, 1, 72, 72, 12, 7], [10000, 12, 33, 33, 24, 7]]
    times = [next(row["milliseconds"] for row in table["layers"] if row["layer"] == size) for size in sizes]
    # The slowest first, as the course's ladder goes; by the 2017 layer, and by the last for those that refuse it.
    names = sorted(times[0], key=lambda name: -times[0][name])
    names += [name for name in times[-1] if name not in names]
    rows = [[f"`{name}`", *(number(t[name]) if name in t else "not taken" for t in times)] for name in names]
    return f"One {table['name']}, ms.\n\n{markdown(['kernel', *COURSE.values()], rows)}"


# ---------------------------------------------------------------------------------------------------- CPU layers


def cpu_name(name: str) -> str:
    """The chip of a file of CPU layers."""
    return CPUS[name.split("-")[1]]


def cpu_layers(name: str) -> str:
    """``auto``, MXNet's Convolution and PyTorch's better layout, fresh and reused outputs."""
    data = read(name)
    rows = []
    for layer in data["layers"]:
        results, bounds = layer["results"], data["ceilings"]
        own = results["New auto"]
        torch = min(result["fresh"]["median"] for key, result in results.items() if key.startswith("PyTorch"))
        roofline = max(layer["flops"] / bounds["flops_per_second"], output_bytes(layer) / bounds["bytes_per_second"])
        times = [own["fresh"]["median"], own["reused"]["median"], *(results[BUILT_IN][k]["median"] for k in own), torch]
        rows.append([COURSE[layer["name"]], *(number(1e3 * time) for time in times)])
        rows[-1].append(f"{results[BUILT_IN]['reused']['median'] / own['reused']['median']:.2f}")
        rows[-1].append(f"{own['reused']['median'] / roofline:.2f}")
    means = data["summary"]["New auto"]["x MXNet, reused"]
    rows.append(["geometric mean", *[""] * 5, f"{means['geometric mean']:.2f}", ""])
    head = ["layer", "New, fresh, ms", "reused", "MXNet, fresh", "reused", "PyTorch, fresh", "times MXNet, reused"]
    return f"{sentence(data, cpu_name(name))}\n\n{markdown([*head, 'of the roofline'], rows)}"


def output_bytes(layer: dict[str, Any]) -> int:
    """Input, filters and output once, in bytes."""
    sizes = layer["problem"]
    b, c, h, w, m, k = (sizes[key] for key in ("batch", "channels", "height", "width", "filters", "kernel"))
    return 4 * (b * c * h * w + m * c * k * k + b * m * (h - k + 1) * (w - k + 1))


def cpu_others() -> str:
    """The summary of each CPU file."""
    rows = []
    for name in ("layers-zen5", "layers-zen5-avx2", "layers-zen4", "layers-zen3"):
        data = read(name)
        contestant = "New auto" if "New auto" in data["summary"] else "New direct"
        ratios = data["summary"][contestant]
        cells = [
            f"{ratios[key][word]:.2f}"
            for key in ("x MXNet, fresh", "x MXNet, reused", "x PyTorch, fresh")
            for word in ("geometric mean", "least")
        ]
        rows.append([cpu_name(name), SIMD[data["machine"]["simd"]], contestant, *cells])
    head = ["two cores", "instructions", "contestant", "MXNet, fresh: mean", "least", "MXNet, reused: mean", "least"]
    return markdown([*head, "PyTorch, fresh: mean", "least"], rows)


# ------------------------------------------------------------------------------------------------------- networks


def networks(name: str) -> str:
    """Whole networks: seconds of a steady forward by contestant."""
    data = read(name)
    found: dict[str, dict[str, float]] = {}
    for row in data["networks"]:
        found.setdefault(row["network"], {})[row["contestant"]] = statistics.median(row["steady"])
    contestants = list(next(iter(found.values())))
    rows = [[network, *(f"{times[c]:.3f}" for c in contestants)] for network, times in found.items()]
    cpu = CPUS.get(name.split("-")[1], "")
    return f"{sentence(data, cpu)}\n\n{markdown(['seconds', *contestants], rows)}"


# ---------------------------------------------------------------------------------------------------- experiments


def changes(group: str) -> str:
    """What was tried on one family of kernels."""
    rows = [
        [row["change"], f"`{row['kernel']}`" if " " not in row["kernel"] else row["kernel"], row["layer"]]
        + [span(row["before"]), f"{span(row['after'])} {row['unit']}", "yes" if row["kept"] else "no"]
        for row in read("experiments")["changes"]
        if row["group"] == group
    ]
    machines = {row["machine"] for row in read("experiments")["changes"] if row["group"] == group}
    told = "; ".join(f"{key}: {text}" for key, text in read("experiments")["machines"].items() if key in machines)
    return f"{told}.\n\n{markdown(['change', 'kernel', 'layer', 'before', 'after', 'kept'], rows)}"


def parts() -> str:
    """Times with parts of a kernel left out."""
    columns = ["all", "no load", "no conversion", "no store", "no reads of shared memory", "no products"]
    columns.append("products alone")
    rows = [
        [f"`{row['kernel']}`", COURSE[row["layer"]], *(number(row[c]) if c in row else "" for c in columns)]
        for row in read("experiments")["parts"]
    ]
    return markdown(["ms", "layer", *columns], rows)


def microbenchmarks() -> str:
    """What the chip can do, measured by loops of one kind."""
    rows = [[row["what"], span(row["value"]), row["unit"]] for row in read("experiments")["microbenchmarks"]]
    return f"{read('experiments')['machines']['H200']}.\n\n{markdown(['loop', 'measured', 'unit'], rows)}"


# ------------------------------------------------------------------------------------------------------- numerics


def scientific(value: float) -> str:
    """One digit behind the point, and a power of ten."""
    return f"{value:.1e}".replace("e-0", "e-")


def errors() -> str:
    """The largest errors of auto and of cuDNN's layouts on the five layers, mixed signs."""
    data = read("layers-h200")
    rows = []
    for layer in data["layers"]:
        results = layer["results"]
        cells = [
            scientific(results[name]["error"]) for name in ("auto", f"{PEER} float32 NCHW", f"{PEER} float32 NHWC")
        ]
        bound = scientific(results["auto"]["bound"])
        rows.append([COURSE[layer["name"]], f"`{results['auto']['kernel']}`", *cells, bound])
    head = ["layer", "kernel", "auto", "cuDNN NCHW", "cuDNN NHWC", "the kernel's bound"]
    return f"{sentence(data)}\n\n{markdown(head, rows)}"


def promotion() -> str:
    """Errors without and with promotion of the accumulator."""
    rows = [
        [
            row["layer"],
            f"`{row['kernel']}`",
            str(row["steps"]),
            *(scientific(row[k]) for k in ("before", "after", "cudnn")),
        ]
        for row in read("experiments")["promotion"]
    ]
    return markdown(["layer", "kernel", "k-steps", "without promotion", "every 6 k-steps", "cuDNN float32"], rows)


def truncation() -> str:
    """The model of truncation, and what was measured."""
    keys = ("zero", "one", "two", "three", "measured")
    rows = [
        [COURSE[row["layer"]], row["data"], *(f"{row[key]:g}" for key in keys)]
        for row in read("experiments")["truncation"]
    ]
    return markdown(["layer", "data", "0 extra bits", "1", "2", "3", "measured"], rows)


def worst_ratios() -> str:
    """The layers with the largest errors relative to cuDNN's."""
    rows = [[row["data"], row["layer"], f"{row['ratio']:.2f}"] for row in read("experiments")["worst_ratios"]]
    return markdown(["data", "layer", "error / cuDNN NCHW's"], rows)


def winograd() -> str:
    """The worst output's share of a plain sum's bound, by how many values are zero."""
    keys = ("dense", "half zero", "three quarters zero", "nine tenths zero")
    rows = [[row["layer"], *(f"{row[key]:g}" for key in keys)] for row in read("experiments")["winograd"]]
    return markdown(["layer", *keys], rows)


# ------------------------------------------------------------------------------------------------------ the README


def summary() -> str:
    """README's table: the five layers on a GPU and on a CPU."""
    gpu, cpu, old = read("layers-h200"), read("layers-zen5"), read("layers-zen3")
    rows = []
    for on_gpu, on_cpu in zip(gpu["layers"], cpu["layers"]):
        sizes = on_gpu["problem"]
        layer = f"{COURSE[on_gpu['name']]}: {sizes['channels']} x {sizes['height']} x {sizes['width']}, "
        layer += f"{sizes['filters']} filters of {sizes['kernel']} x {sizes['kernel']}"
        times = [on_gpu["results"]["auto"]["median"], min(peers(on_gpu))]
        times += [1e3 * on_cpu["results"][name]["reused"]["median"] for name in ("New auto", BUILT_IN)]
        rows.append([layer, *map(number, times)])
    head = ["layer", "GPU, New", "GPU, cuDNN", "CPU, New", "CPU, MXNet"]
    ratio = old["summary"]["New auto"]["x MXNet, reused"]["geometric mean"]
    return (
        f"{markdown(head, rows)}\n\nGPU: {sentence(gpu)}\nCPU: {sentence(cpu, CPUS['zen5'])}\n"
        f"With AVX2 alone, on two cores of a Zen 3, `New` is {ratio:.1f} times as fast as MXNet in geometric mean."
    )


def tutorial() -> str:
    """The benchmark's rows of the tutorial's CPU kernel."""
    data = read("tutorial-cpu")
    rows = []
    for layer in data["layers"]:
        for name, kinds in layer["results"].items():
            times = [number(1e3 * kinds[kind]["median"]) for kind in ("fresh", "reused")]
            rows.append([layer["name"], name, *times])
    images = data["layers"][0]["problem"]["batch"]
    head = ["layer", "implementation", "fresh, ms", "reused, ms"]
    return f"{sentence(data)} {images} images.\n\n{markdown(head, rows)}"


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "layers-h200": lambda: gpu_layers("layers-h200"),
    "layers-h100": lambda: gpu_layers("layers-h100"),
    "random-h200": lambda: gpu_layers("random-h200"),
    "precisions": precisions,
    "float32-kernels": float32_kernels,
    "ladder": ladder,
    "layers-zen5": lambda: cpu_layers("layers-zen5"),
    "cpu-others": cpu_others,
    "networks-zen5": lambda: networks("networks-zen5"),
    "networks-h200": lambda: networks("networks-h200"),
    "changes-split-precision": lambda: changes("split precision"),
    "changes-float32": lambda: changes("float32"),
    "changes-cpu": lambda: changes("CPU"),
    "changes-copies": lambda: changes("calls and copies"),
    "parts": parts,
    "microbenchmarks": microbenchmarks,
    "errors": errors,
    "promotion": promotion,
    "truncation": truncation,
    "worst-ratios": worst_ratios,
    "winograd": winograd,
    "tutorial": tutorial,
}
