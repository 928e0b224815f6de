"""The class in one picture, by matplotlib: each right submission's time with its interval, the slowest below."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

from ._ranking import Place

_WIDTH, _ROW, _AROUND = 8.0, 0.16, 1.2
#: With more submissions than this their names would not be legible.
_NAMED = 60


def svg(places: Sequence[Place], floor: float | None = None) -> str:
    """An SVG element of one network's places; empty where matplotlib is missing.

    ``floor`` has the least seconds that are possible.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    # The same class gives the same page.
    with mpl.rc_context({"svg.hashsalt": "ece408-op", "svg.fonttype": "none"}):
        figure = Figure(figsize=(_WIDTH, _AROUND + _ROW * len(places)), layout="constrained")
        _draw(figure.add_subplot(), places, floor)
        held = io.StringIO()
        with warnings.catch_warnings():
            # The browser has glyphs that matplotlib's font lacks: text stays text in this SVG.
            warnings.filterwarnings("ignore", r"Glyph .* missing")
            figure.savefig(held, format="svg", metadata={"Date": None})
    text = held.getvalue()
    return text[text.index("<svg") :]


def _draw(axes: Any, places: Sequence[Place], floor: float | None) -> None:
    rows = range(len(places))
    times = [1e3 * place.seconds for place in places]
    below = [1e3 * (place.seconds - place.fastest) for place in places]
    above = [1e3 * (place.slowest - place.seconds) for place in places]
    axes.errorbar(times, rows, xerr=[below, above], fmt="o", markersize=4, linewidth=1)
    if floor:
        axes.axvline(1e3 * floor, linestyle="--", color="gray", label="least possible on this device")
        axes.legend(fontsize="small")
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set_xlabel("sum of the layers' medians, ms")
    axes.grid(axis="x", alpha=0.4)
    if len(places) <= _NAMED:
        axes.set_yticks(list(rows), [place.path[-40:] for place in places], fontsize="x-small", parse_math=False)
    else:
        axes.set_ylabel("submissions, the fastest first")
