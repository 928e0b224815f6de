"""The result on one screen: at most 40 lines, in the order of what a reader needs first."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ece408_op import problem

from ._check import RIGHT, TIMED_OUT, WRONG

MOST_LINES, WIDTH = 40, 110
#: Lines of a part, at most.
_MOST = {"reason": 12, "printed": 4, "compiler": 6, "findings": 4, "lines": 6}
_BAR = 40
#: A layer's status in words.
_WORDS = {RIGHT: "right", WRONG: "WRONG", TIMED_OUT: "not finished"}


def verdict(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the first verdict: each layer, what is wrong with it and why."""
    where = {"cpu": "on the CPU", "gpu": "on the GPU", "emulator": "emulated on the CPU"}[result["device"]]
    images = f"{result['images']} image{'s' if result['images'] > 1 else ''}"
    term = f"{result['term']}, " if result["term"] else ""
    lines = [f"{result['file']}, {where}, {term}{images}: {result['status'].replace('_', ' ')}"]
    lines += _wrapped(result["reason"], _MOST["reason"]) + _wrapped(result["hint"], 2)
    for entry in result["layers"]:
        lines.append(f"  {layer_name(entry)}: {_WORDS[entry['status']]}")
        lines += _wrapped(entry["note"], 2, 4)
    wrong = [entry for entry in result["layers"] if entry["status"] != RIGHT]
    # A layer of one channel may be 0 for a reason that a layer of several shows.
    zeros = [not one["findings"] and (one["explanation"] or {}).get("mistake") == "zeros" for one in wrong]
    first = zeros.index(False) if False in zeros else 0
    for entry in wrong[first : first + 1]:
        lines += ["", f"{layer_name(entry)}:"] if first else [""]
        lines += [_finding(one) for one in entry["findings"][: _MOST["findings"]]]
        lines += [part for text in entry["text"] for part in _wrapped(text, 3, 0)]
        line = entry["explanation"] and entry["explanation"]["line"]
        line = line or next((one["line"] for one in entry["findings"] if one["line"]), 0)
        lines += _code(result["source"], line)
    if result["printed"]:
        lines += ["It printed:", *_wrapped(result["printed"], _MOST["printed"])]
    return lines


def findings(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of what the emulator found, and of a right result what it counted, with hints."""
    on_gpu = result["device"] == "gpu"
    emulated = [entry for entry in result["layers"] if entry["counters"]]
    found = next((entry for entry in emulated if entry["findings"]), None)
    lines = ["", *_finding_lines(found, result["source"])] if found and on_gpu else []
    if emulated and result["status"] == RIGHT:
        entry = max(emulated, key=lambda one: int(one["counters"]["sectors"]))
        lines += ["", *_counters(entry, result["source"])]
        for hint in entry["hints"]:
            lines += _wrapped(f"line {hint['line']}: {hint['text']} ({hint['section']})", 4, 0)
        lines += _wrapped(result["hint"], 4, 0)
    elif on_gpu and not emulated:
        lines += [text for entry in result["layers"][:1] for text in _wrapped(entry["note"], 3, 0)]
    return lines


def ncu(result: Mapping[str, Any]) -> list[str]:
    """Return what Nsight Compute counted, or why it could not."""
    lines = _wrapped(result["ncu"], 4, 0)
    for entry in result["layers"]:
        if entry["ncu"]:
            lines += [f"Nsight Compute, {layer_name(entry)}, {entry['ncu']['images']} images:", f"  {ncu_words(entry)}"]
    return ["", *lines] if lines else []


def ncu_words(entry: Mapping[str, Any]) -> str:
    """Return a layer's counters of Nsight Compute in words."""
    one = entry["ncu"]
    per_request = one["sectors"] / max(1, one["requests"])
    counted = f"{per_request:.2f} sectors per request, {one['bank_conflicts']:.0f} bank conflicts"
    peaks = f"multiprocessors {one['compute']:.0f} %, memory and caches {one['memory']:.0f} %, DRAM {one['dram']:.0f} %"
    return f"{counted}; of the peak: {peaks}"


def speed(result: Mapping[str, Any]) -> list[str]:
    """Return the lines about speed: the compiler's figures, and times in bars."""
    lines = result["compiler"][: _MOST["compiler"]]
    for entry in result["layers"]:
        if entry["times"]:
            lines = [*lines, "", *_bars(entry)]
    return ["", *lines] if result["compiler"] else lines


def fitted(lines: Sequence[str]) -> list[str]:
    """Return at most a screen of the lines; if some are left out, the last line says how many."""
    if len(lines) <= MOST_LINES:
        return list(lines)
    return [*lines[: MOST_LINES - 1], f"... {len(lines) - MOST_LINES + 1} more lines: --json and --html have all"]


def layer_name(entry: Mapping[str, Any]) -> str:
    """Return the layer's sizes as words."""
    return problem.layer_name(entry["layer"])


def cost(line: Mapping[str, Any]) -> float:
    """Return about how many cycles of the load and store units a line's accesses take."""
    return float(line["sectors"] / 4 + line["wavefronts"] + line["global_requests"])


def source_line(source: str, line: int) -> str:
    """Return the line of that number without its indentation; empty if there is none."""
    lines = source.splitlines()
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def _bars(entry: Mapping[str, Any]) -> Iterator[str]:
    times, roofs = entry["times"], entry["times"]["rooflines"]
    most = max(times["seconds"].values())
    yield f"{layer_name(entry)}, {times['images']} images, milliseconds:"
    rows = [*times["seconds"].items(), *((f"{name} roofline", seconds) for name, seconds in roofs.items())]
    for name, seconds in rows:
        length = max(1, round(_BAR * seconds / most))
        yield f"  {name:24} {1e3 * seconds:10.3f}  {('-' if name.endswith(' roofline') else '#') * length}"


def _counters(entry: Mapping[str, Any], source: str) -> Iterator[str]:
    totals = entry["counters"]
    yield (
        f"{layer_name(entry)}, 1 image: {totals['bytes_per_output']:.1f} bytes of global memory per output, "
        f"{totals['intensity']:.2f} FLOP per byte"
    )
    yield "  line  sectors/request (least)  wavefronts/request (least)  divergent"
    for one in sorted(entry["lines"], key=cost, reverse=True)[: _MOST["lines"]]:
        sectors = _ratio(one["sectors"], one["least_sectors"], one["global_requests"])
        fronts = _ratio(one["wavefronts"], one["least_wavefronts"], one["shared_requests"])
        share = f"{100 * one['divergent'] / one['branches']:.0f} %" if one["branches"] else "-"
        yield f"  {one['line']:4}  {sectors:23}  {fronts:26}  {share:9}  {source_line(source, one['line'])}"[:WIDTH]


def _ratio(number: int, least: int, requests: int) -> str:
    return f"{number / requests:.2f} ({least / requests:.2f})" if requests else "-"


def _finding(one: Mapping[str, Any]) -> str:
    lines = f"lines {one['line']} and {one['other_line']}: " if one["other_line"] else f"line {one['line']}: "
    times = f" ({one['times']} times)" if one["times"] > 1 else ""
    return f"{lines if one['line'] else ''}{one['kind']}: {one['message']}{times}"


def _finding_lines(entry: Mapping[str, Any], source: str) -> Iterator[str]:
    """Yield what the emulator found in a file that a GPU computed, and the first line of it."""
    yield f"emulated on the CPU, {layer_name(entry)}, 1 image:"
    yield from map(_finding, entry["findings"][: _MOST["findings"]])
    yield from _code(source, next((one["line"] for one in entry["findings"] if one["line"]), 0))


def _code(source: str, line: int) -> list[str]:
    text = source_line(source, line)
    return [f"    {line} | {text}"[:WIDTH]] if text else []


def _wrapped(text: str, most: int, indent: int = 2) -> list[str]:
    """Return the text in lines of at most WIDTH characters, the first few of them."""
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, WIDTH - indent) or [""]]
    return [" " * indent + line for line in lines[:most]]
