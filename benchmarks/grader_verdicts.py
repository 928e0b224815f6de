"""Grade the attacks, honest files and odd folders of tests/submissions, and write the table of their verdicts.

    python benchmarks/grader_verdicts.py            # benchmarks/results/grader-verdicts.txt

The script needs no GPU. Exit code 1 if a verdict is not among the expected ones.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import submissions  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "grader-verdicts.txt"


def main() -> int:
    """Write the table."""
    groups = {"attack": submissions.attacks(), "honest file": submissions.honest()}
    expected = {case.name: case.expected for cases in groups.values() for case in cases}
    expected.update({name: right for name, (_, right) in submissions.LAYOUTS.items()})
    with submissions.scratch_folder() as folder:
        paths = {kind: submissions.write(cases, folder / kind) for kind, cases in groups.items()}
        paths["odd folder"] = submissions.write_layouts(folder / "odd folder")
        _, records = submissions.graded([folder / kind for kind in paths], folder, submissions.SPEC, "--context", "cpu")
    lines, surprises = [], 0
    for record in records:
        case = submissions.name_of(record)
        right = submissions.is_right(record, expected[case])
        surprises += not right
        note = "" if right else f"EXPECTED {' or '.join(expected[case])}: "
        kind = next(kind for kind, group in paths.items() if case in group)
        name = case.replace("\n", "\\n")
        lines.append(
            f"{kind:12}{name:44}{submissions.verdict(record):34}{note}{record['reason'].partition(chr(10))[0][:110]}"
        )
    counts = ", ".join(f"{len(group)} {kind}s" for kind, group in paths.items())
    head = f"{counts}; {surprises} verdicts are not as expected.\n"
    head += f"{platform.platform()}, Python {platform.python_version()}\n"
    OUT.write_text(head + "\n" + "\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
    print(head)
    return int(surprises > 0)


if __name__ == "__main__":
    sys.exit(main())
