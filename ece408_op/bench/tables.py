"""Results as a table: rows of words, and Markdown for a terminal."""

from __future__ import annotations

from .results import Case, Results, Row, mean_and_least


def table(results: Results) -> str:
    """The rows as Markdown, then all reasons."""
    head, *others = rows(results)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *others)]
    why = reasons(results)
    return "\n".join([*lines, *[""] * bool(why), *why])


def reasons(results: Results) -> list[str]:
    """A line for each row without a time."""
    every = [(case, row) for case in results.cases for row in case.rows]
    return [f"{case.name}, {row.contestant}: {row.status}: {row.reason}" for case, row in every if row.reason]


def rows(results: Results) -> list[list[str]]:
    """The head, a row for each contestant on each case, then the geometric mean and the least of each ratio.

    For each kind of call: the median and the quartiles in milliseconds, and how many times as fast as each peer's
    fastest variant. Then the time over the roofline of the units used, the rate, the error as a share of its bound, and
    the subcommand's own details.
    """
    every = [(case, row) for case in results.cases for row in case.rows]
    calls = list(dict.fromkeys(row.call for _, row in every))
    own = {row.call for _, row in every if not row.peer}
    ratios = list(dict.fromkeys((row.call, _family(row)) for _, row in every if row.peer and row.call in own))
    details = [key for key in dict.fromkeys(key for _, row in every for key in row.details) if key != "launches"]
    layers = any(case.roofline_seconds for case in results.cases)
    checked = layers or any(row.bound for _, row in every)
    head = ["case", "images", "contestant", *(word for call in calls for word in (f"{call}, ms", "quartiles"))]
    head += [f"x {family}, {call}" for call, family in ratios]
    head += ["x roofline", "GFLOP/s"] * layers + ["error, of bound"] * checked
    head += [key.replace("_", " ") for key in details]
    lines = [head]
    found: dict[str, list[list[float | None]]] = {}
    for case in results.cases:
        for name in dict.fromkeys(row.contestant for row in case.rows):
            of_call = {row.call: row for row in case.rows if row.contestant == name}
            last = list(of_call.values())[-1]
            theirs = [_ratio(case, of_call.get(call), family) for call, family in ratios]
            cells = [
                case.name,
                str(case.images),
                f"{name} ({last.kernel})" if last.impl == "auto" and last.kernel else name,
            ]
            cells += [word for call in calls for word in _times(of_call.get(call))]
            cells += ["" if ratio is None else f"{ratio:.2f}" for ratio in theirs]
            cells += _rates(case, last) * layers + [_error(last)] * checked
            lines.append([*cells, *(_detail(of_call, key) for key in details)])
            found.setdefault(name, []).append(theirs)
    for which, word in enumerate(("geometric mean", "least")) if len(results.cases) > 1 else ():
        for name, several in found.items():
            sums = [mean_and_least(column) for column in zip(*several)] if len(several) == len(results.cases) else []
            if any(sums):
                cells = [
                    word,
                    "",
                    name,
                    *[""] * (2 * len(calls)),
                    *("" if s is None else f"{s[which]:.2f}" for s in sums),
                ]
                lines.append([*cells, *[""] * (len(head) - len(cells))])
    return lines


def _family(row: Row) -> str:
    """The library of a peer: "MXNet" of "MXNet, NONE"."""
    return row.contestant.split()[0].rstrip(",")


def _ratio(case: Case, row: Row | None, family: str) -> float | None:
    return None if row is None or row.peer else case.ratio(row, family)


def _times(row: Row | None) -> tuple[str, str]:
    if row is None or row.median is None:
        return "" if row is None else row.status, ""
    return number(1e3 * row.median), " to ".join(number(1e3 * value) for value in row.quartiles)


def _rates(case: Case, row: Row) -> list[str]:
    """The time over the roofline, and the rate."""
    roofline = row.roofline_seconds or case.roofline_seconds
    if row.median is None or case.problem is None or not roofline:
        return ["", ""]
    return [f"{row.median / roofline:.2f}", number(case.problem.flops / row.median / 1e9)]


def _error(row: Row) -> str:
    return "" if row.error is None or not row.bound else f"{row.error / row.bound:.2g}"


def _detail(rows: dict[str, Row], key: str) -> str:
    value = next((row.details[key] for row in rows.values() if key in row.details), "")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def number(value: float) -> str:
    """Four significant digits, and no exponent."""
    return f"{value:.4g}" if value < 9999.5 else f"{value:.0f}"
