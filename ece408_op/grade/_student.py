"""The report that a student gets, from the record alone: as text, and as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from . import _hints
from ._ranking import name_of

#: Status to a sentence.
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


def text(record: Mapping[str, Any], best: Mapping[str, float] | None = None) -> str:
    """The report in plain text; ``best`` has the class's fastest seconds, by ``name_of``."""
    meaning = MEANINGS.get(record["status"], "")
    if record["status"] == "passed" and any(one["status"] != "passed" for one in record.get("networks", [])):
        meaning = "It is right where it has to be; below stands what else was tried."
    lines = [f"{record['path']}: {record['status']}", meaning, "", record["reason"]]
    if record.get("precision"):
        lines.append(f"Precision: {record['precision']}")
    worst = record.get("worst")
    if worst:
        lines += [
            f"Worst element of all runs: y{worst['index']}: got {worst['got']}, expected {worst['expected']} "
            f"({worst['error_of_bound']:.3g} of the error that float32 may make)"
            if isinstance(worst["error_of_bound"], float)
            else f"Worst element of all runs: y{worst['index']}: got {worst['got']}, expected {worst['expected']}",
            f"Wrong elements of that run: {worst['wrong']} of {worst['compared']}",
        ]
    for network in record.get("networks", []):
        lines += ["", f"Network {network['network']}, {network['images']} images: {network['status']}"]
        for layer in network["layers"]:
            lines.append(f"  layer {layer['layer']}: {layer['status']}{_time(layer)}")
        if "seconds" in network:
            lines.append(f"  sum of the layers: {1e3 * network['seconds']:.3f} ms{_behind(network, best)}")
        for one in network.get("accuracy", []):
            lines.append(
                f"  {one['model']}: {100 * one['accuracy']:.2f} % of {one['images']} images right ({one['source']}), "
                f"{100 * one['agreement']:.2f} % labelled as by exact convolutions"
            )
    if record.get("can_do"):
        sizes = (f"{net} {', '.join(map(str, done))}" for net, done in record["can_do"]["images"].items())
        lines += ["", f"Batch sizes tried and done: {'; '.join(sizes)}"]
    if record.get("compiler"):
        lines += ["", "From the compiler:", *(f"  {line}" for line in _hints.lines(record["compiler"]))]
    if record.get("printed"):
        lines += ["", "It printed (the beginning):", record["printed"][:2000]]
    return "\n".join(lines) + "\n"


def page(record: Mapping[str, Any], best: Mapping[str, float] | None = None) -> str:
    """The same as one HTML page."""
    title = escape(f"{record['path']}: {record['status']}")
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title>\n'
        f"<h1>{title}</h1>\n<pre>{escape(text(record, best))}</pre>\n"
    )


def _time(layer: Mapping[str, Any]) -> str:
    if "seconds" not in layer:
        return ""
    seconds = layer["seconds"]
    disturbed = sum(run.get("disturbed", False) for run in layer["runs"])
    return (
        f", {1e3 * seconds['median']:.3f} ms "
        f"(of {seconds['count']} runs, {1e3 * seconds['fastest']:.3f} to {1e3 * seconds['slowest']:.3f}; "
        f"first call {1e3 * layer['first_call_seconds']:.3f}{f'; {disturbed} disturbed' if disturbed else ''})"
    )


def _behind(network: Mapping[str, Any], best: Mapping[str, float] | None) -> str:
    first, floor = (best or {}).get(name_of(network)), network.get("roofline_seconds")
    text = f", {network['seconds'] / first:.2f} times the fastest of the class" if first else ""
    return text + (f", {network['seconds'] / floor:.2f} times the least that this device could take" if floor else "")
