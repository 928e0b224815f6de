"""A roofline and bars, drawn by matplotlib as SVG whose ink takes the page's colour, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from ._document import Figure, digits, seconds

#: What stands for the page's own ink until the SVG is written, and colours that can be told from white and from black.
_INK = "#010203"
_BASE, _FASTEST, _FLOAT32, _REDUCED = "#d1702b", "#2f9e62", "#3b82c4", "#9b6bcf"

#: Inches: narrow enough to be read on a phone.
_WIDTH = 4.6

_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def roofline(layers: Mapping[str, dict[str, Any]], ceilings: Mapping[str, float], size: int, baseline: str) -> Figure:
    """Every kernel on every layer below what memory and arithmetic allow.

    layers: a run's layer by title; ceilings: bytes_per_second and flops_per_second of the GPU.
    """
    memory, arithmetic = ceilings["bytes_per_second"], ceilings["flops_per_second"]
    intensities = {title: run["flops"] / run["bytes"] for title, run in layers.items()}
    low, high = min(intensities.values()) / 2, max([*intensities.values(), arithmetic / memory]) * 2

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(_WIDTH, 4.4))
        ridge = arithmetic / memory
        axes.plot([low, ridge, high], [low * memory / 1e12, arithmetic / 1e12, arithmetic / 1e12], color=_INK, lw=1.2)
        for title, run in layers.items():
            for row in run["rows"]:
                if "seconds" in row:
                    color, marker, order = _mark(row, run, baseline)
                    rate = run["flops"] / row["seconds"] / 1e12
                    axes.plot(intensities[title], rate, marker, color=color, ms=5, zorder=order, clip_on=False)
        axes.set(xscale="log", yscale="log", xlim=(low, high))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.yaxis.set_minor_formatter("")
        axes.set_xlabel("operations for each byte that has to be moved")
        axes.set_ylabel("TFLOP/s")
        floor = axes.get_ylim()[0]
        for number, value in enumerate(sorted(intensities.values()), 1):
            axes.annotate(str(number), (value, floor), (0, 3), textcoords="offset points", ha="center", fontsize=8)
        handles = [
            plt.Line2D([], [], color=color, marker=marker, ls="", ms=5, label=label)
            for color, marker, label in (
                (_BASE, "s", baseline),
                (_FASTEST, "D", "fastest in float32"),
                (_FLOAT32, "o", "float32"),
                (_REDUCED, "^", "reduced precision"),
            )
        ]
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1.18), ncol=2, fontsize=8)
        return figure

    order = sorted(intensities, key=lambda title: intensities[title])
    names = "; ".join(f"{number}: {title}" for number, title in enumerate(order, 1))
    caption = (
        f"Roofline, {size} images: {digits(memory / 1e12)} TB/s measured by filling memory, "
        f"{digits(arithmetic / 1e12)} TFLOP/s of float32 by lanes and clock. {names}. "
        "Tensor cores have a higher roof than the one drawn."
    )
    alt = f"Log-log plot: rate of every kernel on {len(layers)} layers below the memory and arithmetic roofs"
    return Figure("roofline", caption, alt, _svg("roofline", draw))


def bars(title: str, run: Mapping[str, Any], size: int, baseline: str) -> Figure:
    """The time of every kernel on one layer, on a logarithmic scale."""
    rows = [row for row in run["rows"] if "seconds" in row]
    floor = run["roofline_seconds"] * 1e3

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(_WIDTH, 0.7 + 0.21 * len(rows)))
        places = range(len(rows), 0, -1)
        times = [1e3 * row["seconds"] for row in rows]
        axes.barh(places, times, color=[_mark(row, run, baseline)[0] for row in rows], height=0.72)
        for place, row, value in zip(places, rows, times):
            axes.annotate(
                f" {seconds(row['seconds'])}", (value, place), va="center", fontsize=7.5, annotation_clip=False
            )
        axes.axvline(floor, color=_INK, lw=1, ls="--")
        axes.set(xscale="log", xlim=(floor / 1.6, max(times) * 3.2), ylim=(0.3, len(rows) + 0.7))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_yticks(list(places), [row["kernel"] for row in rows], fontsize=8)
        axes.set_xlabel("milliseconds")
        return figure

    name = "bars-" + re.sub(r"[^a-z0-9]+", "-", title)
    caption = (
        f"Time of each kernel, {title}, {size} images, logarithmic. The dashed line is the layer's floor, "
        f"{seconds(run['roofline_seconds'])}: its bytes at the memory's rate or its float32 arithmetic, "
        f"whichever takes longer. Orange: {baseline}; green: the fastest in float32; violet: reduced precision."
    )
    alt = f"Bar chart of {len(rows)} kernels' times on {title}"
    return Figure(name, caption, alt, _svg(name, draw))


def cpu_bars(title: str, times: Mapping[str, float], size: int, built_in: float | None = None) -> Figure:
    """The Op Time in seconds of every CPU kernel on one layer, on a logarithmic scale.

    built_in: the time of a whole call of MXNet's Convolution, where it was measured.
    """
    all_times = {**times, "MXNet Convolution": built_in} if built_in else dict(times)

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(_WIDTH, 0.7 + 0.21 * len(all_times)))
        places, values = range(len(all_times), 0, -1), [1e3 * value for value in all_times.values()]
        colors = [_FASTEST if value == min(times.values()) else _FLOAT32 for value in times.values()]
        axes.barh(places, values, color=[*colors, _BASE][: len(values)], height=0.72)
        for place, value in zip(places, values):
            axes.annotate(f" {seconds(value / 1e3)}", (value, place), va="center", fontsize=7.5, annotation_clip=False)
        axes.set(xscale="log", xlim=(min(values) / 1.6, max(values) * 3.2), ylim=(0.3, len(values) + 0.7))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_yticks(list(places), list(all_times), fontsize=8)
        axes.set_xlabel("milliseconds")
        return figure

    name = "cpu-" + re.sub(r"[^a-z0-9]+", "-", title)
    caption = f"Op Time of each CPU kernel, {title}, {size} images, logarithmic. Green: the fastest kernel."
    if built_in:
        caption += " Orange: a whole call of MXNet's built-in Convolution into memory that was written before."
    return Figure(name, caption, f"Bar chart of {len(times)} CPU kernels' times on {title}", _svg(name, draw))


def _mark(row: Mapping[str, Any], run: Mapping[str, Any], baseline: str) -> tuple[str, str, int]:
    """Colour, marker and order of a kernel."""
    if row["kernel"] == baseline:
        return _BASE, "s", 4
    if row["precision"] != "float32":
        return _REDUCED, "^", 2
    times = [other["seconds"] for other in run["rows"] if "seconds" in other and other["precision"] == "float32"]
    return (_FASTEST, "D", 5) if row["seconds"] == min(times) else (_FLOAT32, "o", 3)


def _svg(name: str, draw: Any) -> str:
    import matplotlib as mpl

    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        mpl.use("svg")
        from matplotlib import pyplot

        figure = draw(pyplot)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)
    return clean(stream.getvalue(), name)


def clean(svg: str, name: str) -> str:
    """The SVG to stand inside a page: no prologue, no size of its own, names of its own, the page's ink."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    return svg.replace(_INK, "currentColor").strip() + "\n"
