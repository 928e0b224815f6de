"""What the README says is true: its program runs, what it names exists, its accuracies are the measured ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_program_runs() -> None:
    pytest.importorskip("mxnet")
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    seconds, replaced = done.stdout.splitlines()
    assert float(seconds) > 0
    assert replaced == "{'conv': 'new0'} {}"


def test_every_file_and_module_that_it_names_exists() -> None:
    for path in re.findall(r"\b(?:docs|models|kernels|tests|ece408_op)/[\w./-]+\w", README):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m ece408_op\.(\w+)", README):
        assert (ROOT / "ece408_op" / f"{module}.py").is_file() or (ROOT / "ece408_op" / module).is_dir(), module


def test_its_accuracies_are_those_of_the_models() -> None:
    stated = dict(re.findall(r"^\| `([\w-]+)` \|.* (0\.\d{4}) \|$", README, re.M))
    table = (ROOT / "models" / "README.md").read_text(encoding="utf-8")
    measured = dict(re.findall(r"^\| ([\w-]+) \| [^|]+ \| real \|.* (0\.\d{4}) \|$", table, re.M))
    assert len(stated) == 5
    assert stated == measured
