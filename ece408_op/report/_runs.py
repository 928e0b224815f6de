"""The kept runs of a report, to look figures up in: a figure that no run gave is None."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _runner
from ._jobs import MACHINE, Job, Layer, layer_word, layers
from ._published import FASTEST


@dataclass(frozen=True)
class Missing:
    """A run that there is none of, and why."""

    command: str
    reason: str


class Runs:
    """The runs of a plan in a folder; others that lie there are not looked at."""

    def __init__(self, plan: Sequence[Job], folder: Path) -> None:
        self._runs = {job.name: _runner.read(folder / f"{job.name}.json") for job in plan}
        self._plan = plan

    def result(self, name: str) -> dict[str, Any] | None:
        """What the run of that name found; None where it was not made or failed."""
        run = self._runs.get(name)
        return run["result"] if run is not None and run["status"] == _runner.DONE else None

    @property
    def machine(self) -> dict[str, Any] | None:
        """The machine's facts."""
        return self.result(MACHINE)

    def missing(self) -> list[Missing]:
        """Every run of the plan that there is no result of."""
        found = []
        for job in self._plan:
            run = self._runs[job.name]
            if run is None:
                found.append(Missing(job.shown, "not run: the report was stopped before, or written without running"))
            elif run["status"] != _runner.DONE:
                found.append(Missing(job.shown, " ".join(run["reason"].split())))
        return found

    def milestone(self, script: str, network: str, size: int, suffix: str = "") -> dict[str, Any] | None:
        """The result of m1 to m4; suffix is "profile", "gpu", or AUTO or the CPU kernel of m2."""
        return self.result("-".join(filter(None, (script, network, str(size), suffix))))

    def op_times(self, script: str, network: str, size: int, suffix: str = "") -> list[float]:
        """The Op Time of each convolution; none where there is no run."""
        result = self.milestone(script, network, size, suffix)
        return [call["seconds"] for call in result["op_times"]] if result else []

    def fastest_on_cpu(self, network: str, size: int, layer: int, impls: Sequence[str]) -> tuple[str, float] | None:
        """The kernel with the least Op Time on one convolution in the m2 runs with these ``impls``, and that time.

        A run of AUTO counts for the kernel that it took.
        """
        results = [self.milestone("m2", network, size, impl) for impl in impls]
        calls = [found["op_times"][layer] for found in results if found and layer < len(found["op_times"])]
        known = [(call["implementation"], call["seconds"]) for call in calls]
        return min(known, key=lambda pair: pair[1], default=None)

    def gpu_rows(self, layer: Layer, size: int) -> list[dict[str, Any]]:
        """Every GPU kernel on a layer; none where there is no run."""
        found = self.gpu_layer(layer, size)
        return found["rows"] if found else []

    def gpu_layer(self, layer: Layer, size: int) -> dict[str, Any] | None:
        """What the kernels' run found of a layer."""
        for job in self._plan:
            if job.name.startswith("kernels-") and job.name.endswith(f"-{size}"):
                result = self.result(job.name)
                for found in result["layers"] if result else []:
                    problem = found["problem"]
                    shape = tuple(problem[key] for key in ("channels", "height", "width", "filters", "kernel"))
                    if shape == layer:
                        return dict(found)
        return None

    def gpu_seconds(self, kernel: str, network: str, size: int, layer: int) -> float | None:
        """A GPU kernel's time on one convolution of a network; FASTEST stands for the fastest right one in float32."""
        shapes = layers(network)
        rows = self.gpu_rows(shapes[layer], size) if layer < len(shapes) else []
        if kernel == FASTEST:
            times = [row["seconds"] for row in rows if "seconds" in row and row["precision"] == "float32"]
            return min(times, default=None)
        return next((row.get("seconds") for row in rows if row["kernel"] == kernel), None)

    def counters(self, layer: Layer, images: int) -> dict[str, dict[str, Any]]:
        """What the hardware counted, by kernel."""
        result = self.result(f"counters-{layer_word(layer)}-{images}")
        return {row["kernel"]: row for row in result["rows"]} if result else {}

    def bench(self, layer: Layer, images: int) -> dict[str, Any] | None:
        """The operator on the CPU beside MXNet's Convolution."""
        result = self.result(f"bench-{layer_word(layer)}-{images}")
        found: dict[str, Any] = {}
        for row in result["cases"][0]["rows"] if result else ():
            found.setdefault(row["contestant"], {})[row["call"]] = row
        return found or None
