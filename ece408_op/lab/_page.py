"""The page of --html: the source with a heat column per line, the map of wrong elements, and the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ece408_op.bench import plots
from ece408_op.core.roofline import Ceilings
from ece408_op.data.atomic import write_text
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda, templates
from ece408_op.submission.sources import device_of

from . import _screen
from ._speed import YOURS

PAGE = "index.html"


def check(path: Path, emulate: bool) -> None:
    """Raise DeviceError, before any work, where Jinja2 is missing, or for a file on a GPU matplotlib."""
    templates.jinja2()
    if device_of(path) == "gpu" and not emulate and cuda.driver_version():
        plots.check()  # the roofline


def write(result: Mapping[str, Any], folder: Path) -> Path:
    """Write the page into the folder, and return its path; raises DeviceError where ``check`` does."""
    write_text(folder / PAGE, as_page(result))
    return folder / PAGE


def as_page(result: Mapping[str, Any]) -> str:
    """Return the page, which fetches nothing; its style is that of the grader's pages."""
    counted = [entry for entry in result["layers"] if entry["lines"]]
    entry = max(counted, key=lambda one: int(one["counters"]["sectors"]), default=None)
    shown = {
        "result": result,
        "name": _screen.layer_name,
        "ncu": _screen.ncu_words,
        "lines": source_lines(result["source"], entry),
        "entry": entry,
        "roofline": roofline(result),
    }
    return templates.render(Path(__file__).with_name("lab.html.j2"), shown)


def source_lines(source: str, entry: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return each line of the source with its share of the cost, 0 to 1, and the counters as words."""
    counted = {one["line"]: one for one in entry["lines"]} if entry else {}
    most = max(map(_screen.cost, counted.values()), default=0.0) or 1.0
    found = []
    for number, text in enumerate(source.splitlines(), 1):
        one = counted.get(number)
        words = {"sectors": "", "wavefronts": "", "divergent": ""}
        if one:
            words["sectors"] = _times(one["sectors"], one["least_sectors"])
            words["wavefronts"] = _times(one["wavefronts"], one["least_wavefronts"])
            words["divergent"] = f"{100 * one['divergent'] / one['branches']:.0f} %" if one["branches"] else ""
        found.append({"number": number, "text": text, "heat": _screen.cost(one) / most if one else 0.0, **words})
    return found


def roofline(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the roofline with a dot per layer, as SVG; None where nothing was timed on a GPU.

    A layer's bytes are those of x, w and y, as in its rooflines: caches serve most of what the emulator counts.
    """
    points, words, ceilings = [], [], None
    for entry in result["layers"]:
        times = entry["times"] or {"rooflines": {}}
        if times["rooflines"]:
            problem, roofs = ConvProblem(times["images"], *entry["layer"]), times["rooflines"]
            ceilings = Ceilings(problem.bytes / roofs["memory"], problem.flops / roofs["FP32"])
            intensity, rate = problem.flops / problem.bytes, problem.flops / times["seconds"][YOURS]
            points.append(plots.Point("x".join(map(str, entry["layer"])), intensity, rate, YOURS))
            words.append(f"{_screen.layer_name(entry)}: {intensity:.2f} FLOP per byte of x, w and y")
    if ceilings is None:
        return None
    return {"svg": plots.embedded("roofline", plots.roofline_of(points, ceilings)), "words": words}


def _times(number: int, least: int) -> str:
    return f"{number / least:.1f} x" if least else ""
