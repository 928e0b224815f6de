"""ece408-report: run the milestones that this machine can, and write the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ece408_op import commands
from ece408_op.commands import CANNOT, FAILED, OK
from ece408_op.core import dispatch
from ece408_op.data.atomic import output_folder_problem
from ece408_op.errors import DeviceError, Ece408Error
from ece408_op.models import files

from . import _jobs, _render, _runner

_DESCRIPTION = """\
Run the milestones that this machine can, keep each run's JSON in FOLDER/runs, and write FOLDER/index.html and
FOLDER/report.md. A report that was stopped goes on where it was when the same command is given again; runs that
failed are tried again. What could not be run is listed with the reason."""

_EPILOG = """\
example:
  ece408-report --networks ece408-high --sizes 1000 100 --out report
  ece408-report --render --out report

Needs the extra report; a GPU's profiles need profile13 or profile12, its counters NVIDIA's ncu on PATH.
exit codes: 0 done, whatever could not run; 1 nothing could be written; 2 usage; 3 this machine can't;
130 interrupted"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    asked = _jobs.Asked(
        networks=_known(parser, "--networks", options.networks, files.list_names()),
        sizes=sorted(set(options.sizes), reverse=True),
        milestones=[name for name in _jobs.MILESTONES if name in options.milestones],
        cpu_kernels=[name for name in dispatch.names("cpu") if options.kernels is None or name in options.kernels],
        gpu_kernels=[name for name in dispatch.names("gpu") if options.kernels is None or name in options.kernels],
        data=options.data,
    )
    problem = output_folder_problem(options.out)
    if problem:
        parser.error(f"--out: {problem}")
    runs = options.out / "runs"
    try:
        plan = _jobs.plan(asked)
        if not options.render:
            _render.check()
            _runner.make(plan, runs, options.limit)
        for path in _render.write(plan, asked, runs, options.out):
            print(path)
    except DeviceError as error:
        print(f"ece408-report: {error}", file=sys.stderr)
        return CANNOT
    except (Ece408Error, OSError) as error:
        print(f"ece408-report: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("ece408-report: interrupted; the same command goes on from here", file=sys.stderr)
        return commands.INTERRUPTED
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ece408-report",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kernels = dispatch.names()
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="FOLDER", help="(default: report)")
    parser.add_argument("--networks", nargs="+", metavar="NAME", help="(default: all of models/)")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=_images,
        default=[10_000, 100, 10],
        metavar="N",
        help="images (default: 10000 100 10)",
    )
    parser.add_argument(
        "--milestones", nargs="+", choices=_jobs.MILESTONES, default=list(_jobs.MILESTONES), help="(default: all)"
    )
    parser.add_argument(
        "--kernels", nargs="+", choices=kernels, metavar="NAME", help=f"of CPU and GPU, of {', '.join(kernels)} (all)"
    )
    parser.add_argument("--data", metavar="FOLDER", help="folder with the Fashion-MNIST files")
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="SECONDS", help="end a run that takes longer (default: 600)"
    )
    parser.add_argument("--render", action="store_true", help="run nothing, write the pages from the kept runs")
    return parser


def _images(word: str) -> int:
    number = int(word)
    if not 1 <= number <= 10_000:
        raise argparse.ArgumentTypeError(f"expected 1 to 10000 images, got {number}")
    return number


def _known(parser: argparse.ArgumentParser, option: str, given: list[str] | None, known: list[str]) -> list[str]:
    for name in given or []:
        if name not in known:
            parser.error(f"{option}: expected some of {', '.join(known)}; got {name!r}")
    return list(dict.fromkeys(given)) if given else known


if __name__ == "__main__":
    sys.exit(main())
