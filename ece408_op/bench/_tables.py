"""Results as a Markdown table for a terminal."""

from __future__ import annotations

from .results import PASSED, Case, Results, Row, mean_and_least


def table(results: Results) -> str:
    """A row for each contestant on each case, then the geometric mean and the least of each ratio, then what failed.

    For each kind of call: the median and the quartiles in milliseconds, and how many times as fast as each peer's
    fastest variant. Then the time over the roofline of the units used, the rate and the share of the error allowed.
    """
    every = [(case, row) for case in results.cases for row in case.rows]
    calls = list(dict.fromkeys(row.call for _, row in every))
    ratios = [
        (call, family)
        for call in calls
        for family in dict.fromkeys(
            row.contestant.split()[0].rstrip(",") for _, row in every if row.peer and row.call == call
        )
        if any(row.call == call and not row.peer for _, row in every)
    ]
    details = [key for key in dict.fromkeys(key for _, row in every for key in row.details) if key != "launches"]
    layers = any(case.problem and case.roofline_seconds for case in results.cases)
    head = ["case", "images", "contestant"]
    head += [word for call in calls for word in (f"{call}, ms", "quartiles")]
    head += [f"x {family}, {call}" for call, family in ratios]
    head += ["x roofline", "GFLOP/s", "error, of bound"] * layers + [key.replace("_", " ") for key in details]
    lines = [head, ["---"] * len(head)]
    sums: dict[tuple[str, str, str], list[float | None]] = {}
    for case in results.cases:
        for name in dict.fromkeys(row.contestant for row in case.rows):
            own = {row.call: row for row in case.rows if row.contestant == name}
            last = list(own.values())[-1]
            cells = [
                case.name,
                str(case.images),
                f"{name} ({last.kernel})" if last.impl == "auto" and last.kernel else name,
            ]
            cells += [word for call in calls for word in _times(own.get(call))]
            for call, family in ratios:
                row = own.get(call)
                ratio = None if row is None or row.peer else case.ratio(row, family)
                cells.append("" if ratio is None else f"{ratio:.2f}")
                if row is not None and not row.peer:
                    sums.setdefault((name, call, family), []).append(ratio)
            cells += _rates(case, last) * layers
            cells += [_detail(own, key) for key in details]
            lines.append(cells)
    for word, which in (("geometric mean", 0), ("least", 1)) if len(results.cases) > 1 else ():
        for name in dict.fromkeys(name for name, _, _ in sums):
            found = [mean_and_least(sums.get((name, call, family), [None])) for call, family in ratios]
            if any(found):
                cells = ["" if one is None else f"{one[which]:.2f}" for one in found]
                lines.append([word, "", name, *[""] * (2 * len(calls)), *cells])
                lines[-1] += [""] * (len(head) - len(lines[-1]))
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    reasons = [f"{case.name}, {row.contestant}: {row.status}: {row.reason}" for case, row in every if row.reason]
    return "\n".join([text, *([""] if reasons else []), *reasons])


def _times(row: Row | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    if row.status != PASSED or row.median is None:
        return row.status, ""
    low, high = row.quartiles
    return number(1e3 * row.median), f"{number(1e3 * low)} to {number(1e3 * high)}"


def _rates(case: Case, row: Row) -> list[str]:
    """The time over the roofline, the rate, and the error as a share of its bound."""
    error = "" if row.error is None or not row.bound else f"{row.error / row.bound:.2g}"
    if row.median is None or case.problem is None:
        return ["", "", error]
    roofline = row.roofline_seconds or case.roofline_seconds
    share = f"{row.median / roofline:.2f}" if roofline else ""
    return [share, number(case.problem.flops / row.median / 1e9), error]


def _detail(rows: dict[str, Row], key: str) -> str:
    value = next((row.details[key] for row in rows.values() if key in row.details), "")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def number(value: float) -> str:
    """Four significant digits, and no exponent."""
    return f"{value:.4g}" if value < 9999.5 else f"{value:.0f}"
