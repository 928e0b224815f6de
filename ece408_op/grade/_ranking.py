"""Rank right submissions: as the course did it, and in a way that a few outliers do not move."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._spec import RankingSpec

#: The median absolute deviation of normal data, times this, is its standard deviation.
_MAD_TO_DEVIATION = 1.4826


@dataclass(frozen=True)
class Place:
    """One submission on one network with one number of images.

    Seconds are sums over the layers: of medians, fastest and slowest runs.
    Deviations are how far below the class's median the time lies, in standard deviations (robust: in scaled median
    absolute deviations); points are their place on the range given, ends clamped.
    """

    network: str
    place: int
    path: str
    precision: str
    seconds: float
    fastest: float
    slowest: float
    deviations: float
    points: float
    robust_deviations: float
    robust_points: float


def name_of(network: Mapping[str, Any]) -> str:
    """What is ranked together: a network of a record, with its number of images."""
    return f"{network['network']}, {network['images']} images"


def rank(records: Sequence[dict[str, Any]], rules: RankingSpec) -> list[Place]:
    """The places on each network, number of images and class of precision, the fastest first.

    Overlapping intervals share a place; what is wrong has none, and one submission alone.
    """
    by_network: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        for network in record.get("networks", []) if record["status"] == "passed" else []:
            if network["status"] == "passed" and "seconds" in network:
                together = rules.mix_precisions or record["precision"].startswith("float32")
                name = name_of(network) + ("" if together else f", {record['precision']}")
                layers = [layer["seconds"] for layer in network["layers"]]
                ends = {end: sum(layer[end] for layer in layers) for end in ("fastest", "slowest")}
                one = {"path": record["path"], "precision": record["precision"], "seconds": network["seconds"], **ends}
                by_network.setdefault(name, []).append(one)
    return [
        place
        for name, entries in by_network.items()
        if len(entries) > 1
        for place in _one_network(name, sorted(entries, key=lambda entry: entry["seconds"]), rules)
    ]


def _one_network(name: str, entries: list[dict[str, Any]], rules: RankingSpec) -> list[Place]:
    seconds = [entry["seconds"] for entry in entries]
    median = statistics.median(seconds)
    deviation = statistics.pstdev(seconds)
    robust = _MAD_TO_DEVIATION * statistics.median(abs(value - median) for value in seconds)
    places: list[Place] = []
    first_slowest, place = -1.0, 0
    for number, one in enumerate(entries, 1):
        # A tie is with the first of its place, so that a chain of neighbours does not make all of them equal.
        if one["fastest"] > first_slowest:
            first_slowest, place = one["slowest"], number
        plain, sturdy = (_deviations(median - one["seconds"], unit) for unit in (deviation, robust))
        points: dict[str, Any] = {"points": _points(plain, rules), "robust_points": _points(sturdy, rules)}
        places.append(Place(name, place, **one, deviations=plain, robust_deviations=sturdy, **points))
    return places


def _deviations(ahead: float, unit: float) -> float:
    return ahead / unit if unit > 0 else 0.0


def _points(deviations: float, rules: RankingSpec) -> float:
    if rules.clamp == 0:
        return rules.best if deviations >= 0 else rules.worst
    share = (min(max(deviations, -rules.clamp), rules.clamp) + rules.clamp) / (2 * rules.clamp)
    return rules.worst + (rules.best - rules.worst) * share
