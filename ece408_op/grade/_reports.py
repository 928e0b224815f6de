"""What a grader's other tools read: JUnit XML, Gradescope's results.json, the leaderboard as CSV and as a page."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ece408_op.data.atomic import replacing

from . import _plot, _student
from ._ranking import Place, name_of, rank
from ._spec import RankingSpec

#: What XML 1.0 cannot hold, even escaped.
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_all(folder: Path, records: Sequence[dict[str, Any]], rules: RankingSpec) -> None:
    """Write every report into the folder: a page, a text and a results.json for each submission, and the class's."""
    places = rank(records, rules)
    best = {place.network: place.seconds for place in reversed(places) if place.place == 1}
    for record in records:
        # The same submission gets the same name in a later run, whoever came or went.
        mark = hashlib.blake2b(record["path"].encode(errors="surrogateescape"), digest_size=4).hexdigest()
        name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', record['path']).strip('-.')[-80:]}-{mark}"
        _put(folder / "students" / f"{name}.txt", _student.text(record, best))
        _put(folder / "students" / f"{name}.html", _student.page(record, best))
        _put(folder / "students" / name / "results.json", json.dumps(gradescope(record, places), indent=1))
    _put(folder / "junit.xml", junit(records))
    _put(folder / "leaderboard.csv", leaderboard_csv(places))
    _put(folder / "duplicates.csv", duplicates_csv(records))
    _put(folder / "leaderboard.html", leaderboard_page(places, records))


def junit(records: Sequence[Mapping[str, Any]]) -> str:
    """JUnit's XML, a test case for each submission."""
    failed = sum(record["status"] not in ("passed", "unsupported") for record in records)
    skipped = sum(record["status"] == "unsupported" for record in records)
    counts = {"tests": str(len(records)), "failures": str(failed), "skipped": str(skipped)}
    suite = ElementTree.Element("testsuite", {"name": "ece408-grade", **counts})
    for record in records:
        took = {"time": f"{record.get('seconds_in_all', 0.0):.3f}"}
        name = _NOT_XML.sub("?", record["path"])
        case = ElementTree.SubElement(suite, "testcase", {"classname": "submission", "name": name, **took})
        if record["status"] != "passed":
            kind = "skipped" if record["status"] == "unsupported" else "failure"
            reason = _NOT_XML.sub("?", record["reason"])
            mark = ElementTree.SubElement(case, kind, {"message": f"{record['status']}: {reason.splitlines()[0]}"})
            mark.text = reason
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def gradescope(record: Mapping[str, Any], places: Sequence[Place]) -> dict[str, Any]:
    """Gradescope's results.json for one submission: full points where it passed, and its leaderboard."""
    passed = record["status"] == "passed"
    tests = [
        {
            "name": name_of(network),
            "status": "passed" if network["status"] == "passed" else "failed",
            "output": "\n".join(filter(None, (layer["reason"] for layer in network["layers"]))) or network["status"],
        }
        for network in record.get("networks", [])
        # What a submission that passed need not do is told in the text.
        if not passed or network["status"] == "passed"
    ]
    own = [place for place in places if place.path == record["path"]]
    return {
        "score": 100.0 if passed else 0.0,
        "output": _student.text(record),
        "output_format": "text",
        "execution_time": record.get("seconds_in_all", 0.0),
        "tests": tests,
        "leaderboard": [
            {"name": f"{place.network} (ms)", "value": round(1e3 * place.seconds, 4), "order": "asc"} for place in own
        ],
    }


def leaderboard_csv(places: Sequence[Place]) -> str:
    """One line for each place."""
    return _csv([one.name for one in fields(Place)], [asdict(place) for place in places])


def duplicates_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Submissions with the same code, a line each, numbered by code; for the instructor, in no student's report."""
    codes = list(dict.fromkeys(_code(record) for record in records if record["duplicates"]))
    rows = [
        {"code": number, "path": record["path"]}
        for number, code in enumerate(codes, 1)
        for record in records
        if _code(record) == code
    ]
    return _csv(["code", "path"], rows)


def _code(record: Mapping[str, Any]) -> tuple[str, str]:
    return record["context"], record["fingerprint"]


def _csv(columns: list[str], rows: Sequence[dict[str, Any]]) -> str:
    held = io.StringIO()
    writer = csv.DictWriter(held, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        # A spreadsheet takes a cell that begins so for a formula.
        path = row["path"]
        writer.writerow({**row, "path": f"'{path}" if path[:1] in "=+-@\t\r" else path})
    return held.getvalue()


def leaderboard_page(places: Sequence[Place], records: Sequence[Mapping[str, Any]]) -> str:
    """The places and a plot of the class on one HTML page that needs nothing beside it."""
    counts = {status: sum(record["status"] == status for record in records) for status in _student.MEANINGS}
    parts = ['<!doctype html><meta charset="utf-8"><title>Leaderboard</title>', "<h1>Leaderboard</h1>"]
    parts.append(f"<p>{escape(', '.join(f'{count} {status}' for status, count in counts.items() if count))}</p>")
    ranked = {place.path for place in places}
    disturbed = sum(record["path"] in ranked and _disturbed(record) for record in records)
    if disturbed:
        parts.append(
            f"<p>Other programs disturbed timed runs of {disturbed} of the {len(ranked)} ranked here: with fewer at a "
            "time (--jobs 1) the times are steadier.</p>"
        )
    for network in dict.fromkeys(place.network for place in places):
        own = [place for place in places if place.network == network]
        picture = _plot.svg(own, _floor(network, records)) or "<p>The plot needs matplotlib: the extra report.</p>"
        parts += [f"<h2>{escape(network)}</h2>", picture, "<table border='1'><tr><th>place</th><th>submission</th>"]
        parts.append("<th>precision</th><th>ms</th><th>fastest to slowest</th><th>points</th><th>robust</th></tr>")
        for place in own:
            cells = (
                *(place.place, place.path, place.precision, f"{1e3 * place.seconds:.3f}"),
                f"{1e3 * place.fastest:.3f} to {1e3 * place.slowest:.3f}",
                *(f"{place.points:.1f}", f"{place.robust_points:.1f}"),
            )
            parts.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
        parts.append("</table>")
    return "\n".join(parts) + "\n"


def _disturbed(record: Mapping[str, Any]) -> bool:
    layers = [layer for network in record.get("networks", []) for layer in network["layers"]]
    return record.get("context") != "gpu" and any(run.get("disturbed") for layer in layers for run in layer["runs"])


def _floor(name: str, records: Sequence[Mapping[str, Any]]) -> float | None:
    """The least seconds that a ranked network could take, where a record says it."""
    networks = [network for record in records for network in record.get("networks", []) if name_of(network) == name]
    return next((network["roofline_seconds"] for network in networks if network.get("roofline_seconds")), None)


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        # A path may hold bytes that are no text.
        file.write(text.encode(errors="backslashreplace"))
