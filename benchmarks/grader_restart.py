"""Grade a class of 30 twice, killing the grader with SIGKILL twice in each pass, and compare the records.

    python benchmarks/grader_restart.py             # benchmarks/results/grader-restart.txt

Each pass is one command, which is started again after each kill. The script needs no GPU. Exit code 1 if a record is
lost or graded again, if a verdict is wrong, or if files or processes stay behind. For an attack that depends on a race,
two verdicts are right.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "helpers")]

import submissions  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "grader-restart.txt"
SIZE = 30
#: The numbers of records after which the grader is killed.
KILLS = (8, 19)


def one_pass(folder: Path, name: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Grade the class once; return the records by submission, and the problems as sentences."""
    out, scratch = folder / f"{name}.json", folder / f"scratch-{name}"
    scratch.mkdir()
    command = [sys.executable, "-m", "ece408_op.grade", str(folder / "class"), "--context", "cpu"]
    command += ["--spec", str(folder / "spec.toml"), "--json", str(out)]
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": str(ROOT)}
    kept: dict[str, dict[str, Any]] = {}
    for kill in (*KILLS, None):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and (kill is None or len(submissions.logged(out)) < kill):
            time.sleep(0.05)
        if kill is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kept = submissions.logged(out)
    problems = [] if process.returncode == 1 else [f"exit code {process.returncode}"]
    records = {submissions.name_of(one): one for one in json.loads(out.read_text(encoding="utf-8"))["records"]}
    started = {submissions.name_of(one): one["started"] for one in kept.values()}
    problems += [f"{one} was graded again" for one, at in started.items() if records[one]["started"] != at]
    problems += [f"{path.name} stays behind" for path in scratch.iterdir()]
    return records, problems


def main() -> int:
    """Grade the class twice and write the result; return the exit code."""
    attacks = [case for case in submissions.attacks() if case.usual][: SIZE // 2]
    cases = attacks + [case for case in submissions.honest() if case.usual][: SIZE - len(attacks)]
    with submissions.scratch_folder() as folder:
        submissions.write(cases, folder / "class")
        (folder / "spec.toml").write_text(submissions.SPEC, encoding="utf-8")
        began = time.monotonic()
        first, problems = one_pass(folder, "first")
        second, more = one_pass(folder, "second")
        left = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False).stdout.split()
    problems += [*more, *(f"process {pid} stays behind" for pid in left)]
    lines = []
    for case in cases:
        got = [submissions.verdict(one[case.name]) for one in (first, second)]
        problems += [f"{case.name}: {text}" for one, text in zip((first, second), got)
                     if not submissions.is_right(one[case.name], case.expected)]  # fmt: skip
        lines.append(f"{case.name:44}{got[0]:30}{got[1]}")
    text = f"{len(cases)} submissions, graded twice, killed after {KILLS[0]} and {KILLS[1]} records of each pass\n"
    text += f"{platform.platform()}, Python {platform.python_version()}, {time.monotonic() - began:.0f} s\n"
    text += "\n".join(problems or ["no record was lost or graded again, nothing stays behind"])
    OUT.write_text(text + "\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
    print(text)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
