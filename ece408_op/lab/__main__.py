"""``ece408-lab``: the command's arguments, the screen, and the loop of --watch."""

from __future__ import annotations

import sys

from ece408_op import commands

if __name__ == "__main__":  # above the other imports, which Ctrl-C ends with one line only inside of commands.run
    sys.exit(commands.run("lab"))

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ece408_op.commands import CANNOT, FAILED, OK, interrupt_on_sigterm, is_read, whole_number
from ece408_op.data.atomic import output_file, output_folder, write_text
from ece408_op.errors import DeviceError, Ece408Error, ProblemError
from ece408_op.problem import ConvProblem
from ece408_op.submission import EndedError
from ece408_op.submission.sources import SUFFIXES, device_of

from . import _check, _findings, _ncu, _page, _screen, _speed
from ._check import Request

_STARTERS = Path(__file__).with_name("starters")
#: Seconds between two looks at the file's time of change.
_LOOK = 0.1
_EPILOG = """\
example:
  ece408-lab new my_kernel.cu                   write a correct, slow kernel to start from
  ece408-lab my_kernel.cu --watch               check it again at each save
  ece408-lab new-forward.h --layer 1x28x28x50x5 --images 100

A .cu or .cuh file is emulated where there is no GPU: its output is checked, and its accesses to memory are counted.
A .py file with a CudaKernel needs a GPU.
exit codes: 0 right, 1 wrong or failed, 2 usage, 3 this machine can't"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["new"]:
        return _new(arguments[1:])
    options = _options(arguments)
    interrupt_on_sigterm()  # running programs are ended, temporary folders removed
    request = Request(options.file, tuple(options.layer), options.images or 0, options.emulate)
    if not options.watch:
        return _once(request, options)
    while True:
        print("\x1b[H\x1b[2J" if sys.stdout.isatty() else "", end="", flush=True)
        before = _changed(options.file)
        code = _once(request, options)
        print(f"waiting for {options.file} to change; Ctrl-C ends", file=sys.stderr, flush=True)
        while _changed(options.file) == before:
            if not is_read():
                return code
            time.sleep(_LOOK)


def _once(request: Request, options: argparse.Namespace) -> int:
    """Check the file, print the verdict and then what is known about its speed; returns the exit code."""
    try:
        if options.html is not None:
            _page.check(options.file, options.emulate)
        checked = _check.check(request)
        result, lines = checked.result, _shown(_screen.verdict(checked.result), [])
        ncu = [(_ncu.add, _screen.ncu)] if options.ncu else []
        for step, part in ((_findings.add, _screen.findings), *ncu, (_speed.measure, _screen.speed)):
            status = result["status"]
            try:
                step(request, checked)
            except EndedError as error:
                result.update(status=error.status, reason=error.reason)
            # Where more images show a mistake, the verdict is another.
            same = result["status"] == status
            lines = _shown(part(result) if same else ["", *_screen.verdict(result)], lines)
            if not checked.right:
                break
        if options.json is not None:
            write_text(options.json, json.dumps(result, indent=1) + "\n")
        if options.html is not None:
            print(_page.write(result, options.html))
    except (DeviceError, MemoryError) as error:
        print(f"ece408-lab: {error or 'no memory'}", file=sys.stderr)
        return CANNOT
    except (Ece408Error, OSError) as error:
        print(f"ece408-lab: {error}", file=sys.stderr)
        return FAILED
    return OK if checked.right else FAILED


def _shown(lines: Sequence[str], before: Sequence[str]) -> list[str]:
    """Print lines below those of before, as far as the screen has room; returns all."""
    every = [*before, *lines]
    for line in _screen.fitted(every)[len(_screen.fitted(before)) :]:
        print(line, flush=True)
    return every


def _new(arguments: Sequence[str]) -> int:
    """Write a file to start from, for the device that its name means."""
    parser = argparse.ArgumentParser(prog="ece408-lab new", description="Write a correct, slow file to start from.")
    parser.add_argument("file", type=output_file, help="its name, such as my_kernel.cu or new-forward.h")
    path = parser.parse_args(arguments).file
    if path.suffix.lower() not in SUFFIXES or path.suffix.lower() == ".py":
        parser.error(f"expected a name that ends in .h, .cu or .cuh, got {path}")
    if path.exists():
        parser.error(f"expected the name of a new file, got {path}, which exists")
    starter = "my_kernel.cu" if device_of(path) == "gpu" else "new-forward.h"
    try:
        path.write_bytes((_STARTERS / starter).read_bytes())
    except OSError as error:
        print(f"ece408-lab: {error}", file=sys.stderr)
        return FAILED
    print(f"{path}: now run ece408-lab {path} --watch")
    return OK


def _changed(path: Path) -> Any:
    """Return the state of the file and of the sources next to it, which each save changes."""
    sources = [one for one in path.absolute().parent.iterdir() if one.suffix.lower() in SUFFIXES]
    found = []
    for one in sorted({*sources, path.absolute()}):
        try:
            state = os.stat(one)
        except OSError:  # an editor may replace it just now
            continue
        found.append((one, state.st_mtime_ns, state.st_size))
    return found


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ece408-lab",
        description="Check a convolution of your own: explain its mistakes and, in CUDA, its slow lines.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("file", type=Path, metavar="FILE", help="a .h, .cu, .cuh or .py file; or: new FILE")
    option("--watch", action="store_true", help="check it again at each save")
    layer = "layers: channels, rows, columns, filters, the filter's size (default: the course's that fit the file)"
    option("--layer", nargs="+", type=_layer, default=[], metavar="CxHxWxMxK", help=layer)
    option("--images", type=whole_number(1, 10_000), metavar="N", help="images (default: few, then more)")
    option("--emulate", action="store_true", help="emulate a CUDA file on the CPU, although there is a GPU")
    option("--ncu", action="store_true", help="count by Nsight Compute as well, on a GPU")
    option("--json", type=output_file, metavar="FILE", help="write the result to FILE as well")
    option("--html", type=output_folder, metavar="FOLDER", help="write the result as a page as well, FOLDER/index.html")
    options = parser.parse_args(arguments)
    if options.file.suffix.lower() not in SUFFIXES or not options.file.is_file():
        parser.error(f"FILE: expected an existing file that ends in {', '.join(SUFFIXES)}, got {options.file}")
    return options


def _layer(text: str) -> ConvProblem:
    sizes = text.lower().split("x")
    try:
        channels, height, width, filters, kernel = map(int, sizes)
        return ConvProblem(1, channels, height, width, filters, kernel)
    except (ValueError, ProblemError) as error:
        reason = f": {error}" if isinstance(error, ProblemError) else ""
        raise argparse.ArgumentTypeError(f"expected five sizes such as 1x28x28x50x5, got {text!r}{reason}") from None
