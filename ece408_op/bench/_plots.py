"""Two plots of a benchmark: a roofline, and bars of the speed beside the fastest peer. Drawn by matplotlib, as SVG."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ece408_op.core.roofline import Ceilings
from ece408_op.data.atomic import replacing
from ece408_op.errors import DeviceError
from ece408_op.runtime.install_hint import command

_SIZE = (9.0, 5.0)


@dataclass(frozen=True)
class Point:
    """A contestant on a layer: operations for each byte moved, operations a second, times as fast as the peer."""

    layer: str
    contestant: str
    intensity: float
    flops_per_second: float
    ratio: float | None


def check() -> None:
    """Raise DeviceError where matplotlib is missing, before anything is measured."""
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise DeviceError(f"plots: expected matplotlib to import, got {error}; {command('report')}") from error
    mpl.use("svg")
    # The same run gives the same file: no date, and identifiers that do not change.
    mpl.rcParams["svg.hashsalt"] = "ece408-op"
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    held = io.BytesIO()
    figure.savefig(held, format="svg", bbox_inches="tight", metadata={"Date": None})
    _pyplot().close(figure)
    with replacing(path) as file:
        file.write(held.getvalue())


def draw(points: list[Point], ceilings: Ceilings, folder: Path, title: str) -> list[Path]:
    """Write ``roofline.svg`` and ``peers.svg`` into the folder; raises DeviceError where matplotlib is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "roofline.svg", folder / "peers.svg"]
    _save(_roofline(points, ceilings, title), paths[0])
    _save(_bars(points, title), paths[1])
    return paths


def _by_contestant(points: Iterable[Point]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.contestant, []).append(point)
    return found


def _roofline(points: list[Point], ceilings: Ceilings, title: str) -> Any:
    figure, axes = _pyplot().subplots(figsize=_SIZE)
    ridge = ceilings.flops_per_second / ceilings.bytes_per_second
    left, right = (0.5 * min(p.intensity for p in points), 2 * max(*(p.intensity for p in points), ridge))
    roof = [left, ridge, right]
    axes.plot(
        roof,
        [min(x * ceilings.bytes_per_second, ceilings.flops_per_second) / 1e12 for x in roof],
        color="black",
        label="memory, float32 lanes",
    )
    for contestant, own in _by_contestant(points).items():
        axes.scatter([p.intensity for p in own], [p.flops_per_second / 1e12 for p in own], s=22, label=contestant)
    for layer, first in {p.layer: p for p in reversed(points)}.items():
        axes.annotate(
            layer, (first.intensity, first.flops_per_second / 1e12), (3, 4), textcoords="offset points", fontsize=7
        )
    axes.set(xscale="log", yscale="log", xlabel="operations for each byte moved", ylabel="TFLOP/s", title=title)
    axes.legend(fontsize=8)
    axes.grid(True, which="both", alpha=0.3)
    return figure


def _bars(points: list[Point], title: str) -> Any:
    figure, axes = _pyplot().subplots(figsize=_SIZE)
    layers = list(dict.fromkeys(p.layer for p in points))
    groups = {name: own for name, own in _by_contestant(points).items() if any(p.ratio is not None for p in own)}
    width = 0.8 / max(1, len(groups))
    for number, (contestant, own) in enumerate(groups.items()):
        heights = {p.layer: p.ratio for p in own}
        places = [place + number * width for place, layer in enumerate(layers) if heights.get(layer) is not None]
        bars = axes.bar(
            places, [heights[layer] for layer in layers if heights.get(layer) is not None], width, label=contestant
        )
        axes.bar_label(bars, fmt="%.2g", fontsize=6)
    axes.axhline(1, color="black", linewidth=0.8)
    middle = 0.4 - width / 2
    axes.set_xticks([place + middle for place in range(len(layers))], layers, rotation=45, ha="right", fontsize=8)
    axes.set(ylabel="times as fast as the fastest peer", title=title)
    axes.legend(fontsize=8)
    return figure
