"""Run a milestone as a user does, or faster in the process of the tests, which has imported MXNet already."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from ece408_op.milestones import cli

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script's main function; return its output and exit code in the form of a finished process."""
    printed, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(errors):
        try:
            code = cli.main(script.removesuffix(".py"), list(map(str, arguments)))
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess([script], code, printed.getvalue(), errors.getvalue())


def started(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, started from another folder."""
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd="/")


def passed(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script's main function, which has to succeed."""
    done = run(script, *arguments)
    assert done.returncode == 0, done.stderr
    return done
