"""Plots of results, drawn by matplotlib as SVG: a roofline of layers, and bars of times.

The same results give the same file. Only INK must contrast with the page, so a page may replace that colour.
"""

from __future__ import annotations

import io
import re
import statistics
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

#: Colour and marker by kind of row; the colours are visible on white and on black.
_MARKS = {
    "baseline or peer": ("#d1702b", "s"),
    "fastest in float32": ("#2f9e62", "D"),
    "float32": ("#3b82c4", "o"),
    "reduced precision": ("#9b6bcf", "^"),
    "yours": ("#c2412d", "o"),
}

#: A plot's width in inches: narrow enough for a phone.
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
    """Raise DeviceError if matplotlib is missing; call this before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise DeviceError(f"plots: expected matplotlib to import, got {error}; {command('report')}") from error


def draw(results: Results, folder: Path) -> list[Path]:
    """Write the plots that the results allow into the folder, which is created; return their paths."""
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
    """Return an SVG of the rate of every row of some layers, under the rooflines of memory and of the units used.

    baseline: the contestant that is marked like the peers.
    """
    layers = [(case, row, case.problem) for case in cases if case.problem for row in case.rows]
    points = [
        Point(case.name, problem.flops / problem.bytes, problem.flops / row.median, _kind(row, case, baseline))
        for case, row, problem in layers
        if row.median
    ]
    used = [dispatch.find(row.kernel).arithmetic for _, row, _ in layers if row.kernel]
    return roofline_of(points, ceilings, ["fp32", *used])


def roofline_of(points: Sequence[Point], ceilings: Ceilings, used: Iterable[str] = ("fp32",)) -> str:
    """Return an SVG of points under the rooflines of memory and of the units ``used``, keys of roofline.PRODUCTS."""
    intensities = {point.layer: point.intensity for point in points}
    memory = ceilings.bytes_per_second / 1e12
    roofs: dict[float, list[str]] = {}
    for units in dict.fromkeys(used):
        roofs.setdefault(ceilings.rate(units) / 1e12, []).append(units)
    marks = [*intensities.values(), *(roof / memory for roof in roofs)]
    low, high, ridge = min(marks) / 2, max(marks) * 2, max(roofs) / memory

    def plot(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(_WIDTH, 4.4))
        axes.plot([low, ridge], [low * memory, max(roofs)], color=INK, lw=1.2)
        for roof, names in roofs.items():
            axes.plot([roof / memory, high], [roof, roof], color=INK, lw=1.2)
            _note(axes, ", ".join(names), (high, roof), ha="right")
        for kind, (color, marker) in _MARKS.items():
            mine = [(point.intensity, point.rate / 1e12) for point in points if point.kind == kind]
            if mine:
                order = 2 + (kind == "fastest in float32")
                axes.plot(*zip(*mine), marker, color=color, ms=5, zorder=order, clip_on=False, label=kind)
        axes.set(xscale="log", yscale="log", xlim=(low, high))
        axes.set(xlabel="operations per byte that has to be moved", ylabel="TFLOP/s")
        bottom = axes.get_ylim()[0] / 20  # room for the names below the marks
        axes.set_ylim(bottom)
        for name, value in intensities.items():
            _note(axes, name, (value, bottom), ha="center", rotation=90)
        if points:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.18), ncol=2, fontsize=8)
        _plain_ticks(axes.xaxis, axes.yaxis)
        return figure

    return _svg("roofline", plot)


def bars(case: Case, baseline: str = "") -> str:
    """Return an SVG of the median of every row with times, on a logarithmic scale; a line marks each row's roofline."""
    rows = [row for row in case.rows if row.seconds]
    several = len({row.call for row in rows}) > 1
    labels = [f"{row.contestant}, {row.call}" if several else row.contestant for row in rows]
    times, heights = [1e3 * statistics.median(row.seconds) for row in rows], range(len(rows), 0, -1)
    rooflines = {height: 1e3 * row.roofline_seconds for height, row in zip(heights, rows) if row.roofline_seconds}

    def plot(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(_WIDTH, 0.7 + 0.21 * len(rows)))
        drawn = axes.barh(heights, times, color=[_MARKS[_kind(row, case, baseline)][0] for row in rows], height=0.72)
        axes.bar_label(drawn, [f" {time:.3g}" for time in times], fontsize=7.5)
        axes.vlines(rooflines.values(), [h - 0.45 for h in rooflines], [h + 0.45 for h in rooflines], color=INK, lw=1.5)
        left = min([*times, *rooflines.values()])
        axes.set(xscale="log", xlim=(left / 1.6, max(times) * 3.2), ylim=(0.3, len(rows) + 0.7), xlabel="milliseconds")
        axes.set_yticks(list(heights), labels, fontsize=8)
        _plain_ticks(axes.xaxis)
        return figure

    return _svg(f"bars-{case.name}", plot)


def embedded(name: str, svg: str) -> str:
    """Return the SVG for use inside a page: no prologue, no fixed size, unique ids, the page's text colour."""
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"(?<=<svg)[^>]*", lambda head: re.sub(r' (height|width)="[^"]*"', "", head[0]), svg, count=1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    return svg.replace(INK, "currentColor")


def _kind(row: Row, case: Case, baseline: str) -> str:
    if row.peer or row.contestant == baseline:
        return "baseline or peer"
    if row.precision not in ("", "float32"):
        return "reduced precision"
    like = [one for one in case.rows if (one.peer, one.precision, one.call) == (False, row.precision, row.call)]
    return "fastest in float32" if row.median == min(one.median for one in like if one.median) else "float32"


def _note(axes: Any, text: str, place: tuple[float, float], **style: Any) -> None:
    """Write a text a little above a place."""
    axes.annotate(text, place, (0, 3), textcoords="offset points", fontsize=7, **style)


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
