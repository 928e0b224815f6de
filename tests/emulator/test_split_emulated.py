"""fp16x3_mma_sync's own sources, translated to C++ and run on the CPU: what can be known of them without a GPU.

The order of threads and everything asynchronous are not those of a GPU; indices, barriers and values are.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ece408_op.core.check import Comparison, compare
from ece408_op.core.kernel import CudaKernel
from ece408_op.kernels.cuda.split_precision import split_precision
from ece408_op.kernels.cuda.split_precision._candidate_tiles import by_columns, by_implicit, by_rows, by_teams, by_warps
from ece408_op.kernels.cuda.split_precision._tile import Tile
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip, Launch, Plan


def _compiles_halves() -> bool:
    probe = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    text = "#include <ucontext.h>\n_Float16 half(float x) { return x; }"
    return shutil.which("g++") is not None and subprocess.run(probe, input=text, text=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _compiles_halves(), reason="no g++ that knows 16-bit floats (13 or newer)")

HERE = Path(__file__).parent
EXHAUSTIVE = pytest.mark.exhaustive
LARGE, SMALL = Chip("large", (9, 0), 3, 227 * 1024), Chip("small", (9, 0), 2, 60 * 1024)
#: One block, which has all the tiles.
ALONE = Chip("alone", (9, 0), 1, 227 * 1024)
WAYS = {
    "columns": (split_precision.COLUMNS, by_columns),
    "rows": (split_precision.ROWS, by_rows),
    "warps": (split_precision.WARPS, by_warps),
    "teams": (split_precision.TEAMS, by_teams),
    "implicit": (split_precision.IMPLICIT, by_implicit),
}

#: What stands for functions that are made of instructions.
FUNCTIONS = {
    "meet": "inline void meet(int id, int count) { named[id].sync(count); }"
    "template <int ID, int COUNT> inline void meet() { meet(ID, COUNT); }",
    "make_gate": "inline void make_gate(Gate *gate, int count) { make_gate_on_cpu(gate, count); }",
    "arrive": "inline void arrive(Gate *gate) { arrive_on_cpu(gate); }",
    "opened": "inline bool opened(Gate *gate, int parity) { return opened_on_cpu(gate, parity); }",
    "copy": "template <int V> inline void copy(float *to, const float *from) "
    "{ require_aligned(to, 4 * V), require_aligned(from, 4 * V); for (int i = 0; i < V; i++) to[i] = from[i]; }",
    "to_halves": "inline unsigned to_halves(float a, float b) { return halves_of(a, b); }",
    "to_rest": "inline unsigned to_rest(float a, float b, unsigned word) { return rest_of(a, b, word); }",
    "multiply": "inline float multiply(float a, float b) { return a * b; }",
    "multiply_add": "inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }",
    "mma_if": "inline void mma_if(bool there, float (&d)[4], const Filters &low, const Filters &high, int word, "
    "const unsigned (&b)[2]) { const unsigned a[4] = {low.word[word], high.word[word], low.word[word + 1], "
    "high.word[word + 1]}; if (there) emulated_mma(d, a, b[0], b[1]); }",
    "mma": "inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) "
    "{ emulated_mma(d, a, b0, b1); }",
    "fence": "inline void fence() {}",
    "make_visible": "inline void make_visible() {}",
    "bulk_copy": "inline void bulk_copy(float *to, const float *from, int bytes) "
    "{ require_aligned(to, 16), require_aligned(from, 16); if (bytes % 16) std::abort(); "
    "std::memcpy(to, from, bytes); }",
    "bulk_sent": "inline void bulk_sent() {}",
    "bring": "inline void bring(float *to, const float *from, int bytes, Gate *) "
    "{ require_aligned(to, 16), require_aligned(from, 16); if (bytes % 16) std::abort(); "
    "std::memcpy(to, from, bytes); }",
    "expect": "inline void expect(Gate *gate, int) { arrive_on_cpu(gate); }",
    "await_read": "inline void await_read() {}",
    "commit": "inline void commit() {}",
    "wait": "template <int PENDING> inline void wait() {}",
}
ENTRY = """
static const float *x_, *w_;
static float *y_;
static unsigned *filters_;
static int *columns_, *marks_, images_;
extern "C" int run(const float *x, const float *w, float *y, unsigned *filters, int *columns, int *marks, int images,
                   const int *grids, const int *blocks) {
    x_ = x, w_ = w, y_ = y, filters_ = filters, columns_ = columns, marks_ = marks, images_ = images;
    void (*const entries[])() = {[] { split_weights(w_, filters_, columns_, marks_, images_); },
                                 [] { split(x_, y_, filters_, columns_, marks_, 0, images_); },
                                 [] { split_repair(x_, w_, y_, columns_, marks_, 0, images_); }};
    for (int i = 0; i < 3; i++) {
        gridDim.x = grids[i];
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
            if (run_block(blocks[i], entries[i])) return i + 1;
    }
    return 0;
}
"""


def _closed(text: str, at: int, brackets: str) -> int:
    """The place behind the bracket that closes the first one from there on."""
    depth, at = 1, text.index(brackets[0], at) + 1
    while depth:
        depth += {brackets[0]: 1, brackets[1]: -1}.get(text[at], 0)
        at += 1
    return at


def _translated(text: str) -> str:
    text = re.sub(r"extern __shared__ __align__\(\d+\) unsigned char memory\[\];", "", text)
    text = re.sub(r"#define (MMA_\w+\(d, a, b\)).*?m64n(\d+)k16.*", r"#define \1 emulated_wgmma(d, a, b, \2)", text)
    first = r"#define \1 (std::memset(d, 0, sizeof(d)), emulated_wgmma(d, a, b, \2))"
    text = re.sub(r"#define (FIRST_MMA_\w+\(d, a, b\)).*?m64n(\d+)k16.*", first, text)
    for name, new in FUNCTIONS.items():
        definition = re.compile(rf"(template <[^>]*>\s*)?__device__ __forceinline__ \w+ {name}(?=\()")
        replacement = new
        while found := definition.search(text):
            end = _closed(text, _closed(text, found.end(), "()"), "{}")
            text, replacement = text[: found.start()] + replacement + text[end:], ""
    text = re.sub(r'asm volatile\("("|cp\.async|setmaxnreg|fence\.proxy|griddepcontrol).*?\);', "", text)
    assert not re.search(r"^[^/\n]*\basm\b", text, re.M), "an instruction without a translation"
    return f'#include <utility>\n#include "cuda_on_cpu.h"\n{text}{ENTRY}'


def _aligned(size: int, fill: int) -> np.ndarray:
    room = np.full(size + 64, fill, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size]


def _copy(array: np.ndarray) -> np.ndarray:
    room = _aligned(array.nbytes, 0)
    room[:] = array.view(np.uint8).ravel()
    return room


def _fitting(way: str, problem: ConvProblem, chip: Chip, **wanted: object) -> list[Tile]:
    """The tiles that are like that and fit the chip's shared memory."""
    return [
        tile
        for tile in WAYS[way][1](problem.with_batch(16), chip, 16, 2)
        if tile.shared_bytes(problem) <= chip.shared_bytes
        and all(getattr(tile, name) == value for name, value in wanted.items())
    ]


def _built(text: str, folder: Path, *more: str) -> ctypes.CDLL:
    """The kernel's text as a library for the CPU."""
    source, built, library = (folder / f"block.{end}" for end in ("cpp", "o", "so"))
    source.write_text(_translated(text))
    # Functions' own static arrays would be one for all libraries of this process, whatever their sizes.
    # What runs for long under watch gains from -O2; all else is compiled for longer than it runs.
    level = "-O2" if "-DRACES" in more else "-O1"
    flags = [level, "-std=c++17", "-w", "-fpermissive", "-fno-gnu-unique", "-fPIC", f"-I{HERE}", *more]
    subprocess.run(["g++", *flags, "-c", str(source), "-o", str(built)], check=True, capture_output=True)
    subprocess.run(["g++", "-shared", str(built), "-o", str(library)], check=True, capture_output=True)
    return ctypes.CDLL(str(library))


def _run(
    kernel: CudaKernel, tile: Tile, problem: ConvProblem, chip: Chip, x: np.ndarray, w: np.ndarray, folder: Path
) -> tuple[Comparison, int]:
    """What a comparison of the output with float64 finds, and how many images were computed anew."""
    plan = split_precision.plan_of(tile, problem, chip, 16)
    out, repaired = _run_block(_built(kernel.text(plan), folder), plan, problem, chip, x, w)
    return compare(out, x, w, kernel), repaired


def _run_block(
    block: ctypes.CDLL, plan: Plan, problem: ConvProblem, chip: Chip, x: np.ndarray, w: np.ndarray
) -> tuple[np.ndarray, int]:
    """The output of all launches, a block behind the other, and how many images were computed anew."""
    launches = [step for step in plan.steps(problem.batch) if isinstance(step, Launch)]
    assert launches[1].shared <= chip.shared_bytes
    scratch = {name: _aligned(size, 0xFF) for name, size in plan.scratch.items()}
    out = _copy(np.full(problem.y_shape, np.nan, np.float32))
    arrays = [_copy(x), _copy(w), out, *scratch.values()]
    sizes = [np.array([each[0] for each in sizes], np.int32) for sizes in zip(*((s.grid, s.block) for s in launches))]
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    ends = [ctypes.c_void_p(array.ctypes.data) for array in sizes]
    status = block.run(*pointers, problem.batch, *ends)
    assert status == 0, f"launch {status}: threads wait for ever, or a barrier is not left as it was"
    return out.view(np.float32).reshape(problem.y_shape), int(scratch["marks"].view(np.int32)[0])


#: Tiles of several images, bands, parts of bands, blocks that share filters, odd channels, few and many steps.
CASES = [
    ("columns", (19, 1, 12, 12, 5, 5), LARGE, {"images": 8, "ahead": 1}),
    ("rows", (2, 6, 14, 14, 16, 5), LARGE, {"sets": 2, "pairs": True}),
    ("warps", (3, 3, 10, 9, 4, 2), SMALL, {}),
    ("teams", (2, 6, 12, 12, 40, 3), LARGE, {"filter_blocks": 2}),
    ("teams", (3, 1, 15, 13, 9, 5), LARGE, {"rows": 4, "images": 2}),
    ("implicit", (2, 5, 11, 14, 40, 3), LARGE, {"sets": 1}),
    ("implicit", (7, 4, 12, 12, 12, 3), ALONE, {"images": 2, "bulk": True, "one_run": True}),
]
MORE_CASES = [
    ("columns", (4, 1, 28, 28, 50, 5), LARGE, {"images": 2, "stationary": False}),
    ("rows", (7, 2, 17, 15, 28, 4), LARGE, {"sets": 3, "images": 2, "bulk": False, "filters_first": True}),
    ("warps", (2, 6, 14, 14, 10, 3), LARGE, {"quads": True}),
    ("teams", (2, 6, 16, 16, 16, 5), LARGE, {"sets": 3}),
    ("implicit", (9, 3, 14, 16, 9, 3), ALONE, {"images": 1, "outs": 2, "ahead": True}),
    ("columns", (5, 1, 12, 12, 5, 5), LARGE, {}),
    ("columns", (2, 1, 40, 64, 6, 5), SMALL, {"images": 1}),
    ("columns", (5, 1, 16, 20, 6, 7), LARGE, {"images": 2, "stationary": True}),
    ("rows", (7, 6, 30, 30, 16, 5), LARGE, {"sets": 2, "images": 1, "bulk": True, "filters_first": False}),
    ("rows", (8, 6, 30, 30, 16, 5), LARGE, {"sets": 4, "images": 1, "bulk": True, "filters_first": True, "ahead": 1}),
    ("rows", (5, 3, 14, 12, 20, 3), LARGE, {"sets": 3, "bulk": True}),
    ("rows", (3, 3, 15, 12, 20, 4), LARGE, {"sets": 3, "pairs": False}),
    ("warps", (2, 5, 14, 30, 7, 3), SMALL, {"images": 1}),
    ("teams", (2, 7, 12, 13, 20, 4), SMALL, {"sets": 2}),
    ("teams", (1, 24, 14, 15, 20, 8), LARGE, {"sets": 1}),
    ("teams", (3, 3, 14, 13, 7, 3), LARGE, {"rows": 2}),
    ("teams", (4, 5, 16, 12, 11, 3), LARGE, {"sets": 4, "images": 3}),
    ("teams", (2, 7, 16, 14, 9, 7), LARGE, {"sets": 2}),
    ("teams", (3, 2, 9, 8, 9, 2), LARGE, {"sets": 1}),
    ("implicit", (3, 6, 30, 30, 16, 5), LARGE, {"sets": 2, "images": 1, "bulk": True, "ahead": True}),
    ("implicit", (5, 3, 12, 13, 20, 4), LARGE, {"sets": 2, "images": 2}),
    ("implicit", (2, 2, 15, 17, 9, 3), LARGE, {"sets": 4, "images": 1}),
    ("implicit", (8, 3, 14, 16, 9, 3), ALONE, {"images": 1, "outs": 1, "ahead": False}),
    ("implicit", (7, 3, 13, 15, 9, 3), ALONE, {"images": 1, "outs": 0}),
    ("implicit", (7, 3, 12, 14, 40, 3), ALONE, {"images": 2, "sets": 1, "bulk": True, "filter_blocks": 2}),
    ("implicit", (3, 1, 40, 64, 19, 5), SMALL, {"sets": 2, "images": 1, "bulk": True}),
]


@pytest.mark.parametrize(
    ("way", "layer", "chip", "wanted"),
    [*CASES, *(pytest.param(*case, marks=EXHAUSTIVE) for case in MORE_CASES)],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_it_is_right(way, layer, chip, wanted, tmp_path):
    kernel, problem = WAYS[way][0], ConvProblem(*layer)
    fitting = _fitting(way, problem, chip, **wanted)
    rng = np.random.default_rng(408)
    x = rng.uniform(-1, 1, problem.x_shape).astype(np.float32)
    w = rng.standard_normal(problem.w_shape, dtype=np.float32)
    found, repaired = _run(kernel, fitting[len(fitting) // 2], problem, chip, x, w, tmp_path)
    assert found.passed, str(found)
    assert repaired == 0
    assert found.scaled < 5e-7


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in ("columns", "teams") else EXHAUSTIVE) for way in WAYS]
)
def test_sums_of_small_integers_are_exact(way, tmp_path):
    # Four steps at least: of fewer, no sum would be scaled.
    kernel, channels, size = WAYS[way][0], 1 if way == "columns" else 6, 5 if way in ("rows", "implicit") else 7
    problem = ConvProblem(2, channels, 14, 14, 9, size)
    tile = _fitting(way, problem, LARGE)[0]
    rng = np.random.default_rng(408)
    x = rng.integers(0, 256, problem.x_shape).astype(np.float32)
    w = rng.integers(-8, 9, problem.w_shape).astype(np.float32)
    found, repaired = _run(kernel, tile, problem, LARGE, x, w, tmp_path)
    assert (found.scaled, repaired) == (0, 0)


#: Of split; of fp16x3_warpgroup with its steps unrolled, and with so many that they are a loop, of one and two rows of sums.  # noqa: E501
PARTED = [
    ("warps", (2, 12, 12, 12, 9, 7), {}),
    ("teams", (2, 12, 12, 12, 9, 7), {}),
    pytest.param("teams", (1, 24, 10, 11, 9, 8), {"sets": 1}, marks=EXHAUSTIVE),
    pytest.param("teams", (1, 24, 10, 11, 9, 8), {"sets": 2}, marks=EXHAUSTIVE),
    pytest.param("teams", (1, 12, 10, 11, 50, 5), {"teams": 2}, marks=EXHAUSTIVE),
]


@pytest.mark.parametrize(("way", "layer", "wanted"), PARTED, ids=lambda value: str(value).replace(" ", ""))
@pytest.mark.parametrize("positive", [pytest.param(False, marks=EXHAUSTIVE), True], ids=["mixed", "positive"])
def test_long_sums_that_are_parted_lose_less(way, layer, wanted, positive, tmp_path):
    kernel, problem = WAYS[way][0], ConvProblem(*layer)
    tile = next(tile for tile in _fitting(way, problem, LARGE, images=1, **wanted) if tile.chunk)
    rng = np.random.default_rng(408)
    x = (rng.integers(0, 256, problem.x_shape) if positive else rng.uniform(-1, 1, problem.x_shape)).astype(np.float32)
    w = (rng.uniform(0, 1, problem.w_shape) if positive else rng.standard_normal(problem.w_shape)).astype(np.float32)
    errors = {}
    for each in (tile, replace(tile, chunk=0)):
        folder = tmp_path / str(each.chunk)
        folder.mkdir()
        found, repaired = _run(kernel, each, problem, LARGE, x, w, folder)
        assert found.passed, str(found)
        assert repaired == 0
        errors[each.chunk] = found.scaled
    assert errors[tile.chunk] < 0.6 * errors[0], errors


#: Of sums of nine steps or more that are not parted.
WHOLE = [
    ("rows", (2, 6, 14, 12, 9, 5), {}),
    pytest.param("implicit", (2, 6, 14, 12, 9, 4), {}, marks=EXHAUSTIVE),
    pytest.param("teams", (2, 12, 12, 12, 20, 7), {"sets": 3, "tiles": 3}, marks=EXHAUSTIVE),
]


@pytest.mark.parametrize(("way", "layer", "wanted"), WHOLE, ids=lambda value: str(value).replace(" ", ""))
def test_what_products_of_one_sign_lose_is_made_good(way, layer, wanted, tmp_path, monkeypatch):
    kernel, problem = WAYS[way][0], ConvProblem(*layer)
    tile = next(tile for tile in _fitting(way, problem, LARGE, images=1, **wanted) if not tile.chunk)
    assert tile.steps > 8
    rng = np.random.default_rng(408)
    x, w = (rng.uniform(0, 1, shape).astype(np.float32) for shape in (problem.x_shape, problem.w_shape))
    errors = []
    for bias in (split_precision._ONE_SIGN_BIAS, (0.0, 0.0)):
        monkeypatch.setattr(split_precision, "_ONE_SIGN_BIAS", bias)
        folder = tmp_path / str(bias[0])
        folder.mkdir()
        found, repaired = _run(kernel, tile, problem, LARGE, x, w, folder)
        assert found.passed, str(found)
        assert repaired == 0
        errors.append(found.scaled)
    assert errors[0] < 0.9 * errors[1], errors


@pytest.mark.parametrize("way", WAYS)
def test_an_image_that_cannot_be_split_is_computed_anew(way, tmp_path):
    kernel, problem = WAYS[way][0], ConvProblem(3, 1 if way == "columns" else 6, 14, 14, 9, 5)
    tile = _fitting(way, problem, LARGE, images=1)[0]
    rng = np.random.default_rng(408)
    x = rng.uniform(-1, 1, problem.x_shape).astype(np.float32)
    w = rng.standard_normal(problem.w_shape, dtype=np.float32)
    x[1, 0, 5, 5] = np.nan
    x[2, 0, 3, 4] = 1e-30
    found, repaired = _run(kernel, tile, problem, LARGE, x, w, tmp_path)
    assert found.passed, str(found)
    assert repaired == 2


#: Several tiles for every block, of small layers: every word that is read or written in shared memory is looked at.
WATCHED = {
    "columns": (9, 1, 12, 12, 5, 5),
    "rows": (6, 3, 9, 8, 9, 3),
    "warps": (7, 3, 8, 8, 4, 3),
    "teams": (5, 3, 8, 8, 7, 3),
    "implicit": (5, 3, 8, 8, 7, 3),
}


def _races(way: str, change: Callable[[str], str], folder: Path) -> int:
    """1 where an access to shared memory is not in order with another, told of on standard error; else 0."""
    kernel, problem = WAYS[way][0], ConvProblem(*WATCHED[way])
    fitting = _fitting(way, problem, LARGE, images=1)
    plan = split_precision.plan_of(fitting[len(fitting) // 2], problem, LARGE, 16)
    rng = np.random.default_rng(408)
    x = rng.uniform(-1, 1, problem.x_shape).astype(np.float32)
    w = rng.standard_normal(problem.w_shape, dtype=np.float32)
    # Linked without the sanitizer's library: what it would have is in races_on_cpu.h.
    block = _built(change(kernel.text(plan)), folder, "-fsanitize=thread", "-DRACES")
    _run_block(block, plan, problem, LARGE, x, w)
    return block.races_found()


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in ("teams", "warps") else EXHAUSTIVE) for way in WAYS]
)
def test_shared_memory_has_no_races(way, tmp_path):
    assert _races(way, str, tmp_path) == 0


#: Barriers that keep two accesses apart: of the loaders, of their gates, of a block that splits filters.
BARRIERS = {
    "extremes": ("s.found[NP + thread / 32] = least;\n        ", "meet<LOADED, LOADERS>();"),
    "planes are free": ("", "await(s.gates + EMPTY + half, turn / 2 - 1);"),
    "columns": ("atomicAdd(rests + lane, steps_with_rest);\n    ", "__syncthreads();"),
}


@pytest.mark.parametrize("name", BARRIERS)
def test_a_barrier_left_out_is_found(name, tmp_path):
    def without(text: str) -> str:
        before, barrier = BARRIERS[name]
        assert text.count(before + barrier) == 1
        return text.replace(before + barrier, before)

    assert _races("warps", without, tmp_path) == 1
