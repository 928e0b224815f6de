"""ece408-report: run the milestones and benchmarks that this machine can run, and write the page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ece408_op.bench import plots
from ece408_op.commands import CANNOT, FAILED, INTERRUPTED, OK, whole_number
from ece408_op.core import dispatch
from ece408_op.data.atomic import output_folder, write_text
from ece408_op.errors import DeviceError, Ece408Error
from ece408_op.models import files
from ece408_op.runtime import templates

from ._commands import MILESTONES, Asked, all_commands
from ._runs import Runs, run_all
from ._sections import sections

PAGE, _TEMPLATE = "index.html", Path(__file__).with_name("report.html.j2")
#: The most seconds of --limit: with far larger ones, the system's clocks overflow.
_LONGEST = 1e6

_DESCRIPTION = """\
Run the milestones and benchmarks that this machine can run, keep the JSON of each in FOLDER/runs, and write
FOLDER/index.html. After Ctrl-C the same command continues, and it runs again what failed. The page lists every
command without a result, with the reason."""

_EPILOG = """\
example:
  ece408-report --networks ece408-high --sizes 1000 100 --out report
  ece408-report --render --out report

Needs the extra report; profiles of a GPU need profile13 or profile12, its counters NVIDIA's ncu on PATH.
exit codes: 0 done, whatever could not run; 1 nothing could be written; 2 usage; 3 this machine can't;
130 interrupted"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _options(arguments)
    asked = Asked(options.networks, options.sizes, options.milestones, options.impl, options.data)
    runs = options.out / "runs"
    try:
        plots.check()
        templates.jinja2()
        commands = all_commands(asked)
        if not options.render:
            run_all(commands, runs, options.limit)
        page = as_page(asked, Runs(commands, runs))
        write_text(options.out / PAGE, page)
    except DeviceError as error:
        print(f"ece408-report: {error}", file=sys.stderr)
        return CANNOT
    except (Ece408Error, OSError) as error:
        print(f"ece408-report: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("ece408-report: interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED
    print(options.out / PAGE)
    return OK


def as_page(asked: Asked, runs: Runs) -> str:
    """The page in one file of HTML, in which all text is escaped; it fetches nothing."""
    return templates.render(_TEMPLATE, {"sections": sections(asked, runs)})


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ece408-report",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    networks, impls = files.list_names(), dispatch.names()
    option = parser.add_argument
    option("--out", type=output_folder, default="report", metavar="FOLDER", help="(default: report)")
    option(
        "--networks", nargs="+", choices=networks, default=networks, metavar="NAME", help="(default: all of models/)"
    )
    images = whole_number(1, 10_000)
    option("--sizes", nargs="+", type=images, default=[10_000, 100, 10], metavar="N", help="images (10000 100 10)")
    option("--milestones", nargs="+", choices=MILESTONES, default=MILESTONES, help="(default: all)")
    names = ", ".join(impls)
    option("--impl", nargs="+", choices=impls, default=impls, metavar="NAME", help=f"some of {names} (default: all)")
    option("--data", metavar="FOLDER", help="folder with the Fashion-MNIST files")
    option("--limit", type=_seconds, default=600.0, metavar="SECONDS", help="end a command that takes longer (600)")
    option("--render", action="store_true", help="run nothing, write the page from the kept results")
    options = parser.parse_args(arguments)
    options.sizes = sorted(set(options.sizes), reverse=True)
    options.networks = list(dict.fromkeys(options.networks))
    options.milestones = [name for name in MILESTONES if name in options.milestones]
    return options


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(f"expected seconds, above 0 and at most {_LONGEST:.0f}, got {word!r}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
