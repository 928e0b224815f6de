"""What the lab tells of a CUDA kernel with one mistake at a time, emulated and on a GPU."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from gpu_case import require_gpu

from ece408_op.lab import __main__ as lab

TILES = Path(__file__).with_name("tiles.cu")
LAYER = ("--layer", "3x13x13x10x3", "--images", "3")
#: Texts before and after, and what the lab is to tell, as a regular expression. tests/core/test_explain.py has all
#: mistakes that explain an output, tests/emulator/test_findings.py all that the emulator finds.
MISTAKES = {
    "half precision": ({"+= tile[": "+= (float)(__half)tile["}, "rounding errors of half precision"),
    "no barrier": ({"    __syncthreads();\n    for": "    for"}, r"lines \d+ and \d+: race"),
    "tile halo": (
        {"row < H &&": "n / side < TILE && n % side < TILE &&"},
        "its halo of K - 1 rows and columns is missing",
    ),
    "adds to y": ({"* columns + j] = sums": "* columns + j] += sums"}, "right only while y is 0 before the call"),
    "beyond a local array": (
        {"f < FILTERS && first + f < M; f++)\n      for": "first + f < M; f++)\n      for"},
        "line 28: out of bounds: index 4 is beyond sums",
    ),
    "barrier in a branch": (
        {"    __syncthreads();\n  }": "    if (i < rows) __syncthreads();\n  }"},
        r"lines? [\d and]+: (barrier|race)",
    ),
}
#: The others are tested exhaustively.
FEW = ("no barrier", "half precision")


@pytest.mark.parametrize("where", [pytest.param("GPU", marks=pytest.mark.gpu), "emulated"])
@pytest.mark.parametrize(
    "mistake", [name if name in FEW else pytest.param(name, marks=pytest.mark.exhaustive) for name in MISTAKES]
)
def test_a_mistake_is_told(mistake, where, tmp_path, capsys, request) -> None:
    if where == "emulated":
        request.getfixturevalue("emulates")
    elif require_gpu() and shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    text, (changes, words) = TILES.read_text(encoding="utf-8"), MISTAKES[mistake]
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    path = tmp_path / "own.cu"
    path.write_text(text, encoding="utf-8")
    code = lab.main([str(path), *LAYER, *(["--emulate"] if where == "emulated" else [])])
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(words, printed), printed
    if where == "emulated":  # a GPU may compute the right output all the same
        assert code == (0 if "right" in words or "rounding" in words else 1)
