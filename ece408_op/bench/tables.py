"""Results as a table: rows of words, and Markdown for a terminal."""

from __future__ import annotations

from .results import Case, Results, Row, mean_and_least

#: A column: its group, the kind of call, and its title. The groups stand in this order.
Column = tuple[int, str, str]
_CASE, _TIMES, _RATIOS, _ROOFLINE, _ERROR, _DETAILS = range(6)


def table(results: Results) -> str:
    """Return the rows as Markdown, followed by all reasons."""
    head, *others = rows(results)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *others)]
    why = reasons(results)
    return "\n".join([*lines, *[""] * bool(why), *why])


def reasons(results: Results) -> list[str]:
    """Return a line with the reason of each row without a time."""
    every = [(case, row) for case in results.cases for row in case.rows]
    return [f"{case.name}, {row.contestant}: {row.status}: {row.reason}" for case, row in every if row.reason]


def rows(results: Results) -> list[list[str]]:
    """Return the head, a row per contestant and case, then the geometric mean and the least of each ratio.

    A row has, for each kind of call, the median and the quartiles in milliseconds, and the speed-up over each peer's
    fastest variant. Then come the time divided by the roofline of the units used, the rate, the error as a share of its
    bound, and the subcommand's own details.
    """
    lines: list[dict[Column, str]] = []
    ratios: dict[str, dict[Column, list[float | None]]] = {}
    for case in results.cases:
        families = dict.fromkeys(row.contestant.split()[0].rstrip(",") for row in case.rows if row.peer)
        for name in dict.fromkeys(row.contestant for row in case.rows):
            mine = [row for row in case.rows if row.contestant == name]
            lines.append(_line(case, mine))
            for family, row in ((family, row) for family in families for row in mine if not row.peer):
                column, ratio = (_RATIOS, row.call, f"x {family}, {row.call}"), case.ratio(row, family)
                ratios.setdefault(name, {}).setdefault(column, []).append(ratio)
                if ratio is not None:
                    lines[-1][column] = f"{ratio:.2f}"
    for which, word in enumerate(("geometric mean", "least")) if len(results.cases) > 1 else ():
        for name, columns in ratios.items():
            sums = {c: mean_and_least(each) for c, each in columns.items() if len(each) == len(results.cases)}
            known = {column: f"{each[which]:.2f}" for column, each in sums.items() if each}
            if known:
                lines.append({(_CASE, "", "case"): word, (_CASE, "", "contestant"): name, **known})
    head = sorted(dict.fromkeys(column for line in lines for column in line), key=lambda column: column[0])
    return [[title for _, _, title in head], *([line.get(column, "") for column in head] for line in lines)]


def _line(case: Case, mine: list[Row]) -> dict[Column, str]:
    """Return the cells of a contestant's rows on a case, except the ratios."""
    last = mine[-1]
    shown = f"{last.contestant} ({last.kernel})" if last.impl == "auto" and last.kernel else last.contestant
    titles = {"case": case.name, "images": str(case.images), "contestant": shown}
    line = {(_CASE, "", title): word for title, word in titles.items()}
    for row in mine:
        quartiles = " to ".join(number(1e3 * value) for value in row.quartiles) if row.seconds else ""
        line[_TIMES, row.call, f"{row.call}, ms"] = number(1e3 * row.median) if row.median else row.status
        line[_TIMES, row.call, "quartiles"] = quartiles
        for key, value in row.details.items():
            if key != "launches":
                title = key.replace("_", " ")
                line.setdefault((_DETAILS, "", title), f"{value:.4g}" if isinstance(value, float) else str(value))
    roofline = last.roofline_seconds or case.roofline_seconds
    if roofline and case.problem:
        time = last.median
        line[_ROOFLINE, "", "x roofline"] = f"{time / roofline:.2f}" if time else ""
        line[_ROOFLINE, "", "GFLOP/s"] = number(case.problem.flops / time / 1e9) if time else ""
    if roofline or last.bound:
        error = "" if last.error is None or not last.bound else f"{last.error / last.bound:.2g}"
        line[_ERROR, "", "error, of bound"] = error
    return line


def number(value: float) -> str:
    """Return the number with four significant digits, and no exponent."""
    return f"{value:.4g}" if value < 9999.5 else f"{value:.0f}"
