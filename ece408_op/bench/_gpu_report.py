"""The GPU benchmark's results as a Markdown table and as data."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass
from typing import Any

from ece408_op.core.roofline import Ceilings
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip

from ._gpu import GpuTiming
from ._plots import Point
from .report import versions

PEER = "cuDNN"


@dataclass(frozen=True)
class GpuResult:
    """One layer: every contestant's timing, and the least time that the chip needs, in milliseconds."""

    name: str
    problem: ConvProblem
    timings: dict[str, GpuTiming]
    floor: float

    @property
    def passed(self) -> bool:
        """Every timed output of every contestant was right."""
        return all(timing.passed for timing in self.timings.values())

    def ratio(self, contestant: str) -> float | None:
        """How many times as fast as the fastest peer; None without one, and where an output was wrong."""
        theirs = [timing.median for name, timing in self.timings.items() if name.startswith(PEER) and timing.passed]
        own = self.timings.get(contestant)
        return min(theirs) / own.median if theirs and own is not None and own.passed else None


def table(results: list[GpuResult]) -> str:
    """Markdown: a row for each layer and contestant, then the ratios to the fastest peer summed up."""
    head = ["layer", "images", "contestant", "median, ms", "quartiles", f"x {PEER}", "x floor", "TFLOP/s", "error"]
    rows = [head, ["---"] * len(head)]
    for result in results:
        for name, timing in result.timings.items():
            shown = f"{name} ({timing.kernel})" if timing.kernel else name
            rows.append([result.name, str(result.problem.batch), shown, *_figures(result, name, timing)])
    for name, ratios in summary(results).items():
        for word, ratio in ratios.items():
            rows.append([word, "", name, "", "", f"{ratio:.2f}", "", "", ""])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _figures(result: GpuResult, name: str, timing: GpuTiming) -> list[str]:
    if not timing.passed:
        return ["WRONG", "", "", "", "", f"{timing.error:.2g}"]
    ratio = result.ratio(name)
    low, high = timing.spread
    return [
        f"{timing.median:.4g}",
        f"{low:.4g} to {high:.4g}",
        "" if ratio is None else f"{ratio:.2f}",
        f"{timing.median / result.floor:.2f}",
        f"{result.problem.flops / timing.median / 1e9:.1f}",
        f"{timing.error:.2g}",
    ]


def summary(results: list[GpuResult]) -> dict[str, dict[str, float]]:
    """Of each contestant's ratios to the fastest peer, over layers on all of which it has one: mean and least."""
    found = {}
    for name in dict.fromkeys(name for result in results for name in result.timings if not name.startswith(PEER)):
        ratios = [ratio for ratio in (result.ratio(name) for result in results) if ratio is not None]
        if ratios and len(ratios) == len(results):
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            found[name] = {"geometric mean": mean, "least": min(ratios)}
    return found


def points(results: list[GpuResult]) -> list[Point]:
    """Every right timing as a point of the plots."""
    return [
        Point(
            result.name,
            name,
            result.problem.flops / result.problem.bytes,
            result.problem.flops / timing.median * 1e3,
            None if name.startswith(PEER) else result.ratio(name),
        )
        for result in results
        for name, timing in result.timings.items()
        if timing.passed
    ]


def facts(chip: Chip) -> dict[str, Any]:
    """The machine and the versions, for JSON."""
    runtime = cuda.cupy().cuda.runtime
    return {
        "machine": {**asdict(chip), "driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion()},
        "versions": {"python": platform.python_version(), "cupy": cuda.cupy().__version__, **versions()},
    }


def as_data(results: list[GpuResult], ceilings: Ceilings, precision: str) -> dict[str, Any]:
    """Everything that was measured, for JSON."""
    return {
        "precision": precision,
        "ceilings": asdict(ceilings),
        "layers": [
            {
                "name": result.name,
                "problem": asdict(result.problem),
                "flops": result.problem.flops,
                "bytes": result.problem.bytes,
                "roofline_milliseconds": result.floor,
                "results": {name: _timing(timing) for name, timing in result.timings.items()},
            }
            for result in results
        ],
        "summary": summary(results),
    }


def from_data(data: dict[str, Any]) -> list[GpuResult]:
    """The results in what ``as_data`` gave; none in an empty dictionary. A wrong output has no times there."""
    return [
        GpuResult(
            layer["name"],
            ConvProblem(**layer["problem"]),
            {
                name: GpuTiming(
                    tuple(timing.get("milliseconds", ())), timing["error"], timing["bound"], timing["kernel"]
                )
                for name, timing in layer["results"].items()
            },
            layer["roofline_milliseconds"],
        )
        for layer in data.get("layers", [])
    ]


def _timing(timing: GpuTiming) -> dict[str, Any]:
    speeds = {"milliseconds": list(timing.milliseconds), "median": timing.median} if timing.passed else {}
    status = "PASSED" if timing.passed else "FAILED"
    return {"status": status, "kernel": timing.kernel, **speeds, "error": timing.error, "bound": timing.bound}
