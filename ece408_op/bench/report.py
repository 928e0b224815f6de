"""Results as a Markdown table and as data."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ece408_op.core.check import Comparison
from ece408_op.core.roofline import Ceilings
from ece408_op.problem import ConvProblem
from ece408_op.runtime.llvm import cpu

from ._measure import FRESH, REUSED, Timing
from ._plots import Point
from .contestants import BUILT_IN, PYTORCH

_PACKAGES = ("ece408-op", "mxnet", "torch", "numpy", "llvmlite")


@dataclass(frozen=True)
class LayerResult:
    """One layer: the timings of each contestant, fresh and reused."""

    name: str
    problem: ConvProblem
    timings: dict[str, dict[str, Timing]]

    @property
    def passed(self) -> bool:
        """Every timed output of every contestant was right."""
        return all(timing.passed for kinds in self.timings.values() for timing in kinds.values())

    def median(self, contestant: str, kind: str) -> float | None:
        """Seconds, or None where the contestant does not do that or was wrong."""
        timing = self.timings.get(contestant, {}).get(kind)
        return timing.median if timing and timing.passed else None

    def ratio(self, contestant: str, kind: str, peers: Iterable[str]) -> float | None:
        """How many times as fast as the fastest of the peers."""
        own = self.median(contestant, kind)
        theirs = [median for median in (self.median(peer, kind) for peer in peers) if median is not None]
        return min(theirs) / own if own and theirs else None


def _columns() -> dict[str, tuple[str, tuple[str, ...]]]:
    return {
        "x MXNet, fresh": (FRESH, (BUILT_IN,)),
        "x MXNet, reused": (REUSED, (BUILT_IN,)),
        "x PyTorch, fresh": (FRESH, PYTORCH),
    }


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def table(results: list[LayerResult], ceilings: Ceilings) -> str:
    """Markdown: a row for each layer and contestant, then geometric mean and least of the ratios.

    ``x floor`` is the time over the larger of the layer's arithmetic and memory floors.
    """
    columns = _columns()
    head = [
        "layer",
        "implementation",
        "fresh, ms",
        "reused, ms",
        *columns,
        "GFLOP/s, reused",
        "x floor, reused",
        "error, share of allowed",
    ]
    rows = [head, ["---"] * len(head)]
    for result in results:
        for name, timings in result.timings.items():
            rows.append([result.name, name, *_times(timings)])
            rows[-1] += [_number(result.ratio(name, kind, peers), 2) for kind, peers in columns.values()]
            seconds = result.median(name, REUSED)
            rows[-1].append(_number(result.problem.flops / seconds / 1e9 if seconds else None, 0))
            rows[-1].append(_number(seconds / ceilings.roofline_seconds(result.problem) if seconds else None, 2))
            rows[-1].append(f"{max(timing.check.worst for timing in timings.values() if timing.check):.2g}")
    for name, ratios in summary(results).items():
        for word in ("geometric mean", "least"):
            figures = [_number(ratios.get(column, {}).get(word), 2) for column in columns]
            rows.append([word, name, "", "", *figures, "", "", ""])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _times(timings: dict[str, Timing]) -> list[str]:
    words = []
    for kind in (FRESH, REUSED):
        timing = timings.get(kind)
        words.append("" if timing is None else f"{timing.median * 1e3:.1f}" if timing.passed else "WRONG")
    return words


def summary(results: list[LayerResult]) -> dict[str, dict[str, dict[str, float]]]:
    """Of each contestant's ratios over the layers, the geometric mean and the least."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in dict.fromkeys(name for result in results for name in result.timings):
        for column, (kind, peers) in _columns().items():
            ratios = [result.ratio(name, kind, peers) for result in results]
            known = [ratio for ratio in ratios if ratio is not None]
            if known and name not in peers and len(known) == len(results):
                mean = math.exp(sum(map(math.log, known)) / len(known))
                found.setdefault(name, {})[column] = {"geometric mean": mean, "least": min(known)}
    return found


def points(results: list[LayerResult]) -> list[Point]:
    """Every right timing of a fresh output as a point of the plots, its ratio to the fastest peer."""
    peers = (BUILT_IN, *PYTORCH)
    return [
        Point(
            result.name,
            name,
            result.problem.flops / result.problem.bytes,
            result.problem.flops / seconds,
            None if name in peers else result.ratio(name, FRESH, peers),
        )
        for result in results
        for name in result.timings
        if (seconds := result.median(name, FRESH))
    ]


def facts(threads: int) -> dict[str, Any]:
    """The machine and the versions, for JSON."""
    return {"machine": machine(threads), "versions": {"python": platform.python_version(), **versions()}}


def as_data(results: list[LayerResult], ceilings: Ceilings) -> dict[str, Any]:
    """Everything that was measured, for JSON: seconds of each call, and comparisons."""
    return {
        "ceilings": asdict(ceilings),
        "layers": [
            {
                "name": result.name,
                "problem": asdict(result.problem),
                "flops": result.problem.flops,
                "results": {
                    name: {kind: _timing(timing) for kind, timing in timings.items()}
                    for name, timings in result.timings.items()
                },
            }
            for result in results
        ],
        "summary": summary(results),
    }


def from_data(data: dict[str, Any]) -> list[LayerResult]:
    """The results in what ``as_data`` gave; none in an empty dictionary. A wrong output has no times there."""
    return [
        LayerResult(
            layer["name"],
            ConvProblem(**layer["problem"]),
            {
                name: {kind: _timing_from(timing) for kind, timing in kinds.items()}
                for name, kinds in layer["results"].items()
            },
        )
        for layer in data.get("layers", [])
    ]


def _timing_from(data: dict[str, Any]) -> Timing:
    comparison = data["comparison"]
    check = Comparison(**{**comparison, "index": tuple(comparison["index"])})
    return Timing(data.get("seconds", []), check)


def _timing(timing: Timing) -> dict[str, Any]:
    status = "PASSED" if timing.passed else "FAILED"
    speeds = {"seconds": timing.seconds, "median": timing.median} if timing.passed else {}
    return {
        "status": status,
        **speeds,
        "check": str(timing.check),
        "scaled_error": timing.check and timing.check.scaled,
        "comparison": timing.check and asdict(timing.check),
    }


def machine(threads: int) -> dict[str, Any]:
    """The CPU's name, the cores of it that this process may use, threads, and the instruction set of our kernels."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    return {"cpu": name, "cores": len(os.sched_getaffinity(0)), "threads": threads, "simd": cpu().level}


def versions(packages: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """The versions of the packages, by default of what is measured here, as far as they are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
