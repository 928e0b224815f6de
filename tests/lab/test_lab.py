"""``ece408-lab`` as its user runs it: the verdict, the mistake and its line, the screen's size, exit codes, --watch."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from gpu_case import require_gpu

from ece408_op.core import reference
from ece408_op.core.explain import explain
from ece408_op.lab import __main__ as lab
from ece408_op.lab import __path__ as folders
from ece408_op.lab import _check
from ece408_op.problem import ConvProblem

STARTERS = Path(folders[0]) / "starters"
#: A right file: a block has a tile of x and a filter in shared memory.
TILED = Path(__file__).parents[1] / "submissions" / "gpu" / "shared.cuh"
SMALL = ("--layer", "2x9x9x3x3")

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
needs_emulator = pytest.mark.usefixtures("emulates")


def changed(folder: Path, name: str, *changes: tuple[str, str], source: Path | None = None) -> Path:
    """The source, or the starter of the name's suffix, with other text in places."""
    starter = STARTERS / {".h": "new-forward.h", ".cu": "my_kernel.cu"}[Path(name).suffix]
    text = (source or starter).read_text(encoding="utf-8")
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


class Told(NamedTuple):
    """What the lab prints of the starter for the CPU with other text in places, as a regular expression."""

    words: str
    changes: tuple[tuple[str, str], ...]
    options: str = ""
    code: int = 1


KEPT = "static const std::vector<float> kept(k.dptr_, k.dptr_ + k.MSize());\n  const int B ="
ON_THE_CPU = {
    "b": Told("of image 0 for each image: b is missing in x's index", (("x[b][c]", "x[0][c]"),)),
    "compiler": Told(r"compile error bad.h:22:\d+: error", (("] = 0;", "] = 0"),), "--images 2"),
    "bounds": Told(r"out of bounds it touched memory.*\? \(see line 20\)", (("h < H_out", "h < H"),), "--images 2"),
    "crash": Told(
        "crashed forward threw: bad.h:14: Check failed",
        (("const int B = ", "CHECK_EQ(0, 1); const int B = "),),
        "--images 2",
    ),
    "adds": Told("right only while y is 0 before the call", (("y[b][m][h][w] = 0;", ""),), "--images 2", 0),
    "tied": Told("it may be tied to 10 images: try --images 10", (("b < B;", "b < 10;"),)),
    "tied, tried": Told("bad.h, on the CPU, 10 images: right", (("b < B;", "b < 10;"),), "--images 10", 0),
    "zeros of one channel": Told(
        r"WRONG 2 x 9 x 9, 3 filters of 3 x 3: \d+ of .* without the first channel: .* see line 23",
        (("int c = 0", "int c = 1"),),
        "--layer 1x9x9x3x3 2x9x9x3x3 --images 2",
    ),
    "few images": Told(
        "right for 4 images, and wrong for 100.*does not write the last image", (("b < B;", "b < B && b < 50;"),)
    ),
    "first filters": Told(
        "and wrong in a later one on other numbers: it keeps .* memory that it has not set; images .* are shown",
        (("const int B =", KEPT), ("k[m][c][p][q]", "kept[((m * C + c) * K + p) * K + q]")),
    ),
}


@needs_gxx
@pytest.mark.parametrize("name", ON_THE_CPU)
def test_what_is_told_of_a_changed_file(name, tmp_path, capsys):
    told = ON_THE_CPU[name]
    path = changed(tmp_path, "bad.h", *told.changes)
    assert lab.main([str(path), *SMALL, *told.options.split()]) == told.code
    printed = capsys.readouterr().out
    assert re.search(told.words, " ".join(printed.split())), printed
    assert len(printed.splitlines()) <= 40


@needs_gxx
def test_a_mistake_is_named_with_its_line(tmp_path, capsys):
    path, words = changed(tmp_path, "wrong.h", ("k[m][c][p][q]", "k[m][c][q][p]")), "p and q exchanged"
    assert lab.main([str(path), *SMALL, "--json", str(tmp_path / "out.json")]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("wrong.h, on the CPU, 4 images: wrong\n")
    joined = " ".join(printed.split())
    assert words in joined and ": see line 26. 26 | " in joined
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["status"], result["layers"][0]["explanation"]["line"]) == ("wrong", 26)
    assert words in result["layers"][0]["explanation"]["sentence"]


@needs_gxx
def test_a_right_file_is_timed_next_to_the_packages_kernels(tmp_path, capsys):
    path = changed(tmp_path, "right.h")
    assert lab.main([str(path), "--layer", "1x12x12x2x3", "3x9x8x2x3", "--images", "5"]) == 0
    printed = capsys.readouterr().out
    assert "1 x 12 x 12, 2 filters of 3 x 3, 5 images, milliseconds:" in printed
    for name in ("yours", "loops"):
        assert len(re.findall(rf"^  {name} +[0-9.]+  #+$", printed, re.M)) == 2


def test_a_sum_that_adds_to_y_is_forgiven_only_where_nothing_else_is_wrong():
    problem = ConvProblem(2, 1, 60, 60, 2, 3)
    x, w = _check.inputs(problem)
    y = (reference.convolve(x, w) + _check.FILL).astype(np.float32)
    found = explain(x, w, y, _check.FILL)
    assert _check.layer_entry(problem, found)["status"] == "right"
    race = _check.layer_entry(problem, found, [{"kind": "race"}])
    assert (race["status"], race["text"]) == ("wrong", []) and "output is right all the same" in race["note"]
    assert race["explanation"] is None  # the page shows one with the text
    y[:, :, 3] += 1
    assert _check.layer_entry(problem, explain(x, w, y, _check.FILL))["status"] == "wrong"


@needs_emulator
def test_a_cuda_file_is_emulated(tmp_path, capsys):
    path = changed(tmp_path, "right (1).cu")  # as a browser names a second download
    assert lab.main([str(path), *SMALL, "--emulate", "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("right (1).cu, emulated on the CPU, 1 image: right\n")
    assert "bytes of global memory per output" in printed
    assert "line 24: the 32 lanes of a warp read" in printed
    (layer,) = json.loads((tmp_path / "out.json").read_text())["layers"]
    assert layer["counters"]["sectors"] == sum(line["sectors"] for line in layer["lines"])
    assert layer["hints"][0]["line"] == 24


FIRST_FILTERS = (
    ("x.dptr_, k.dptr_,", "x.dptr_, kept,"),
    ("const int B", "static float *kept;\n  const size_t bytes = k.MSize() * sizeof(float);\n  const int B"),
    ("const dim3", "if (!kept) cudaMalloc(&kept, bytes), cudaMemcpy(kept, k.dptr_, bytes, KIND);\n  const dim3"),
    ("#define TILE", "#define KIND cudaMemcpyDeviceToDevice\n#define TILE"),
)
#: For each image a launch of small blocks.
BY_IMAGE = (("TILE 16", "TILE 2"), ("(y.dptr_, x.dptr_,", "(y[b].dptr_, x[b].dptr_,"))
LAUNCH = "convolve<<<grid, block, 0, y.stream_->stream_>>>"
OF_AN_IMAGE = "for (int b = 0; b < B; b++) convolve<<<dim3(M, tiles, tiles), block, 0, s>>>"
CONSTANT = (("#define TILE", "__constant__ float kept[1000];\n#define TILE"), ("k4d(m, c, p, q);", "kept[q];"))
EMULATED = {
    "tied": Told(
        "it may be tied to 10000 images: use x.shape_.0. instead.*out of bounds: |"
        "out of bounds: .*it may be tied to 10000 images: use x.shape_.0. instead",
        (("const int B = x.shape_[0]", "const int B = 10000"),),
    ),
    "one image": Told(
        "right for 1 image, and wrong for 4.*b is missing in x's index", (("x4d(b, c, h + p", "x4d(0, c, h + p"),)
    ),
    "one image, several channels": Told(
        "^(?!.*number of blocks).*right for 1 image, and wrong for 2 .*one map per image in x's index.*see line 33",
        (*BY_IMAGE, (LAUNCH, f"cudaStream_t s = 0; {OF_AN_IMAGE}"), ("x[b].dptr_", "x.dptr_ + b * H * W")),
        "--layer 1x9x9x3x3 2x9x9x3x3",
    ),
    "last tile": Told(
        "does not write rows 4 to 6 of 7 and columns 4 to 6 of 7: the last, partial tile may be missing.*see line 31",
        (("W) - K + TILE) / TILE", "W) - K + 1) / TILE"), ("TILE 16", "TILE 4")),
    ),
    "first filters": Told(
        "right in its first call, and wrong in a later one: it keeps something from call to call", FIRST_FILTERS
    ),
    "first filters, two layers": Told(
        "right 2 x 8 x 8, 3 filters of 3 x 3: WRONG right in a first call: it keeps something from call to call",
        FIRST_FILTERS,
        "--layer 2x9x9x3x3 2x8x8x3x3",
    ),
    "two dynamic arrays": Told(
        "wrong first and second begin at one address: a block has one array of dynamic shared memory",
        (
            ("= 0;\n", "= 1;\n  extern __shared__ float first[];\n  extern __shared__ float second[];\n"),
            ("p++)\n", "p++)  // extern __shared__ float none[];\n"),
        ),
    ),
    "too many in z": Told(
        "convolve: for 10000 images, gridDim.z would grow to 80000; at most 65535 are allowed",
        (
            ("blockIdx.z * TILE", "blockIdx.w * TILE"),
            ("blockIdx.x", "blockIdx.z"),
            ("blockIdx.w", "blockIdx.x"),
            ("B * M, tiles, tiles", "tiles, tiles, B * M"),
        ),
        "--layer 2x9x9x8x3",
        code=0,
    ),
    "an image at a time": Told(
        "convolve: blocks of 4 threads leave 28 of 32 lanes idle. convolve: the number of blocks is 48 for 1 image and",
        (*BY_IMAGE, (LAUNCH, f"cudaStream_t s = y.stream_->stream_;\n  {OF_AN_IMAGE}")),
        code=0,
    ),
    "an image at a time, on a stream, and a helper": Told(
        "^(?!.*number of blocks|.*helper: ).*convolve: blocks of 4 threads leave 28 of 32 lanes idle",
        (
            *BY_IMAGE,
            ("__global__ void convolve", "__global__ void helper() {}\n__global__ void convolve"),
            (LAUNCH, f"cudaStream_t s;\n  cudaStreamCreate(&s);\n  helper<<<1, 1>>>();\n  {OF_AN_IMAGE}"),
        ),
        code=0,
    ),
    "one block for few images": Told(
        r"reuse\)$",
        (
            (
                "blockIdx.y * TILE + threadIdx.x, w = blockIdx.z * TILE + threadIdx.y",
                "n / W_out % H_out, w = n % W_out",
            ),
            (
                "const int h",
                "const int H_out = H - K + 1, W_out = W - K + 1, n = blockIdx.x * 1024 + threadIdx.x;\n  int h",
            ),
            ("m = blockIdx.x % M, b = blockIdx.x / M", "m = n / W_out / H_out % M, b = n / W_out / H_out / M"),
            ("if (h > H - K || w > W - K)", "if (b >= B)"),
            ("const float *k, int M", "const float *k, int B, int M"),
            ("k.dptr_, M", "k.dptr_, B, M"),
            ("grid(B * M, tiles, tiles), block(TILE, TILE)", "grid((y.MSize() + 1023) / 1024), block(1024)"),
        ),
        code=0,
    ),
    "a constant that nothing writes": Told(
        "wrong __constant__ memory is 0 until cudaMemcpyToSymbol copies to it.*Your output is 0 everywhere", CONSTANT
    ),
    "a constant that is copied to": Told(
        "^(?!.*__constant__ memory is 0).*Your output is 0 everywhere",
        ((LAUNCH, f"float zeros[9] = {{}};\n  cudaMemcpyToSymbol(kept, zeros, 36);\n  {LAUNCH}"), *CONSTANT),
    ),
    "a stream that nothing waits for": Told(
        "wrong streams have no order: ",
        (
            (LAUNCH, "cudaStream_t s; cudaStreamCreate(&s);\n  convolve<<<grid, block, 0, s>>>"),
            ("k.dptr_, M", "kept, M"),
            ("const dim3", "float *kept; cudaMalloc(&kept, 324);\n  const dim3"),
        ),
    ),
    "a buffer that is not freed": Told(
        "cudaMalloc without cudaFree: each call may take more",
        (("const dim3", "void *own; cudaMalloc(&own, 64);\n  const dim3"),),
        code=0,
    ),
    "beyond": Told("line 2[05][^:]*: out of bounds: ", (("h > H - K ||", ""),)),
    "adds": Told("right only while y is 0 before the call", (("  y4d(b, m, h, w) = 0;\n", ""),), code=0),
    "lacking": Told(
        "unsupported line 5: the emulator does not have thrust/sort.h write the file without it, or check it on",
        (("mxnet/base.h", "thrust/sort.h"),),
    ),
    "syntax": Told("compile error line 17: ", (("TILE + threadIdx.x", "TILE + threadIdx.q"),)),
}


@needs_emulator
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name in ("adds", "syntax") else ()) for name in EMULATED],
)
def test_what_is_told_of_a_changed_cuda_file(name, tmp_path, capsys):
    told = EMULATED[name]
    path = changed(tmp_path, "bad.cu", *told.changes)
    assert lab.main([str(path), "--emulate", *(told.options.split() or SMALL)]) == told.code
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(told.words, printed), printed


@needs_emulator
@pytest.mark.parametrize(
    ("output", "words", "other"),
    [
        ("sum + x[10000000]", "3 x 3: WRONG line 38: out of bounds: reads", "elements are wrong"),
        ("sum + (x[170] == 1)", "all the same; a GPU.s may be wrong line 38: out of bounds:", "elements are wrong"),
        ("0", r"Your output is 0 everywhere\.", "channel"),
        ("sum * sum", r"The wrong elements are everywhere\.$", "9999"),
    ],
    ids=["ended", "reads beyond", "zeros", "everywhere"],
)
def test_what_is_told_of_an_output(tmp_path, capsys, output, words, other):
    path = changed(tmp_path, "tiles.cu", ("= sum;", f"= {output};"), source=TILED)
    assert lab.main([str(path), *SMALL, "--emulate"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(words, printed) and other not in printed, printed


#: A text of TILED and what replaces it, what the lab tells, as a regular expression, and its exit code.
MISTAKES = {
    "half precision": ("+= tile[", "+= (float)(__half)tile[", "rounding errors of half precision", 0),
    "no barrier": ("        __syncthreads();\n        for", "        for", r"lines \d+ and \d+: race", 1),
    "tile halo": ("? x4d", "&& i < TILE_WIDTH && j < TILE_WIDTH ? x4d", "its halo of K - 1 rows and columns", 1),
    "adds to y": ("= sum;", "+= sum;", "right only while y is 0 before the call", 0),
    "barrier in a branch": ("        __syncthreads();\n    }", "        if (h0 + ty < H_out) __syncthreads();\n    }",
                            r"lines? [\d and]+: (barrier|race)", 1),
}  # fmt: skip


@pytest.mark.parametrize("where", [pytest.param("GPU", marks=pytest.mark.gpu), "emulated"])
@pytest.mark.parametrize(
    "mistake",
    [pytest.param(one, marks=() if one in list(MISTAKES)[:2] else pytest.mark.exhaustive) for one in MISTAKES],
)
def test_a_mistake_is_told(mistake, where, tmp_path, capsys, request):
    if where == "emulated":
        request.getfixturevalue("emulates")
    elif require_gpu() and shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    before, after, words, code = MISTAKES[mistake]
    path = changed(tmp_path, "tiles.cu", ("TILE_WIDTH 16", "TILE_WIDTH 8"), (before, after), source=TILED)
    options = ["--emulate"] if where == "emulated" else []
    found = lab.main([str(path), "--layer", "3x13x13x10x3", "--images", "3", *options])
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(words, printed), printed
    assert where == "GPU" or found == code  # a GPU may compute the right output all the same


@needs_emulator
@pytest.mark.parametrize(
    ("content", "words"), [(b"\xef\xbb\xbf\n", "a.cu is empty"), ("x".encode("utf-16"), "a.cu is UTF-16 text")]
)
def test_a_file_that_no_compiler_reads_is_told_so(content, words, tmp_path, capsys):
    (tmp_path / "a.cu").write_bytes(content)
    assert lab.main([str(tmp_path / "a.cu"), "--emulate"]) == 1
    assert f"compile error\n  {words}" in capsys.readouterr().out


@needs_emulator
def test_the_later_courses_interface_is_named(tmp_path, capsys):
    path = tmp_path / "new-forward.cu"
    path.write_text('#include "gpu-new-forward.h"\n__host__ void GPUInterface::conv_forward_gpu(float *y) {}\n')
    assert lab.main([str(path), "--emulate"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert ": unsupported line 2: expected the course's forward(y, x, w) of 2017 to 2019" in printed
    assert printed.endswith("got GPUInterface::conv_forward_gpu")


def test_a_cuda_kernel_in_python_needs_a_gpu(capsys):
    path = Path(__file__).parents[1] / "submissions" / "python" / "on_the_gpu.py"
    assert lab.main([str(path), *SMALL, "--emulate"]) == 3
    assert "on_the_gpu.py: a CudaKernel in Python is not emulated" in capsys.readouterr().err


@needs_gxx
def test_a_layer_beyond_the_memory_is_one_line(tmp_path, capsys):
    size = 10**7  # more than any address space has
    lab.main(["new", str(tmp_path / "my.cu")])
    assert lab.main([str(tmp_path / "my.cu"), "--emulate", "--layer", f"1x{size}x{size}x1x1"]) == 3
    assert capsys.readouterr().err.startswith("ece408-lab: Unable to allocate")


@needs_gxx
def test_new_writes_a_right_file_and_replaces_none(tmp_path, capsys):
    path = tmp_path / "my_kernel.h"
    assert lab.main(["new", str(path)]) == 0
    assert len(path.read_text().splitlines()) <= 40
    assert lab.main([str(path), *SMALL, "--images", "1"]) == 0
    for given in (["new", str(path)], ["new", str(tmp_path / "kernel.txt")], [str(path), "--images", "10001"]):
        with pytest.raises(SystemExit, match="2"):
            lab.main(given)
    assert len((STARTERS / "my_kernel.cu").read_text().splitlines()) <= 40


def test_watch_ends_with_the_reader_of_its_output(tmp_path):
    (tmp_path / "new-forward.h").write_text("")
    command = [sys.executable, "-m", "ece408_op", "lab", str(tmp_path / "new-forward.h"), "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.close()
        try:
            assert run.wait(timeout=30) == 1
        finally:
            run.kill()


@needs_gxx
def test_watch_checks_again_at_each_save(tmp_path):
    path = changed(tmp_path, "own.h", ("[p][q]", "[q][p]"))
    command = [sys.executable, "-m", "ece408_op", "lab", str(path), *SMALL, "--images", "1", "--watch"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # A process started in the background may inherit that SIGINT is ignored, and the lab ignores it then too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline().endswith(": wrong\n")
        while not run.stdout.readline().startswith("    26 |"):
            assert run.poll() is None
        changed(tmp_path, "own.h")
        assert run.stdout.readline().endswith(": right\n")
        run.send_signal(signal.SIGINT)
        run.stdout.read()
        assert run.wait() == 130
