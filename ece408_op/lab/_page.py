"""The page of --html: the source with a heat column per line, the map of wrong elements, and the roofline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ece408_op.data.atomic import write_text
from ece408_op.problem import ConvProblem
from ece408_op.runtime import templates

from . import _screen
from ._speed import YOURS

PAGE = "index.html"
#: A chip for rooflines where none is here: NVIDIA's data sheet of the H200, bytes and float32 operations per second.
_CHIP, _BYTES_PER_SECOND, _FLOPS_PER_SECOND = "an H200 (data sheet)", 4.8e12, 67e12
#: The roofline's axes, decades of FLOP per byte and of FLOP per second, and the picture's size.
_INTENSITY, _RATE, _WIDTH, _HEIGHT = (-2, 3), (9, 14), 600, 300


def write(result: Mapping[str, Any], folder: Path) -> Path:
    """Write the page into the folder, and return its path; raises DeviceError without Jinja2."""
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
    """Return the picture of the roofline and a dot per layer; None where nothing was counted or timed on a GPU.

    A layer that was not timed is on the roof: it can be no faster with its bytes per operation.
    """
    dots, chip, rates = [], _CHIP, (_BYTES_PER_SECOND, _FLOPS_PER_SECOND)
    for entry in result["layers"]:
        times = entry["times"] or {}
        problem = ConvProblem(times.get("images", 1), *entry["layer"])
        if times.get("rooflines"):
            roofs = times["rooflines"]
            chip, rates = "this GPU", (problem.bytes / roofs["memory"], problem.flops / roofs["FP32"])
        if entry["counters"] or times.get("rooflines"):
            intensity = entry["counters"]["intensity"] if entry["counters"] else problem.flops / problem.bytes
            rate = problem.flops / times["seconds"][YOURS] if times else min(rates[1], intensity * rates[0])
            dots.append(
                {"at": _point(intensity, rate), "words": f"{_screen.layer_name(entry)}: {intensity:.2f} FLOP per byte"}
            )
    if not dots:
        return None
    ridge = rates[1] / rates[0]
    low, high = (10.0**decade for decade in _INTENSITY)
    roof = [_point(low, low * rates[0]), _point(ridge, rates[1]), _point(high, rates[1])]
    ticks = [
        {"x": _point(10.0**decade, 1)[0], "text": f"{10.0**decade:g}"}
        for decade in range(_INTENSITY[0], _INTENSITY[1] + 1)
    ]
    rows = [
        {"y": _point(1, 10.0**decade)[1], "text": f"{10.0 ** (decade - 12):g}"}
        for decade in range(_RATE[0], _RATE[1] + 1)
    ]
    return {"dots": dots, "roof": roof, "ticks": ticks, "rows": rows, "chip": chip, "width": _WIDTH, "height": _HEIGHT}


def _point(intensity: float, rate: float) -> tuple[float, float]:
    """Return the place of the picture, in its units, with logarithmic axes."""

    def share(value: float, decades: tuple[int, int]) -> float:
        return min(1.0, max(0.0, (math.log10(max(value, 1e-9)) - decades[0]) / (decades[1] - decades[0])))

    return round(_WIDTH * share(intensity, _INTENSITY), 1), round(_HEIGHT * (1 - share(rate, _RATE)), 1)


def _times(number: int, least: int) -> str:
    return f"{number / least:.1f} x" if least else ""
