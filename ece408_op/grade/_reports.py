"""The reports on a class: the ranking, pages by Jinja2's templates, Gradescope's results.json, CSV."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ece408_op.data.atomic import output_folder_problem, write_text
from ece408_op.problem import TERMS, layer_name
from ece408_op.runtime import ptxas, templates
from ece408_op.runtime.occupancy import KernelNotes

from ._spec import RankingSpec

Data = Mapping[str, Any]
#: A row of the ranking: a submission on one network with one number of images. Its seconds are sums over the layers: of
#: medians, fastest and slowest runs. The deviations say how far the time is below the class's median, in standard
#: deviations as the median absolute deviation gives them; the points are their place on the range given, ends clamped.
COLUMNS = ("network", "place", "path", "precision", "seconds", "fastest", "slowest", "deviations", "points")
_MAD_TO_DEVIATION = 1.4826  # the median absolute deviation of normal data, times this, is its standard deviation


def name_of(network: Data) -> str:
    """The name of a ranking: a network of a record, with its number of images."""
    return f"{network['network']}, {network['images']} images"


def rank(records: Sequence[Data], rules: RankingSpec) -> dict[str, list[dict[str, Any]]]:
    """The COLUMNS of all places by network, images and precision, the fastest first; who is wrong or alone has none."""
    ranking: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        for network in timed(record):
            together = rules.mix_precisions or record["precision"].startswith("float32")
            name = name_of(network) + ("" if together else f", {record['precision']}")
            ends = {end: sum(layer["seconds"][end] for layer in network["layers"]) for end in ("fastest", "slowest")}
            own = {"network": name, "seconds": network["seconds"], "roofline": network.get("roofline_seconds"), **ends}
            ranking.setdefault(name, []).append({**own, "path": record["path"], "precision": record["precision"]})
    ranking = {name: sorted(group, key=lambda one: one["seconds"]) for name, group in ranking.items() if len(group) > 1}
    for group in ranking.values():
        median = statistics.median(one["seconds"] for one in group)
        deviation = _MAD_TO_DEVIATION * statistics.median(abs(one["seconds"] - median) for one in group)
        first_slowest, place = -1.0, 0
        for number, one in enumerate(group, 1):
            # Overlapping intervals tie, but with the first of a place alone: a chain of neighbours is not all equal.
            if one["fastest"] > first_slowest:
                first_slowest, place = one["slowest"], number
            ahead = (median - one["seconds"]) / deviation if deviation > 0 else 0.0
            share = min(max(ahead / rules.clamp, -1), 1) / 2 + 0.5 if rules.clamp else float(ahead >= 0)
            one.update(place=place, deviations=ahead, points=rules.worst + (rules.best - rules.worst) * share)
    return ranking


def timed(record: Data) -> list[Data]:
    """The networks of a submission that passed which were timed."""
    return [one for one in record["networks"] if record["status"] == "passed" and "seconds" in one]


#: What each status means, and what the author of such a submission does next.
MEANINGS = {
    "passed": "Every output of every run was right.",
    "wrong": "It ran, and its output is not the convolution.",
    "compile_error": "It does not compile.",
    "crashed": "It ended before its work was done.",
    "timed_out": "It took longer than its limit.",
    "out_of_bounds": "It touched memory outside the arrays that it was given.",
    "unstable": "Some runs were right and others were not.",
    "tampered": "It did what no convolution needs: see the reason.",
    "unsupported": "It cannot be graded here: see the reason.",
}
_NEXT_STEPS = {
    "wrong": "Compute the worst element by hand for small sizes, and compare each product.",
    "compile_error": "Correct the first error above; later ones often follow from it.",
    "crashed": "Check array bounds and CUDA's return codes; run it under compute-sanitizer or -fsanitize=address.",
    "timed_out": "Look for a loop that does not end, or one over all images.",
    "out_of_bounds": "Compare each loop's end with H - K + 1 and W - K + 1, and guard the threads beyond them.",
    "unstable": "Look for a missing __syncthreads(), a data race, or memory that is read before it is written.",
    "tampered": "Write to y only, within forward.",
}


def problem(folder: Path | None) -> str | None:
    """Return why no reports can be written into that folder; None if they can. Raises DeviceError without Jinja2."""
    if folder is None:
        return None
    templates.environment(Path(__file__).parent)
    return output_folder_problem(folder) or output_folder_problem(folder / "students")


def write_all(folder: Path, records: Sequence[Data], rules: RankingSpec) -> None:
    """Write every report into the folder: a page and a results.json per submission, and the class's."""
    pages = {}
    for record in records:
        # The same submission gets the same name in a later run, whoever came or went.
        mark = hashlib.blake2b(record["path"].encode(), digest_size=4).hexdigest()
        name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', record['path']).strip('-.')[-80:]}-{mark}"
        pages[record["path"]] = f"students/{name}.html"
        shown = student(record, records)
        write_text(folder / "students" / f"{name}.html", render("student.html", shown))
        write_text(folder / "students" / name / "results.json", json.dumps(gradescope(record, shown), indent=1))
    ranking = rank(records, rules)
    write_text(folder / "leaderboard.csv", _csv(ranking))
    counts = Counter(record["status"] for record in records)
    folders = {str(Path(record["path"]).parent) for record in records}
    board = {
        "top": f"{folders.pop()}/" if len(folders) == 1 else "",
        "counts": ", ".join(f"{counts[status]} {status}" for status in MEANINGS if counts[status]),
        **{"ranking": ranking, "records": records, "pages": pages, "rules": rules},
    }
    write_text(folder / "leaderboard.html", render("leaderboard.html", board))


def render(template: str, shown: Data) -> str:
    return templates.render(Path(__file__).with_name(f"{template}.j2"), shown, ms=_ms, share=_share)


def student(record: Data, records: Sequence[Data] = ()) -> dict[str, Any]:
    """Return the data of a student's report; ``records`` are the class's, whose times are compared."""
    meaning, passed, networks = MEANINGS[record["status"]], record["status"] == "passed", record["networks"]
    if passed and any(one["status"] != "passed" for one in networks):
        meaning = "It is right on the required networks; the others are below."
    explained = [layer["explanation"] for one in networks for layer in one["layers"] if layer.get("explanation")]
    return {
        **record,
        "meaning": meaning,
        "next_step": _NEXT_STEPS.get(record["status"], ""),
        "networks": [_network(one, records) for one in networks],
        "explained": explained[0] if explained and not passed else None,
        "compiler": ptxas.lines([KernelNotes(**note) for note in record["compiler"]]),
    }


def _network(network: Data, records: Sequence[Data]) -> dict[str, Any]:
    """A network of a record, with its layers as the templates show them."""
    others = [one for record in records for one in timed(record) if name_of(one) == name_of(network)]
    term = TERMS.get(network["network"], network["network"])
    best = min((one["seconds"] for one in others), default=0.0)
    shown = dict(network, name=term, layers=[], best_seconds=best)
    for number, layer in enumerate(network["layers"]):
        name = f"{term}, layer {number + 1}: {layer_name(layer['layer'])}"
        medians = [one["layers"][number]["seconds"]["median"] for one in others]
        quartiles = statistics.quantiles(medians, n=4, method="inclusive") if len(medians) > 1 else (0.0, 0.0, 0.0)
        times = ""
        if seconds := layer.get("seconds"):
            runs = f"{seconds['count']} run{'s' if seconds['count'] > 1 else ''}"
            times = f"{_ms(seconds['median'])} ms ({runs}, {_ms(seconds['fastest'])} to "
            times += f"{_ms(seconds['slowest'])}; first call {_ms(layer['first_call_seconds'])})"
        shown["layers"].append(dict(layer, name=name, times=times, quartiles=quartiles))
    return shown


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _share(part: float, full: float) -> float:
    """In percent of a bar's width."""
    return round(100 * min(1.0, part / full), 1) if full > 0 else 0.0


def gradescope(record: Data, shown: Data) -> dict[str, Any]:
    """Gradescope's results.json for one submission: points, and times to compare; ``shown`` is what its page shows."""
    passed, networks = record["status"] == "passed", record["networks"]
    # The decisive network of a submission that passed runs again, with more images, for its times alone.
    names = [network["network"] for network in networks]
    counted = [network for at, network in enumerate(networks) if not passed or network["network"] not in names[:at]]
    # Where its constants point to a network, it has all points if it passed; else each network has a share.
    shared = not record["pointed"] and len(counted) > 1
    tests: list[dict[str, Any]] = []
    for network in counted if shared else networks:
        right = network["status"] == "passed"
        # The text names the networks that a submission that passed need not do.
        if shared or right or not passed:
            text = "\n".join(filter(None, (layer["reason"] for layer in network["layers"]))) or network["status"]
            tests.append({"name": name_of(network), "status": "passed" if right else "failed", "output": text})
        if shared:
            most = round(100 / len(counted), 2)
            tests[-1].update(max_score=most, score=most if right and passed else 0.0)
    advice = f"Next step: {shown['next_step']}" if shown["next_step"] else ""
    layers = [layer for one in shown["networks"] for layer in one["layers"]]
    times = [f"{layer['name']}: {layer['times']}" for layer in layers if layer["times"]]
    said = (shown["meaning"], record["reason"], advice, "\n".join(times), "\n".join(shown["compiler"]))
    points = round(sum(test["score"] for test in tests)) if shared else 100
    board = [(f"{name_of(one)} (ms)", round(1e3 * one["seconds"], 4)) for one in timed(record)]
    return {
        "score": float(points) if passed else 0.0,
        "output": "\n\n".join(filter(None, said)),
        "output_format": "text",
        "execution_time": record["seconds_in_all"],
        "tests": tests,
        "leaderboard": [{"name": name, "value": value, "order": "asc"} for name, value in board],
    }


def _csv(ranking: Mapping[str, Sequence[Data]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for one in (one for group in ranking.values() for one in group):
        # A spreadsheet takes a cell that begins so for a formula.
        path = one["path"]
        writer.writerow({**one, "path": f"'{path}" if path[:1] in "=+-@" else path})
    return text.getvalue()
