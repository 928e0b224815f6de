"""ece408-report: run the milestones and benchmarks that this machine can run, and write the page."""

from __future__ import annotations

import sys

from ece408_op import commands

if __name__ == "__main__":  # above the other imports, which Ctrl-C ends with one line only inside of commands.run
    sys.exit(commands.run("report"))

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from signal import SIG_IGN, SIGINT, signal
from typing import Any

from ece408_op.bench import plots
from ece408_op.commands import CANNOT, FAILED, OK, exit_code, whole_number
from ece408_op.core import dispatch
from ece408_op.data.atomic import output_folder, write_text
from ece408_op.errors import DeviceError, Ece408Error, MXNetImportError
from ece408_op.models import files
from ece408_op.runtime import templates

from ._commands import MILESTONES, all_commands
from ._page import as_page
from ._runs import Runs, machine_facts, run_all

PAGE = "index.html"

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
    runs = options.out / "runs"
    try:
        plots.check()
        templates.jinja2()
        commands = all_commands(options)
        if not options.render:
            # In a process that ends, so that no CUDA context of this process occupies the GPU's memory.
            with ProcessPoolExecutor(1, get_context("spawn"), signal, (SIGINT, SIG_IGN)) as pool:
                facts = pool.submit(machine_facts).result()
            run_all(commands, runs, options.limit, facts)
        write_text(options.out / PAGE, as_page(options, Runs(commands, runs)))
    except KeyboardInterrupt as interrupt:
        print("ece408-report: interrupted; the same command continues", file=sys.stderr)
        return exit_code(interrupt)
    except (Ece408Error, OSError, BrokenProcessPool) as error:
        print(f"ece408-report: {error}", file=sys.stderr)
        return CANNOT if isinstance(error, (DeviceError, MXNetImportError)) else FAILED
    print(options.out / PAGE)
    return OK


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    style: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="ece408-report", description=_DESCRIPTION, epilog=_EPILOG, **style)
    networks, impls, images = files.list_names(), dispatch.names(), whole_number(1, 10_000)
    several: Any = {"nargs": "+", "metavar": "NAME"}
    option = parser.add_argument
    option("--out", type=output_folder, default="report", metavar="FOLDER", help="(default: report)")
    option("--networks", **several, choices=networks, default=networks, help="(default: all of models/)")
    option("--sizes", nargs="+", type=images, default=[10_000, 100, 10], metavar="N", help="images (10000 100 10)")
    option("--milestones", nargs="+", choices=MILESTONES, default=MILESTONES, help="(default: all)")
    option("--impl", **several, choices=impls, default=impls, help=f"some of {', '.join(impls)} (default: all)")
    option("--data", metavar="FOLDER", help="folder with the Fashion-MNIST files")
    limit: Any = {"type": whole_number(1, 1_000_000), "default": 600, "metavar": "SECONDS"}
    option("--limit", **limit, help="end a command that takes longer (default: 600)")
    option("--render", action="store_true", help="run nothing, write the page from the kept results")
    options = parser.parse_args(arguments)
    options.sizes = sorted(set(options.sizes), reverse=True)
    options.networks = list(dict.fromkeys(options.networks))
    options.milestones = [name for name in MILESTONES if name in options.milestones]
    return options
