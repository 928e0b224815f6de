"""``ece408-grade``: the command's arguments, its lines and its exit code."""

from __future__ import annotations

import sys

from ece408_op import commands

if __name__ == "__main__":  # above the other imports, which Ctrl-C ends with one line only inside of commands.run
    sys.exit(commands.run("grade"))

import argparse
import json
import os
import resource
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from os.path import realpath
from pathlib import Path

from ece408_op.commands import CANNOT, FAILED, OK, USAGE, exit_code, interrupt_on_sigterm, print_lines, whole_number
from ece408_op.data.atomic import output_file, write_text
from ece408_op.errors import DeviceError
from ece408_op.problem import KNOWN_NETS
from ece408_op.runtime import cuda
from ece408_op.submission import build
from ece408_op.submission.sandbox import Tools

from . import _grading, _reports, _spec, _submission
from ._grading import Log, Record
from ._spec import SpecError

VERSION = 1
_EPILOG = """\
example:
  ece408-grade student/ece408_src/new-forward.h
  ece408-grade class --context gpu --spec rules.toml --json out.json --reports reports

A class that was stopped continues when the same command, with the same --json, is given again.
exit codes: 0 all passed, 1 one did not, 2 usage, 3 this machine can't; 128 + the signal that ended it"""


def main(argv: Sequence[str] | None = None) -> int:
    """Grade the submissions; 0 all passed, 1 one did not, 2 usage, 3 this machine cannot."""
    arguments = _parser().parse_args(argv)
    interrupt_on_sigterm()  # running programs are ended, temporary folders removed
    try:
        rules = replace(_spec.load(arguments.spec), quick=arguments.quick)
        if rules.quick and rules.demanding:
            raise SpecError("--quick: expected no networks and images in the grader's file")
        if problem := _reports.problem(arguments.reports):
            raise SpecError(f"--reports: {problem}")
        records = _graded(arguments, rules)
        print_lines(map(line, records))
    except (SpecError, DeviceError, OSError) as error:
        usage = isinstance(error, SpecError)  # it may name students' files; other errors have several lines
        print(_grading.escaped(f"ece408-grade: {error}", kept="" if usage else "\n"), file=sys.stderr)
        return USAGE if usage else CANNOT
    except KeyboardInterrupt as interrupt:
        later = "; the same command continues where it stopped" if arguments.json else ""
        print(f"ece408-grade: interrupted{later}", file=sys.stderr, flush=True)
        code = exit_code(interrupt)
        if any(thread.name.startswith(_grading.THREADS) for thread in threading.enumerate()):
            build.remove_folders(os.getpid())
            os._exit(code)  # Python would wait for the threads
        return code
    counts = Counter(record["status"] for record in records)
    if len(records) > 1:
        summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        print(f"ece408-grade: {len(records)} submissions: {summary}", file=sys.stderr)
    return OK if set(counts) == {"passed"} else FAILED


def line(record: Record) -> str:
    """For people: the verdict with its times, the speed compared with this package's own kernel, and the reason."""
    text = record["status"] + (f" ({record['precision']})" if record.get("precision") else "")
    times = []
    for one in _reports.timed(record):
        medians = " + ".join(f"{1e3 * layer['seconds']['median']:.3g}" for layer in one["layers"])
        own = one.get("own_kernel_seconds")
        ratio = f", {own / one['seconds']:.2g} of ours" if own and one["seconds"] else ""
        times.append(f"{one['network']}: {medians} ms{ratio}")
    # With #line, an author words the beginning of a compiler's line: further lines are indented.
    reason = record["reason"].replace("\n", "\n    ")
    return f"{' '.join([text, '; '.join(times)]).strip()}: {record['path']}: {reason}"


def _graded(arguments: argparse.Namespace, rules: _spec.Spec) -> list[Record]:
    """Grade all, and write what was asked for."""
    found, passed_over = _submission.find(arguments.path, arguments.context, gpu_here=lambda: _no_gpu() is None)
    without = _no_gpu() if {one.context for one in found} == {"cpu", "gpu"} else None
    if without is not None:  # of a class, those for a GPU that is not there are unsupported
        found = [replace(one, why=str(without)) if one.context == "gpu" else one for one in found]
    contexts = {one.context for one in found if not one.why}
    gpu = "gpu" in contexts
    build.remove_folders()
    # No submission may see the class and the grader's files. Unlike Path.resolve, realpath takes a link to itself.
    files = [arguments.spec, arguments.json, arguments.reports, *(one.source for one in found)]
    given = [Path(realpath(path)) for path in (*arguments.path, *files) if path]
    hidden = tuple({path if os.path.isdir(path) else path.parent for path in given})
    tools = build.tools(hidden=hidden, unsafe=arguments.unsafe) if contexts else Tools(Path())
    # One submission has the GPU to itself; others are compiled meanwhile.
    jobs = 1 + max(1, len(os.sched_getaffinity(0)) // 2) if gpu else arguments.jobs
    layers = max(len(net.layers) for net in rules.nets or KNOWN_NETS)  # of six descriptors; select takes 1024
    descriptors = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    jobs = max(1, min(jobs, (descriptors - 64) // (6 * layers + 12)))
    graders = {"cpu": _grading.for_cpu(tools, rules, jobs, arguments.time_in_parallel)}
    graders["gpu"] = _grading.for_gpu(tools, rules) if gpu else graders["cpu"]
    for context in contexts:
        count = sum(one.context == context and not one.why for one in found)
        graders[context].check_memory(1 if context == "gpu" else min(jobs, count))
    for path, why in passed_over:
        print(_grading.shown(f"ece408-grade: {path}: not graded: {why}"), file=sys.stderr)
    file = arguments.json and arguments.json.with_name(f"{arguments.json.name}.log")
    options = (rules.quick, arguments.unsafe, arguments.time_in_parallel)
    with closing(Log(file, repr((VERSION, rules.text, *options)))) as log:
        records = _grading.grade_all(found, graders, jobs, log)
        if arguments.json:
            write_text(arguments.json, json.dumps({"version": VERSION, "records": records}, indent=1))
        if arguments.reports:
            _reports.write_all(arguments.reports, records, rules.ranking)
    if file:  # its records stand elsewhere now
        file.unlink(missing_ok=True)
    return records


def _no_gpu() -> DeviceError | None:
    """Return why this machine has no GPU that CUDA can use; None if it has one."""
    try:
        cuda.device_count()
    except DeviceError as error:
        return error
    return None


def _path(word: str) -> Path:
    if not word:  # a variable that a script has not set, and not the current folder
        raise argparse.ArgumentTypeError("expected a path, got an empty word")
    return Path(word)


def _parser() -> argparse.ArgumentParser:
    about = "Compile, run and check course submissions."
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("ece408-grade", description=about, epilog=_EPILOG, formatter_class=raw)
    parser.add_argument("path", nargs="+", type=_path, help="a submission's folder or file, or a folder of many")
    files = "grade new-forward.h (cpu) or new-forward.cuh (default: gpu where there is one)"
    parser.add_argument("--context", choices=("cpu", "gpu"), help=files)
    parser.add_argument("--spec", type=_path, help="the grader's file, TOML: see docs/grading.md")
    parser.add_argument("--json", type=output_file, help="write the records there")
    parser.add_argument("--reports", type=_path, help="a folder for the students' reports and the leaderboard")
    jobs = "CPU submissions compiled and checked at a time (default: the cores); no effect with GPU files"
    parser.add_argument("--jobs", type=whole_number(1), default=len(os.sched_getaffinity(0)), help=jobs)
    parser.add_argument("--time-in-parallel", action="store_true", help="time calls while other submissions run, too")
    parser.add_argument("--quick", action="store_true", help="one network, 100 images, one timed run, no accuracy")
    parser.add_argument("--unsafe", action="store_true", help="run submissions without a sandbox, with limits only")
    return parser
