"""What ece408-lab tells of right and wrong CUDA files, and the seconds from saving a file to its first verdict.

    python benchmarks/lab.py files                                             # on a GPU, if there is one, and emulated
    python benchmarks/lab.py times --json benchmarks/results/lab-times.json    # with --gpu, on a GPU

files: ``lab_tiles.cu`` with one mistake at a time, a race and an index beyond a local array among them; the starter;
and the kernels of the course's ladder. Each file is a process of its own; several run at a time.

times: in a running ``ece408-lab --watch``. Each save changes the starter's text, so that it is compiled; the default
layers and images are checked. The aim on two cores is 1.5 s for a .h file, and 3 s for a CUDA file. Other work on the
machine lengthens these seconds. The processor time of the command and its children is measured as well: an idle machine
takes about as long.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from emulator_counters import ladder

from ece408_op.bench.results import this_machine
from ece408_op.lab import __path__ as folders
from ece408_op.runtime import cuda

STARTERS = Path(folders[0]) / "starters"
AIMS = {"new-forward.h": 1.5, "my_kernel.cu": 3.0}
TILES = Path(__file__).with_name("lab_tiles.cu")
RIGHT = "right"
#: Mistakes by their names: texts before and after, and what the lab is to tell, as a regular expression.
MISTAKES = {
    "filter rows and columns": ({"K + p) * K + q];": "K + q) * K + p];"}, "p and q exchanged in the filter's index"),
    "flipped filter": ({"K + p) * K + q];": "K + K - 1 - p) * K + K - 1 - q];"}, "with flipped filters"),
    "channels and filters": (
        {"((first + f) * C + c)": "(c * M + first + f)"},
        "c and m exchanged in the filter's index",
    ),
    "output transposed": (
        {"* rows + i) * columns + j]": "* columns + j) * rows + i]"},
        "rows and columns exchanged in y's",
    ),
    "columns to W": ({"j < columns)": "j < W)"}, "threads beyond a row's end, which write into the next row"),
    "first filter row": ({"int p = 0;": "int p = 1;"}, "without the first row of each filter"),
    "last channel": ({"c < C;": "c < C - (C > 1);"}, "without the last channel"),
    "partial tile": ({"(H - K + TILE) / TILE,": "(H - K + 1) / TILE,"}, "last, partial tile may be missing"),
    "tile halo": (
        {"row < H &&": "n / side < TILE && n % side < TILE &&"},
        "its halo of K - 1 rows and columns is missing",
    ),
    "sum not reset": (
        {"FILTERS 4": "FILTERS 16", "{0, 0, 0, 0}": "{}", "= sums[f];": "= sums[0] += f ? sums[f] : 0;"},
        "sums that are not reset: each output adds to that of the filter before it",
    ),
    "adds to y": ({"* columns + j] = sums": "* columns + j] += sums"}, "right only while y is 0 before the call"),
    "index of 8 bits": (
        {"filters[(((": "filters[(unsigned char)((((", "K + p) * K + q];": "K + p) * K + q)];"},
        "an index of 8 bits in w",
    ),
    "half precision": ({"+= tile[": "+= (float)(__half)tile["}, "rounding errors of half precision"),
    "bytes for elements": ({"* sizeof(float), 0, cuda": ", 0, cuda"}, "a copy's size is in bytes"),
    "image missing": ({"x[((b * C": "x[((0 * C"}, "b is missing in x's index"),
    "no barrier": ({"    __syncthreads();\n    for": "    for"}, r"lines \d+ and \d+: race"),
    "beyond a local array": (
        {"f < FILTERS && first + f < M; f++)\n      for": "first + f < M; f++)\n      for"},
        "line 28: out of bounds: index 4 is beyond sums",
    ),
    "beyond shared memory": ({"side * side * sizeof(float)>": "side * side>"}, r"line \d+: out of bounds"),
    "barrier in a branch": (
        {"    __syncthreads();\n  }": "    if (i < rows) __syncthreads();\n  }"},
        r"lines? [\d and]+: (barrier|race)",
    ),
}


@dataclass(frozen=True)
class Told:
    """What the lab said: whether it is what was expected, the words, and seconds to the verdict and in all."""

    expected: bool
    words: str
    verdict: float
    whole: float


def told(path: Path, expected: str, emulate: bool) -> Told:
    """Run the lab on a file."""
    out = path.with_suffix(f".{emulate}.json")
    command = [sys.executable, "-u", "-m", "ece408_op", "lab", str(path), "--json", str(out)]
    start, lines = time.perf_counter(), []
    with subprocess.Popen(
        [*command, "--emulate"] if emulate else command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        verdict = 0.0
        for line in run.stdout:
            if line.startswith(path.name) and not verdict:
                verdict = time.perf_counter() - start
            lines.append(line)
    whole = time.perf_counter() - start
    result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"status": "".join(lines), "layers": []}
    findings = [finding for layer in result["layers"] for finding in layer["findings"]]
    if expected == RIGHT:
        return Told(result["status"] == RIGHT and not findings, result["status"], verdict, whole)
    found = re.search(expected, " ".join("".join(lines).split()))
    return Told(found is not None, found[0] if found else result["status"], verdict, whole)


def files(jobs: int, wanted: str, ways: dict[str, bool]) -> bool:
    """Print a row per file that has the pattern in its name and way to run it; returns whether all is as expected.

    ways: by their names, whether the file is emulated.
    """
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        cases = {}
        for number, (mistake, (changes, expected)) in enumerate(MISTAKES.items()):
            text = TILES.read_text(encoding="utf-8")
            for before, after in changes.items():
                assert before in text, mistake
                text = text.replace(before, after)
            cases[mistake] = Path(name) / f"wrong_{number}.cu", expected
            cases[mistake][0].write_text(text, encoding="utf-8")
        for path in (TILES, STARTERS / "my_kernel.cu"):
            cases[path.name] = Path(shutil.copy(path, name)), RIGHT
        for kernel in ladder():
            cases[kernel.name] = Path(name) / f"{kernel.name}.py", RIGHT
            text = f"from ece408_op.core import dispatch\n\nKERNEL = dispatch.find({kernel.name!r})  # a CudaKernel\n"
            cases[kernel.name][0].write_text(text, encoding="utf-8")
        started = {
            (file, way): pool.submit(told, path, expected, emulate)
            for file, (path, expected) in cases.items()
            if re.search(wanted, file)
            for way, emulate in ways.items()
        }
        passed = True
        print(f"{'file':24}{'where':10}{'as expected':13}{'verdict s':>9}{'all s':>7}  told")
        for (file, way), future in started.items():
            one = future.result()
            passed &= one.expected
            answer = "yes" if one.expected else f"NO: {cases[file][1]}"
            print(f"{file:24}{way:10}{answer:13}{one.verdict:9.1f}{one.whole:7.1f}  {one.words[:70]}", flush=True)
    return passed


def processor_seconds(process: int) -> float:
    """The processor time of a process and of its children that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def seconds_to_verdict(name: str, gpu: bool, saves: int) -> dict[str, list[float]]:
    """The seconds, and those of processor time, of each save but the first check, which fills the caches."""
    text, wall, processor = (STARTERS / name).read_text(encoding="utf-8"), [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        # On a GPU the first check has 4 images anyway; so few make the times behind it short.
        way = ["--images", "4"] if gpu else ["--emulate"]
        command = [sys.executable, "-u", "-m", "ece408_op", "lab", str(path), "--watch", *way]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None and run.stderr is not None
            for number in range(saves + 1):
                start, used = time.perf_counter(), processor_seconds(run.pid)
                while not run.stdout.readline().startswith(f"{name}, "):
                    assert run.poll() is None
                wall.append(time.perf_counter() - start)
                print(f"{name}: save {number}: {wall[-1]:.2f} s", file=sys.stderr, flush=True)
                processor.append(processor_seconds(run.pid) - used)
                while not run.stderr.readline().startswith("waiting"):
                    assert run.poll() is None
                path.write_text(f"{text}// {number} {time.time()}\n", encoding="utf-8")
            run.terminate()
    found = {"seconds": wall[1:], "processor": processor[1:]}
    return {what: [round(each, 3) for each in seconds] for what, seconds in found.items()}


def times(gpu: bool, saves: int, json_file: Path | None) -> bool:
    """Print and write the medians; returns whether each is within its aim."""
    load = os.getloadavg()[0]
    found = {name: seconds_to_verdict(name, gpu, saves) for name in AIMS if name.endswith(".cu") or not gpu}
    for name, one in found.items():
        for what, seconds in one.items():
            print(f"{name}: {what}: {statistics.median(seconds):.2f}, {min(seconds):.2f} to {max(seconds):.2f}")
    result = {"files": found, "aims": AIMS, "load before": round(load, 1), "machine": asdict(this_machine(gpu=gpu))}
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return all(statistics.median(one["seconds"]) <= AIMS[name] for name, one in found.items())


def main() -> int:
    """Run the command; 1 where a file is told otherwise than expected, or a median is above its aim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("files", "times"))
    parser.add_argument("--jobs", type=int, default=2, help="files at a time (default: 2)")
    parser.add_argument("--match", default="", help="a pattern in the names of the files (default: all)")
    parser.add_argument("--gpu", action="store_true", help="on a GPU alone: the files, or the times of the CUDA file")
    parser.add_argument("--saves", type=int, default=10, help="saves of each file (default: 10)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.action == "times":
        return 0 if times(options.gpu, options.saves, options.json) else 1
    ways = {} if cuda.driver_version() is None else {"GPU": False}
    return 0 if files(options.jobs, options.match, ways if options.gpu else {**ways, "emulated": True}) else 1


if __name__ == "__main__":
    sys.exit(main())
