"""python -m ece408_op.profile script.py args: run a script, and print where its time went."""

from __future__ import annotations

import sys

from ece408_op import commands

if __name__ == "__main__":  # above the other imports, which Ctrl-C ends with one line only inside of commands.run
    sys.exit(commands.run("profile"))

import argparse
import runpy
from collections.abc import Sequence
from pathlib import Path

from ece408_op.data.atomic import output_folder

from .session import DATA, TEXT, TIMELINE, Session

_EPILOG = """\
example:
  python -m ece408_op.profile --out profile script.py its arguments

The tables follow the script's own lines on stdout.
exit codes: the script's own; 2 where there is no such script"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ece408_op.profile",
        usage="python -m ece408_op.profile [--out FOLDER] script.py [arguments]",
        description="Run a script, and print where its time went: GPU kernels, copies and CUDA calls, and MXNet's "
        "operators. Kernels of MXNet, CuPy and this package are all recorded.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out = f"write {TEXT}, {DATA} and {TIMELINE} there"
    parser.add_argument("--out", metavar="FOLDER", type=output_folder, help=out)
    parser.add_argument("script", help="the Python file to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    options = parser.parse_args(arguments)
    script = Path(options.script)
    if not script.is_file():
        parser.error(f"script: expected a Python file, got {options.script}")
    session = Session(on_gpu=True, out=options.out)
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(options.script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    finally:
        session.finish()
    return 0
