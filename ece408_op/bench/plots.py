"""Plots of results, drawn by matplotlib as SVG: a roofline of layers, and bars of times.

The same results give the same file. Nothing but INK is meant to contrast with the page, so that a page may replace it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ece408_op.core import dispatch
from ece408_op.core.roofline import Ceilings
from ece408_op.data.atomic import replacing
from ece408_op.errors import DeviceError
from ece408_op.runtime.install_hint import command

from .results import Case, Results, Row

#: The colour of text and axes.
INK = "#010203"

#: Colour and marker by what a row is; the colours can be told from white and from black.
_MARKS = {
    "baseline or peer": ("#d1702b", "s"),
    "fastest in float32": ("#2f9e62", "D"),
    "float32": ("#3b82c4", "o"),
    "reduced precision": ("#9b6bcf", "^"),
    "yours": ("#c2412d", "o"),
}

#: Inches: narrow enough to be read on a phone.
_WIDTH = 4.6

_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


def check() -> None:
    """Raise DeviceError where matplotlib is missing, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise DeviceError(f"plots: expected matplotlib to import, got {error}; {command('report')}") from error


def draw(results: Results, folder: Path) -> list[Path]:
    """Write the plots that the results allow into the folder, which is made; returns their paths."""
    cases = [case for case in results.cases if any(row.seconds for row in case.rows)]
    plots = {f"bars-{re.sub('[^a-z0-9]+', '-', case.name.lower())}": bars(case) for case in cases}
    layers = [case for case in cases if case.problem]
    if layers and results.ceilings:
        plots["roofline"] = roofline(layers, Ceilings(**results.ceilings))
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, svg in plots.items():
        paths.append(folder / f"{name}.svg")
        with replacing(paths[-1]) as file:
            file.write(svg.encode())
    return paths


@dataclass(frozen=True)
class Point:
    """A layer's mark in a roofline: operations per byte and per second; ``kind``: a key of _MARKS."""

    layer: str
    intensity: float
    rate: float
    kind: str


def roofline(cases: Sequence[Case], ceilings: Ceilings, baseline: str = "") -> str:
    """The rate of every row of some layers, under the memory roofline and the rooflines of the units that are used.

    baseline: the contestant that is marked like the peers.
    """
    points, used = [], ["fp32"]
    for case, problem in ((case, case.problem) for case in cases if case.problem):
        for row in case.rows:
            used += [dispatch.find(row.kernel).arithmetic] if row.kernel else []
            if row.median:
                kind = _kind(row, case, baseline)
                points.append(Point(case.name, problem.flops / problem.bytes, problem.flops / row.median, kind))
    return roofline_of(points, ceilings, used)


def roofline_of(points: Sequence[Point], ceilings: Ceilings, used: Iterable[str] = ("fp32",)) -> str:
    """The points under the memory roofline and the rooflines of the units ``used``, keys of core.roofline.PRODUCTS."""
    intensities = {point.layer: point.intensity for point in points}
    memory = ceilings.bytes_per_second / 1e12
    roofs: dict[float, list[str]] = {}
    for units in dict.fromkeys(used):
        roofs.setdefault(ceilings.rate(units) / 1e12, []).append(units)
    ridges = [roof / memory for roof in roofs]
    low, high = min([*intensities.values(), *ridges]) / 2, max([*intensities.values(), *ridges]) * 2

    def plot(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(_WIDTH, 4.4))
        axes.plot([low, max(ridges)], [low * memory, max(roofs)], color=INK, lw=1.2)
        for (roof, names), ridge in zip(roofs.items(), ridges):
            axes.plot([ridge, high], [roof, roof], color=INK, lw=1.2)
            axes.annotate(", ".join(names), (high, roof), (0, 2), textcoords="offset points", ha="right", fontsize=7)
        seen = {}
        for point in points:
            color, marker = seen[point.kind] = _MARKS[point.kind]
            order = 2 + (point.kind == "fastest in float32")
            axes.plot(point.intensity, point.rate / 1e12, marker, color=color, ms=5, zorder=order, clip_on=False)
        axes.set(xscale="log", yscale="log", xlim=(low, high))
        axes.set(xlabel="operations per byte that has to be moved", ylabel="TFLOP/s")
        bottom = axes.get_ylim()[0] / 20  # room for the names below the marks
        axes.set_ylim(bottom)
        for name, value in intensities.items():
            axes.annotate(
                name, (value, bottom), (0, 4), textcoords="offset points", ha="center", fontsize=7, rotation=90
            )
        marks = [plt.Line2D([], [], color=c, marker=m, ls="", ms=5, label=kind) for kind, (c, m) in seen.items()]
        axes.legend(handles=marks, loc="upper center", bbox_to_anchor=(0.5, 1.18), ncol=2, fontsize=8)
        _plain_ticks(axes.xaxis, axes.yaxis)
        return figure

    return _svg("roofline", plot)


def bars(case: Case, baseline: str = "") -> str:
    """The median of every row of a case with times, on a logarithmic scale; a line marks each row's own roofline."""
    rows = [(row, row.median) for row in case.rows if row.median]
    several = len({row.call for row, _ in rows}) > 1
    labels = [f"{row.contestant}, {row.call}" if several else row.contestant for row, _ in rows]

    def plot(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(_WIDTH, 0.7 + 0.21 * len(rows)))
        heights, times = range(len(rows), 0, -1), [1e3 * median for _, median in rows]
        axes.barh(heights, times, color=[_MARKS[_kind(row, case, baseline)][0] for row, _ in rows], height=0.72)
        for height, value in zip(heights, times):
            axes.annotate(f" {value:.3g}", (value, height), va="center", fontsize=7.5, annotation_clip=False)
        left = min(times)
        for height, (row, _) in zip(heights, rows):
            if row.roofline_seconds:
                least = 1e3 * row.roofline_seconds
                axes.plot([least, least], [height - 0.45, height + 0.45], color=INK, lw=1.5)
                left = min(left, least)
        axes.set(xscale="log", xlim=(left / 1.6, max(times) * 3.2), ylim=(0.3, len(rows) + 0.7), xlabel="milliseconds")
        axes.set_yticks(list(heights), labels, fontsize=8)
        _plain_ticks(axes.xaxis)
        return figure

    return _svg(f"bars-{case.name}", plot)


def embedded(name: str, svg: str) -> str:
    """The SVG to stand inside a page: no prologue, no size of its own, unique ids, the page's colour of text."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    svg = re.sub(r' (height|width)="[^"]*"', "", head) + ">" + rest
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    return svg.replace(INK, "currentColor")


def _kind(row: Row, case: Case, baseline: str) -> str:
    if row.peer or row.contestant == baseline:
        return "baseline or peer"
    if row.precision not in ("", "float32"):
        return "reduced precision"
    same = [
        r.median for r in case.rows if r.median and not r.peer and r.precision == row.precision and r.call == row.call
    ]
    return "fastest in float32" if row.median == min(same) else "float32"


def _plain_ticks(*axes: Any) -> None:
    for axis in axes:
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")


def _svg(name: str, plot: Callable[[Any], Any]) -> str:
    import matplotlib as mpl

    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        mpl.use("svg")
        from matplotlib import pyplot

        figure = plot(pyplot)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)
    return stream.getvalue()
