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
#: The others are tested exhaustively.
FEW = ("no barrier", "half precision")


@pytest.mark.parametrize("where", [pytest.param("GPU", marks=pytest.mark.gpu), "emulated"])
@pytest.mark.parametrize(
    "mistake", [name if name in FEW else pytest.param(name, marks=pytest.mark.exhaustive) for name in MISTAKES]
)
def test_a_mistake_is_told(
    mistake: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
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
