#!/usr/bin/env python3
"""Write the performance tables of README.md and docs/ from the JSON files in benchmarks/results/.

    python benchmarks/tables.py            rewrite every table that differs
    python benchmarks/tables.py --check    change nothing; exit code 1 if a table differs

A table stands between two comments, which a page may have anywhere:

    <!-- table: layers-h200 -->
    <!-- end of table -->

Every number comes from a file that ece408-bench or ece408_op.bench.sweep wrote, or from experiments.json. A table names
the chip and the versions of its file. To update a table, replace its JSON file and run this command. It needs Python's
standard library alone.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from result_tables import ROOT, TABLES

BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def pages() -> list[Path]:
    """The files that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def updated(text: str) -> str:
    """A page's text with every table written again; raises KeyError with the name of a table that is not known."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        description="Write the tables of README.md and docs/ from benchmarks/results/.",
        epilog="example: python benchmarks/tables.py --check",
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table differs")
    check = parser.parse_args().check
    different = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = updated(text)
        if new != text:
            different.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(new, encoding="utf-8")
    for name in different:
        print(f"{name}: {'differs from benchmarks/results; run python benchmarks/tables.py' if check else 'rewritten'}")
    return 1 if check and different else 0


if __name__ == "__main__":
    sys.exit(main())
