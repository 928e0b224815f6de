"""The reports on a class: the ranking, pages by Jinja2's templates, Gradescope's results.json, CSV."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from ece408_op.data.atomic import output_folder_problem, replacing
from ece408_op.runtime import ptxas, templates
from ece408_op.runtime.install_hint import command
from ece408_op.runtime.occupancy import KernelNotes
from ece408_op.submission.networks import TERMS

from ._spec import RankingSpec, SpecError

#: The median absolute deviation of normal data, times this, is its standard deviation.
_MAD_TO_DEVIATION = 1.4826


@dataclass(frozen=True)
class Place:
    """One submission on one network with one number of images."""

    network: str
    place: int
    path: str
    precision: str
    #: Sums over the layers: of medians, fastest and slowest runs.
    seconds: float
    fastest: float
    slowest: float
    #: How far below the class's median the time lies, in standard deviations as the median absolute deviation gives
    #: them; and their place on the range given, ends clamped.
    deviations: float
    points: float


def name_of(network: Mapping[str, Any]) -> str:
    """What is ranked together: a network of a record, with its number of images."""
    return f"{network['network']}, {network['images']} images"


def rank(records: Sequence[dict[str, Any]], rules: RankingSpec) -> list[Place]:
    """The places on each network, number of images and class of precision, the fastest first."""
    by_network: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        path, precision = record["path"], record["precision"]
        for network in _timed([record]) if record["status"] == "passed" else []:
            together = rules.mix_precisions or precision.startswith("float32")
            name = name_of(network) + ("" if together else f", {precision}")
            ends = {end: sum(one["seconds"][end] for one in network["layers"]) for end in ("fastest", "slowest")}
            one = {"path": path, "precision": precision, "seconds": network["seconds"], **ends}
            by_network.setdefault(name, []).append(one)
    # What is wrong has no place, and one submission alone has none.
    return [place for one in by_network.items() if len(one[1]) > 1 for place in _one_network(*one, rules)]


def _timed(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The networks that passed and were timed."""
    networks = [one for record in records for one in record["networks"]]
    return [one for one in networks if one["status"] == "passed" and "seconds" in one]


def _one_network(name: str, entries: list[dict[str, Any]], rules: RankingSpec) -> list[Place]:
    entries.sort(key=lambda entry: entry["seconds"])
    seconds = [entry["seconds"] for entry in entries]
    median = statistics.median(seconds)
    deviation = _MAD_TO_DEVIATION * statistics.median(abs(value - median) for value in seconds)
    places: list[Place] = []
    first_slowest, place = -1.0, 0
    for number, one in enumerate(entries, 1):
        # Overlapping intervals tie, but with the first of a place alone: a chain of neighbours is not all equal.
        if one["fastest"] > first_slowest:
            first_slowest, place = one["slowest"], number
        ahead = (median - one["seconds"]) / deviation if deviation > 0 else 0.0
        share = min(max(ahead / rules.clamp, -1), 1) / 2 + 0.5 if rules.clamp else float(ahead >= 0)
        points = rules.worst + (rules.best - rules.worst) * share
        places.append(Place(name, place, **one, deviations=ahead, points=points))
    return places


#: Status to its meaning, and what the author does next.
MEANINGS = {
    "passed": ("Every output of every run was right.", ""),
    "wrong": (
        "It ran, and its output is not the convolution.",
        "Compute the worst element by hand for small sizes, and compare each product.",
    ),
    "compile_error": ("It does not compile.", "Correct the first error above; later ones often follow from it."),
    "crashed": (
        "It ended before its work was done.",
        "Check array bounds and CUDA's return codes; run it under compute-sanitizer or -fsanitize=address.",
    ),
    "timed_out": ("It took longer than its limit.", "Look for a loop that does not end, or one over all images."),
    "out_of_bounds": (
        "It touched memory outside the arrays that it was given.",
        "Compare each loop's end with H - K + 1 and W - K + 1, and guard the threads beyond them.",
    ),
    "unstable": (
        "Some runs were right and others were not.",
        "Look for a missing __syncthreads(), a data race, or memory that is read before it is written.",
    ),
    "tampered": ("It did what no convolution needs: see the reason.", "Write to y only, within forward."),
    "unsupported": ("It cannot be graded here: see the reason.", ""),
}


def problem(folder: Path | None) -> str | None:
    """Why reports could not be written into that folder; None where they could."""
    if folder is not None:
        _templates()
    return output_folder_problem(folder)


def write_all(folder: Path, records: Sequence[dict[str, Any]], rules: RankingSpec) -> None:
    """Write every report into the folder: a page and a results.json per submission, and the class's."""
    places = rank(records, rules)
    pages = {}
    for record in records:
        # The same submission gets the same name in a later run, whoever came or went.
        mark = hashlib.blake2b(record["path"].encode(errors="surrogateescape"), digest_size=4).hexdigest()
        name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', record['path']).strip('-.')[-80:]}-{mark}"
        pages[record["path"]] = f"students/{name}.html"
        shown = student(record, records)
        _put(folder / "students" / f"{name}.html", render("student.html", shown))
        _put(folder / "students" / name / "results.json", json.dumps(gradescope(record), indent=1))
    _put(folder / "leaderboard.csv", _csv([one.name for one in fields(Place)], [asdict(place) for place in places]))
    _put(folder / "leaderboard.html", render("leaderboard.html", leaderboard(places, records, pages, rules)))


def render(template: str, shown: Mapping[str, Any]) -> str:
    return str(_templates().get_template(f"{template}.j2").render(shown))


@cache
def _templates() -> Any:
    try:
        environment = templates.environment(Path(__file__).parent)
    except ImportError as error:
        raise SpecError(f"--reports: expected Jinja2, got {error}; {command('report')}") from None
    environment.filters.update(ms=_ms, share=_share)
    return environment


def student(record: Mapping[str, Any], records: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """What a student's report shows; ``records`` are the class's, whose times are compared."""
    meaning, next_step = MEANINGS[record["status"]]
    networks = record["networks"]
    if record["status"] == "passed" and any(one["status"] != "passed" for one in networks):
        meaning = "It is right on the required networks; the others are below."
    shown = [_network(one, records) for one in networks]
    explained = [layer["explanation"] for one in networks for layer in one["layers"] if layer.get("explanation")]
    return {
        **{key: record[key] for key in ("path", "status", "reason", "precision")},
        **{"meaning": meaning, "next_step": next_step, "networks": shown},
        "explained": explained[0] if explained and record["status"] != "passed" else None,
        "bars": any(layer["bar"] for one in shown for layer in one["layers"]),
        "compiler": ptxas.lines([KernelNotes(**note) for note in record.get("compiler", [])]),
        "printed": record.get("printed", "")[:2000],
    }


def _network(network: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A network of a record, with its layers as the templates show them."""
    others = [one for one in _timed(records) if name_of(one) == name_of(network)]
    term = TERMS.get(network["network"], network["network"])
    best = min((one["seconds"] for one in others), default=0.0)
    shown = dict(network, name=term, layers=[], best_seconds=best)
    for number, layer in enumerate(network["layers"]):
        channels, height, width, filters, kernel = layer["layer"]
        size = f"{channels} x {height} x {width}, {filters} filters of {kernel} x {kernel}"
        name = f"{term}, layer {number + 1}: {size}"
        medians = [one["layers"][number]["seconds"]["median"] for one in others]
        shown["layers"].append(dict(layer, name=name, times=_times(layer), bar=_bar(layer, medians)))
    return shown


def _times(layer: Mapping[str, Any]) -> str:
    if "seconds" not in layer:
        return ""
    seconds = layer["seconds"]
    text = f"{_ms(seconds['median'])} ms ({seconds['count']} runs, {_ms(seconds['fastest'])} to "
    return f"{text}{_ms(seconds['slowest'])}; first call {_ms(layer['first_call_seconds'])})"


def _bar(layer: Mapping[str, Any], medians: Sequence[float]) -> dict[str, Any]:
    """A layer's time, the class's quartiles and the roofline, in percent of the bar's width."""
    if "seconds" not in layer:
        return {}
    low, _, high = statistics.quantiles(medians, n=4, method="inclusive") if len(medians) > 1 else (0.0, 0.0, 0.0)
    own, roofline = layer["seconds"]["median"], layer.get("roofline_seconds") or 0.0
    full = max(own, high, roofline)
    left = _share(low, full)
    quartiles = (left, max(1.0, _share(high, full) - left)) if high else ()
    return {"time": _share(own, full), "quartiles": quartiles, "roofline": _share(roofline, full) if roofline else 0}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _share(part: float, full: float) -> float:
    return round(100 * min(1.0, part / full), 1) if full > 0 else 0.0


def gradescope(record: Mapping[str, Any]) -> dict[str, Any]:
    """Gradescope's results.json for one submission: its points, and its times for the leaderboard."""
    passed, networks = record["status"] == "passed", record["networks"]
    # The decisive network is tried again with more images for its times alone.
    names = [network["network"] for network in networks]
    counted = [network for at, network in enumerate(networks) if network["network"] not in names[:at]]
    # Where its constants point to a network, it has all points if it passed; else each network has a share.
    shared = not record.get("pointed") and len(counted) > 1
    tests: list[dict[str, Any]] = []
    for network in counted if shared else networks:
        # The text names the networks that a submission that passed need not do.
        if shared or not passed or network["status"] == "passed":
            right = network["status"] == "passed"
            text = "\n".join(filter(None, (layer["reason"] for layer in network["layers"]))) or network["status"]
            tests.append({"name": name_of(network), "status": "passed" if right else "failed", "output": text})
            if shared:
                most = round(100 / len(counted), 2)
                tests[-1].update(max_score=most, score=most if right and passed else 0.0)
    shown = student(record)
    advice = f"Next step: {shown['next_step']}" if shown["next_step"] else ""
    layers = [layer for one in shown["networks"] for layer in one["layers"]]
    times = [f"{layer['name']}: {layer['times']}" for layer in layers if layer["times"]]
    said = (shown["meaning"], shown["reason"], advice, "\n".join(times), "\n".join(shown["compiler"]))
    points = round(sum(test["score"] for test in tests)) if shared else 100
    return {
        "score": float(points) if passed else 0.0,
        "output": "\n\n".join(filter(None, said)),
        "output_format": "text",
        "execution_time": record.get("seconds_in_all", 0.0),
        "tests": tests,
        "leaderboard": [
            {"name": f"{name_of(one)} (ms)", "value": round(1e3 * one["seconds"], 4), "order": "asc"}
            for one in (_timed([record]) if passed else [])
        ],
    }


def _csv(columns: list[str], rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        # A spreadsheet takes a cell that begins so for a formula.
        path = row["path"]
        writer.writerow({**row, "path": f"'{path}" if path[:1] in "=+-@\t\r" else path})
    return text.getvalue()


def leaderboard(
    places: Sequence[Place], records: Sequence[Mapping[str, Any]], pages: Mapping[str, str], rules: RankingSpec
) -> dict[str, Any]:
    """What the class's page shows: places, bars of their times, and everyone with a link to their page."""
    counts = {status: sum(record["status"] == status for record in records) for status in MEANINGS}
    networks = []
    for name in dict.fromkeys(place.network for place in places):
        own = [place for place in places if place.network == name]
        tried = [one for record in records for one in record["networks"] if name.startswith(name_of(one))]
        rooflines = [one["roofline_seconds"] for one in tried if one.get("roofline_seconds")]
        slowest = max(place.seconds for place in own)
        networks.append({"name": name, "places": own, "slowest": slowest, "roofline": min(rooflines, default=0)})
    folders = {str(Path(record["path"]).parent) for record in records}
    return {
        "top": f"{folders.pop()}/" if len(folders) == 1 else "",
        "counts": ", ".join(f"{count} {status}" for status, count in counts.items() if count),
        **{"networks": networks, "records": records, "pages": pages, "rules": rules},
    }


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        # A path may hold bytes that are no text.
        file.write(text.encode(errors="backslashreplace"))
