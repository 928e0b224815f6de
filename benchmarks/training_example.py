"""Run the program of docs/training.md on a GPU, and print its output, its time and the versions.

python benchmarks/training_example.py --out benchmarks/results/training-example-h200.txt
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def program(on_gpu: bool) -> str:
    """Return the page's program; on a GPU, with the line that the page names in front of its loop."""
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (line,) = re.findall(r"^    (net = .*\n)", text, re.MULTILINE)
    return found.replace("trainer =", line + "trainer =") if on_gpu else found


def main() -> int:
    """The command; returns its exit code, the program's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the output")
    out = parser.parse_args().out
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program(on_gpu=True)], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    seconds = time.perf_counter() - start
    sys.path.insert(0, str(ROOT))
    from ece408_op.bench import results
    from ece408_op.plugin import mxnet_import

    mxnet_import.load()
    machine = results.this_machine(gpu=True)
    assert machine.gpu, "this_machine raises without one"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    head = f"python benchmarks/training_example.py\n{machine.gpu.name}, CUDA {machine.gpu.runtime}, {versions}\n"
    text = f"{head}{seconds:.0f} seconds, the start of Python and compiling included\n\n{done.stdout}"
    print(text, end="")
    if out:
        out.write_text(text, encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
