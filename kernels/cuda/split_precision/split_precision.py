"""Float32-class products on tensor cores: every operand is split into two 16-bit floats, or rounded to one.

Five kernels in each precision share how inputs and filters are split (``load.cu``, ``split_filters.cu``) and
how images that cannot be split are computed anew (``fallback.cu``); they differ in how they multiply.

The error, as a share of sum |x||w|. With u = 2^-11, a rounding to a 16-bit float, and values scaled by powers of two
so that the largest of a tile lies in [2^14, 2^15):

- A value v >= 2^-14 is high + low / 2^11 + rest. high errs by at most u v; what it leaves is exact, is scaled by
  2^11 and rounded to low, which errs by u of it, or, below the normal numbers, by 2^-25 in low's scale, 2^-36 in v's.
  Both are at most 2^-22 v. Tiles with a smaller value are not split, so |rest| <= 2^-22 v for every value.
- The product low low is left out: u^2 = 2^-22. So the three products make at most (3 + 2^-9) 2^-22 of |x||w|.
- Tensor cores cut the terms of a sum off at the largest one's last bit (M. Fasi, N. Higham, M. Mikaitis, S. Pranesh,
  Numerical behavior of NVIDIA tensor cores, 2021): at most 2^-22 for each product added, as in ``tensor_core``. The
  sums of high low and low high are 2^-10 of the main one, and add as much less.
- Cut off always towards zero, sums come out too small, and the more so the longer they are; y is scaled by as much
  more as was measured in the mean (``split_filters.cu``): by 0.15 2^-23 a step, no more steps than products. Products
  of one sign lose more: long sums that are not parted are scaled by up to 0.8 2^-23 a step for that, and in all by
  no more than 0.2 2^-23 for each product.
- Long sums are parted every few steps, six at least, where a thread has the registers (``accumulators.cu``): less is
  cut off and made good, and what was moved is rounded once for the places of 96 products or more, by 2^-24.
- One rounding joins the sums, one adds both of the small ones, one what was moved, one undoes the scale: 2^-22 in all.

Rounded to one 16-bit float, both factors err by u: as precise as tf32, whose numbers keep as many bits, in the whole
range of float32, which 16-bit floats do not have.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from ece408_op.core.kernel import CudaKernel, reduced_precision_bound, roofline_milliseconds
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import REGISTERS, Chip, Launch, Plan, ceil_div, layer_defines

from ..ladder import register_tiled
from ._candidate_tiles import LONG_SUM
from ._cost_model import ALIGNED, estimate, tile_for
from ._shared_memory_layout import NO_TAP
from ._tile import Tile

_FOLDER = Path(__file__).parent
#: Blocks of the repairing kernel on a multiprocessor, and threads of a block that splits filters.
_REPAIR_BLOCKS = 2
_FILTER_THREADS = 256
#: Shorter sums err by less in plain float32, (1 + 1) 2^-24 for two products, than the parts of one product here.
_SHORT_SUM = 16
#: The most channels, the most filters, and the filters' sizes of the layers that were timed, rounded up.
_TIMED_CHANNELS, _TIMED_FILTERS, _TIMED_KERNELS = 32, 64, range(3, 10)
#: Blocks of the smallest call that was timed and was faster than without tensor cores.
_FEWEST_BLOCKS = 10
#: Bands of an image, each with rows of its own to load, of which ``fp16x3_implicit_gemm`` was faster than others.
_MOST_BANDS = 4
#: Images of one launch: their marks take 8 bytes each.
_MOST_A_ROUND = 1 << 24
#: Ways in which the words of half a step lie that a thread keeps addresses for.
_MOST_PATTERNS = 5
#: Rounding to a 16-bit float; what a product adds to the error of a tensor core's sum.
_EPS, _EPS_SUM = 2.0**-11, 2.0**-22
#: Units of 2^-23 by which sums come out too small a step, as measured in the mean: TRUNCATION_BIAS.
_TRUNCATION_BIAS = 0.15
#: And of how many more, where all products have one sign and are as large as they can be: ONE_SIGN_BIAS. It grows with
#: the sum, which leaves products the fewer bits: so much a step, and no more than that. Between what uniform data lose
#: and what small integers do, in whose products there is less to cut off. Steps hold 16 products, but may be filled in
#: part; those of a sum that hold a fourth of them are not held up by the limit for each product.
_ONE_SIGN_BIAS, _ONE_SIGN_OF_A_PRODUCT = (0.02, 0.8), 0.2
_SOURCES = {
    "warps": ("accumulators.cu", "mma.cu", "mma_sync.cu"),
    "columns": ("mma.cu", "one_channel.cu"),
    "rows": ("mma.cu", "output_rows.cu", "stationary_filters.cu"),
    "teams": ("accumulators.cu", "wgmma.cuh", "warpgroup_mma.cu"),
    "implicit": ("wgmma.cuh", "implicit_gemm.cu"),
}
#: Ways of multiplying that are instructions of one architecture.
_BY_WGMMA = ("teams", "implicit")
#: Chips whose figures nobody gave: the first with the instructions.
_AMPERE, _HOPPER = Chip("any", (8, 0), 1, 99 * 1024), Chip("any", (9, 0), 1, 227 * 1024)


def split_bound(problem: ConvProblem) -> float:
    """The largest |y - exact| as a share of sum |x||w|: see above."""
    n = problem.products * (_EPS_SUM * (1 + 2.0**-9) + 2.0**-24 / 96)
    more = ((_TRUNCATION_BIAS + _ONE_SIGN_OF_A_PRODUCT) * problem.products + 1) * 2.0**-23
    return (3 + 2.0**-9) * 2.0**-22 + n / (1 - n) + 2.0**-22 + more


def _reasons(way: str, parts: int, problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    reasons = []
    if way == "columns":
        pixels = problem.output_height * problem.output_width
        if problem.channels != 1:
            reasons.append(f"channels: expected 1, got {problem.channels}")
        if problem.output_width % 2 or pixels % 4:
            reasons.append(
                "output map: expected an even width and a multiple of 4 elements, got "
                f"{problem.output_height} x {problem.output_width}"
            )
    known = chip or (_HOPPER if way in _BY_WGMMA else _AMPERE)
    if not reasons and tile_for(way, problem, known, 4, parts) is None:
        held = " and a warp's registers" if way in ("columns", "rows", "implicit") else ""
        reasons.append(f"tile: none of the layer fits {known.shared_bytes} bytes of a block's shared memory{held}")
    return reasons


def _suits(way: str, parts: int, problem: ConvProblem, chip: Chip) -> bool:
    """Whether the layer lies in the range that was timed, its tiles are as many as on the layers with the fewest
    images, and the sum is long enough to err as much as a product's parts."""
    if problem.products < _SHORT_SUM or problem.kernel not in _TIMED_KERNELS:
        return False
    if problem.channels > _TIMED_CHANNELS or problem.filters > _TIMED_FILTERS:
        return False
    tile = tile_for(way, problem, chip, ALIGNED, parts)
    if tile is None or (way == "implicit" and (tile.filter_blocks > 1 or tile.tiles_an_image(problem) > _MOST_BANDS)):
        return False
    blocks = ceil_div(problem.batch, tile.images) * tile.tiles_an_image(problem) * tile.filter_blocks
    return blocks >= _FEWEST_BLOCKS


def _plan(way: str, parts: int, problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    tile = tile_for(way, problem, chip, aligned, parts)
    assert tile is not None, "a problem that _reasons takes"
    return plan_of(tile, problem, chip, aligned)


def plan_of(tile: Tile, problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    """The launches for a tile: the filters are split, the images multiplied, those that cannot be split repaired."""
    columns = tile.column_tiles(problem)
    blocks = tile.padded_tiles(problem) if tile.teams else columns
    repair = register_tiled.REGISTER_TILED.plan(problem, chip, aligned)
    (repairing,) = [step for step in repair.steps(1) if isinstance(step, Launch)]

    @cache
    def steps(images: int) -> tuple[Launch, ...]:
        items = ceil_div(images, tile.images) * tile.tiles_an_image(problem)
        held = max(1, chip.multiprocessors // tile.filter_blocks)
        grid = (min(items, held) * tile.filter_blocks, 1, 1)
        arguments = ("x", "y", "filters", "columns", "marks", "first", "images")
        again = ("x", "w", "y", "columns", "marks", "first", "images")
        # On chips whose kernels wait by themselves; with little to do the call costs more than it hides.
        early = chip.capability >= (9, 0) and items >= held
        # The filters are split for every round anew, which as a rule is the only one: the list is emptied with them.
        return (
            Launch(
                "split_weights", (blocks, 1, 1), (_FILTER_THREADS, 1, 1), ("w", "filters", "columns", "marks", "images")
            ),
            Launch("split", grid, (tile.threads, 1, 1), arguments, tile.shared_bytes(problem), early),
            Launch("split_repair", (_REPAIR_BLOCKS * chip.multiprocessors, 1, 1), repairing.block, again, 0, early),
        )

    images = max(1, min(problem.batch, _MOST_A_ROUND))
    # A count and a list of images, and a mark for each; the queues of tiles.
    marks = 4 * (1 + 2 * images + blocks)
    scratch = {"filters": tile.filter_bytes(problem), "columns": 4 * 9 * columns, "marks": marks}
    wide = max(layer_defines(problem, tile.images + 1)["WIDE"], repair.defines["WIDE"])
    defines = {**repair.defines, **_defines(tile, problem), "WIDE": wide}
    return Plan(defines, images, steps, scratch=scratch, config=repair.config)


def _defines(tile: Tile, problem: ConvProblem) -> dict[str, int | str]:
    each, most = _ONE_SIGN_BIAS
    defines: dict[str, int | str] = {
        "PARTS": tile.parts,
        "WGMMA": int(tile.teams > 0),
        "TRUNCATION_BIAS": f"{_TRUNCATION_BIAS}f",
        "ONE_SIGN_BIAS": f"{min(each * tile.steps, most, _ONE_SIGN_OF_A_PRODUCT * problem.products / tile.steps)}f",
        "LONG_SUM": LONG_SUM,
        "FOLDED": int(tile.folded),
        "IMPLICIT": int(tile.across > 0),
        "R": tile.rows,
        "RA": tile.sets,
        "IMG": tile.images,
        "TR": tile.super_rows,
        "TW": tile.columns,
        "S": tile.stride,
        "PL": tile.plane,
        "KSTEPS": tile.steps,
        "CHUNK": tile.chunk or tile.steps,
        "NT": tile.tiles,
        "GB": tile.groups(problem),
        "NC": tile.warps,
        "NP": tile.loaders,
        "W_SHARED": int(tile.shared_weights),
        "STATIONARY": int(tile.stationary),
        "DIRECT": int(tile.direct),
        "PAIR_ROWS": int(tile.row_steps == 0 and not tile.folded),
        "XV": tile.vector,
        "OUT_FLOATS": tile.out_floats(problem),
        "OUT_PITCH": tile.out_pitch,
        "BULK": int(tile.bulk),
        "AHEAD": int(tile.ahead),
        "TAP_LIST": ", ".join(f"{{{plane}, {row}, {column}}}" for plane, row, column in tile.taps),
    }
    if tile.across:
        lows: dict[str, int | str] = {"MMA_LOW(d, a, b)": "", "FIRST_MMA_LOW(d, a, b)": ""}
        if tile.parts == 2:
            lows = _wgmma("MMA_LOW", tile.across, shared=True)
            lows |= _wgmma("FIRST_MMA_LOW", tile.across, shared=True, first=True)
        lows |= _wgmma("FIRST_MMA_HIGH", tile.across, first=True)
        more = {"ACROSS": tile.across, "PAIRS": int(tile.pairs), "OUTS": max(1, tile.outs), **_registers(tile)}
        return {**defines, **more, **_wgmma("MMA_HIGH", tile.across), **lows}
    if tile.stationary and not tile.folded:
        first = int(tile.filters_first)
        return {**defines, "KR": tile.row_steps, "PAIRS": int(tile.pairs), "FILTERS_FIRST": first}
    if tile.teams:
        high = _wgmma("MMA_HIGH", 8 * tile.tiles * tile.parts)
        low = _wgmma("MMA_LOW", 8 * tile.tiles) if tile.parts == 2 else {"MMA_LOW(d, a, b)": ""}
        rest = tile.steps - problem.kernel * tile.row_steps
        halves, patterns = _patterns(tile)
        lists: dict[str, int | str] = {
            "HALF_LIST": ", ".join(f"{{{place}, {pattern}}}" for place, pattern in halves) or "{0}",
            "PATTERN_LIST": ", ".join(map(str, patterns)) or "0",
            "PATTERNS": len(patterns),
        }
        return {**defines, **_registers(tile), "KR": tile.row_steps, "KREST": rest, **lists, **high, **low}
    defines["MT"] = tile.pixels
    if tile.folded:
        return {**defines, "YV": tile.y_vector, "AFFINE": int(_affine(tile)), "HALF_LIST": _halves(tile)}
    return {**defines, "KEEP_A": int(tile.keep_a), "QUADS": int(tile.quads)}


def _registers(tile: Tile) -> dict[str, int | str]:
    """Registers of the threads of teams, and of those that load: a multiprocessor's, shared out."""
    warps = tile.warps + tile.loaders
    there = REGISTERS // (32 * warps) // 8 * 8 * warps  # that the block begins with
    left = (there - 4 * tile.teams * tile.registers) // tile.loaders // 8 * 8
    return {"TEAM_REGISTERS": tile.registers, "LOADER_REGISTERS": left}


def _wgmma(name: str, columns: int, shared: bool = False, first: bool = False) -> dict[str, int | str]:
    """The instruction of so many columns as a macro: sums d, B's descriptor b, A in registers or another descriptor.

    first: d is what it makes, whatever it was.
    """
    sums = columns // 2
    registers = ", ".join(f"%{i}" for i in range(sums))
    factor = f"%{sums}" if shared else "{" + ", ".join(f"%{i}" for i in range(sums, sums + 4)) + "}"
    shape = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16"
    outputs = ", ".join(f'"{"=" if first else "+"}f"((d)[{i}])' for i in range(sums))
    inputs = '"l"(a)' if shared else ", ".join(f'"r"((a)[{i}])' for i in range(4))
    flags = f"{0 if first else 1}, 1, 1, 0{', 0' if shared else ''}"
    text = f"{shape} {{{registers}}}, {factor}, %{sums + (1 if shared else 4)}, {flags};"
    return {f"{name}(d, a, b)": f'asm volatile("{text}" : {outputs} : {inputs}, "l"(b))'}


def _places(tile: Tile) -> list[int]:
    return [plane * tile.plane + row * tile.stride + column for plane, row, column in tile.taps]


def _affine(tile: Tile) -> bool:
    """Whether the four words of every half of a step lie alike; a half of no words does."""
    places = _places(tile)
    real = [i for i in range(0, len(places), 4) if set(tile.taps[i : i + 4]) != {NO_TAP}]
    halves = [[place - places[i] for place in places[i : i + 4]] for i in real]
    return all(half == halves[0] for half in halves)


def _patterns(tile: Tile) -> tuple[list[tuple[int, int]], list[int]]:
    """Of every half of a filter row's steps, where its first word lies, in bytes, and which pattern its words make;
    of every pattern, a half that has it. Nothing where patterns are too many for a thread's registers."""
    halves: list[tuple[int, int]] = []
    patterns: dict[tuple[int, ...], int] = {}
    places = _places(tile)
    for i in range(0, 8 * tile.row_steps, 4):
        words = tuple(place - places[i] for place in places[i : i + 4])
        patterns.setdefault(words, i // 4)
        halves.append((4 * places[i], list(patterns).index(words)))
    return (halves, list(patterns.values())) if len(patterns) <= _MOST_PATTERNS else ([], [])


def _halves(tile: Tile) -> str:
    """Where the first word of every half of a step lies, in bytes."""
    places = _places(tile)
    return ", ".join(str(0 if tile.taps[i] == NO_TAP else 4 * places[i]) for i in range(0, len(places), 4))


def _kernel(name: str, way: str, parts: int, summary: str) -> CudaKernel:
    planes = "implicit_gemm_operands.cu" if way == "implicit" else "operands.cu"
    files: tuple[str, ...] = ("../layer.cuh", "../denormals.cuh", "../ladder/register_tiled.cu")
    files += ("split_filters.cu", "load.cu", planes, *_SOURCES[way], "entry.cu", "fallback.cu")
    teams = way in _BY_WGMMA
    return CudaKernel(
        name,
        summary,
        tuple(_FOLDER / file for file in files),
        partial(_plan, way, parts),
        partial(_reasons, way, parts),
        split_bound if parts == 2 else reduced_precision_bound(_EPS, _EPS_SUM),
        capability=(9, 0) if teams else (8, 0),
        compiler=(12, 0) if teams else (11, 8),
        precision="float32" if parts == 2 else "tf32",
        arithmetic="fp16x3" if parts == 2 else "fp16x1",
        # wgmma is an instruction of that one architecture.
        options=("--gpu-architecture=sm_90a",) if teams else (),
        exact_capability=teams,
        recommended=partial(_suits, way, parts),
        predicted_milliseconds=roofline_milliseconds if way == "columns" else partial(estimate, way, parts),
    )


COLUMNS = _kernel(
    "fp16x3_one_channel", "columns", 2, "split operands on tensor cores, one channel, no staging of outputs"
)
ROWS = _kernel(
    "fp16x3_output_rows",
    "rows",
    2,
    "split operands on tensor cores, filters in registers, inputs shared by output rows",
)
TEAMS = _kernel("fp16x3_warpgroup", "teams", 2, "split operands on tensor cores by wgmma, inputs shared by output rows")
IMPLICIT = _kernel(
    "fp16x3_implicit_gemm", "implicit", 2, "split operands on tensor cores by wgmma, which reads inputs itself"
)
WARPS = _kernel("fp16x3_mma_sync", "warps", 2, "split operands on tensor cores by mma.sync")
ROUNDED_COLUMNS = _kernel("fp16x1_one_channel", "columns", 1, "fp16x3_one_channel with the high parts alone")
ROUNDED_ROWS = _kernel("fp16x1_output_rows", "rows", 1, "fp16x3_output_rows with the high parts alone")
ROUNDED_TEAMS = _kernel("fp16x1_warpgroup", "teams", 1, "fp16x3_warpgroup with the high parts alone")
ROUNDED_IMPLICIT = _kernel("fp16x1_implicit_gemm", "implicit", 1, "fp16x3_implicit_gemm with the high parts alone")
ROUNDED = _kernel("fp16x1_mma_sync", "warps", 1, "split with the high parts alone")
