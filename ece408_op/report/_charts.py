"""The page's charts: those of ece408-bench, embedded so that they take the page's colours."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ece408_op.bench import plots, results
from ece408_op.core.roofline import Ceilings

from ._commands import MACHINE
from ._format import rate
from ._tables import BASELINE, Tables, layer_text


@dataclass(frozen=True)
class Chart:
    """A picture as SVG; alt: a description for those who cannot see it."""

    caption: str
    alt: str
    svg: str


def cpu_charts(tables: Tables) -> list[Chart]:
    """Times of every CPU kernel on each layer, with the most images."""
    found, size = [], max(tables.asked.sizes)
    for layer in tables.asked.layers:
        case = tables.runs.case("cpu", layer, size)
        rows = tuple(row for row in case.rows if row.median and row.call == results.REUSED) if case else ()
        if rows:
            caption = (
                f"Time of each CPU kernel, {layer_text(layer)}, {size} images: a call into memory that was written "
                "before. The line in a bar is the kernel's roofline. Green: the fastest kernel; orange: MXNet's "
                "built-in Convolution."
            )
            svg = plots.bars(results.Case(layer, size, rows))
            found.append(Chart(caption, f"Bars of the times on {layer_text(layer)}", _embedded(f"cpu-{layer}", svg)))
    return found


def gpu_charts(tables: Tables) -> list[Chart]:
    """A roofline of every kernel on every layer, and bars for each layer, with the most images."""
    size = max(tables.asked.sizes)
    cases = {layer: case for layer in tables.asked.layers for case in [tables.runs.case("gpu", layer, size)] if case}
    facts = tables.runs.result(MACHINE)
    if not facts or not facts["ceilings"] or not any(row.seconds for case in cases.values() for row in case.rows):
        return []
    ceilings = Ceilings(**facts["ceilings"])
    caption = (
        f"Roofline, {size} images. The slope is the memory, {rate(ceilings.bytes_per_second)} TB/s as measured by "
        "filling it. The level lines are the arithmetic units, by number and clock. For a tensor-core kernel, the rate "
        "of the units is divided by its number of products per product of the convolution. No kernel can be above the "
        "line of its units."
    )
    svg = plots.roofline(list(cases.values()), ceilings, BASELINE)
    found = [Chart(caption, "Log-log plot: the rate of every kernel on every layer", _embedded("roofline", svg))]
    for layer, case in cases.items():
        caption = (
            f"Time of each kernel, {layer_text(layer)}, {size} images. The line in a bar is the roofline of the units "
            f"that the kernel uses. Orange: {BASELINE} and cuDNN; green: the fastest in float32; violet: reduced "
            "precision."
        )
        svg = plots.bars(case, BASELINE)
        found.append(Chart(caption, f"Bars of the times on {layer_text(layer)}", _embedded(f"gpu-{layer}", svg)))
    return found


def _embedded(name: str, svg: str) -> str:
    """The SVG to stand inside a page: no prologue, no size of its own, unique ids, the page's colour of text."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    svg = re.sub(r' (height|width)="[^"]*"', "", head) + ">" + rest
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    return svg.replace(plots.INK, "currentColor")
