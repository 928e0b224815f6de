"""The split-precision kernels' own sources on the CPU, against float64: indices, barriers and values."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_runs import races, run_plan

from ece408_op.core.check import Comparison, compare
from ece408_op.core.kernel import CudaKernel
from ece408_op.kernels.cuda.split_precision import split_precision
from ece408_op.kernels.cuda.split_precision._candidate_tiles import candidates
from ece408_op.kernels.cuda.split_precision._tiles import (
    ImplicitGemmTile,
    MmaSyncTile,
    OneChannelTile,
    Tile,
    WarpgroupTile,
)
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip, Plan

EXHAUSTIVE = pytest.mark.exhaustive
LARGE, SMALL = Chip("large", (9, 0), 3, 227 * 1024), Chip("small", (9, 0), 2, 60 * 1024)
#: One block, which has all the tiles.
ALONE = Chip("alone", (9, 0), 1, 227 * 1024)
KINDS = (OneChannelTile, ImplicitGemmTile, WarpgroupTile, MmaSyncTile)
KERNEL_OF: dict[type[Tile], CudaKernel] = dict(zip(KINDS, split_precision.FP16X3))


def _ids(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value).replace(" ", "")


def _fitting(kind: type[Tile], problem: ConvProblem, chip: Chip, **wanted: object) -> list[Tile]:
    """Return the candidate tiles with these fields that fit the chip's shared memory."""
    return [
        tile
        for tile in candidates(kind, problem.with_batch(16), chip, 16, 2)
        if all(getattr(tile, name) == value for name, value in wanted.items())
    ]


def _run(
    kernel: CudaKernel, plan: Plan, problem: ConvProblem, x: np.ndarray, w: np.ndarray, folder: Path
) -> tuple[Comparison, int]:
    """Return the comparison of y with float64, and the number of images that were computed in float32."""
    report = run_plan(kernel.text(plan), plan, problem, x, w, folder)
    return compare(report.buffers["y"], x, w, kernel), int(report.buffers["state"].view(np.int32)[0])


def _random(problem: ConvProblem, positive: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return x and w, of both signs or positive."""
    rng = np.random.default_rng(408)
    x, w = rng.uniform(0, 1, problem.x_shape).astype("f"), rng.uniform(0, 1, problem.w_shape).astype("f")
    if positive:
        return x, w
    return 2 * x - 1, rng.standard_normal(problem.w_shape, dtype=np.float32)


#: Tiles of several images, bands, odd channels, few and many k-steps.
CASES = [
    (OneChannelTile, (19, 1, 12, 12, 5, 5), LARGE, {"tile_images": 8}),
    (MmaSyncTile, (3, 3, 10, 9, 4, 2), SMALL, {}),
    (WarpgroupTile, (3, 8, 12, 12, 52, 5), SMALL, {"filter_blocks": 2}),
    (WarpgroupTile, (3, 1, 15, 13, 9, 5), LARGE, {"filter_shifts": 4, "tile_images": 2}),
    (ImplicitGemmTile, (2, 5, 11, 14, 30, 3), LARGE, {"row_accumulators": 1}),
    (ImplicitGemmTile, (7, 4, 12, 12, 12, 3), ALONE, {"tile_images": 2, "bulk_store": True}),
]
#: Layers that are tried with several candidate tiles.
LAYERS = [
    (OneChannelTile, (4, 1, 28, 28, 50, 5), LARGE),
    (OneChannelTile, (2, 1, 40, 64, 6, 7), SMALL),
    (MmaSyncTile, (2, 6, 14, 30, 10, 3), LARGE),
    (WarpgroupTile, (4, 5, 16, 12, 11, 3), LARGE),
    (WarpgroupTile, (1, 24, 14, 15, 20, 6), LARGE),
    (WarpgroupTile, (2, 7, 12, 13, 20, 4), SMALL),
    (ImplicitGemmTile, (7, 3, 13, 15, 9, 3), ALONE),
    (ImplicitGemmTile, (3, 6, 30, 30, 16, 5), LARGE),
    (ImplicitGemmTile, (3, 1, 40, 64, 16, 5), SMALL),
]
MORE_CASES = [(*layer, share) for layer in LAYERS for share in (0.05, 0.35, 0.65, 0.95)]


@pytest.mark.parametrize(
    ("kind", "layer", "chip", "wanted"),
    [*CASES, *(pytest.param(*case, marks=EXHAUSTIVE) for case in MORE_CASES)],
    ids=_ids,
)
def test_it_is_right(kind, layer, chip, wanted, programs):
    """On random values, on small integers, whose sums are exact, and on two images that cannot be split."""
    problem = ConvProblem(*layer)
    share, fields = (0.5, wanted) if isinstance(wanted, dict) else (wanted, {})
    fitting = _fitting(kind, problem, chip, **fields)
    tile = fitting[int(share * len(fitting))]
    plan = split_precision.plan_of(tile, problem, chip)
    x, w = _random(problem)
    rng = np.random.default_rng(408)
    integers = [rng.integers(*limits, one.shape).astype("f") for limits, one in (((0, 256), x), ((-8, 9), w))]
    odd = x.copy()
    odd[0, 0, 3, 4], odd[-1, 0, 5, 5] = 1e-30, np.nan
    # All images of the tiles of the two.
    last = (problem.batch - 1) // tile.tile_images
    both = sum(image // tile.tile_images in (0, last) for image in range(problem.batch))
    wrong = []
    for name, values, most, images in (
        ("random values", (x, w), 5e-7, 0),
        ("integers", integers, 0, 0),
        ("images that cannot be split", (odd, w), np.inf, both),
    ):
        found, recomputed = _run(KERNEL_OF[kind], plan, problem, *values, programs)
        if not (found.passed and found.scaled <= most and recomputed == images):
            wrong.append(f"{name}: {found}, scaled {found.scaled}; {recomputed} images recomputed of {images}")
    assert not wrong, "\n".join(wrong)


#: What lowers the error of long sums: promotion, in tiles of mma_sync, of warpgroup for one output row, for two, and
#: with two warpgroups; without it, where there are nine k-steps or more, the correction for products of one sign.
LOWERED = [
    ("promotion", True, MmaSyncTile, (2, 12, 12, 12, 9, 7), {}),
    ("correction", True, ImplicitGemmTile, (2, 6, 14, 12, 9, 4), {}),
]
MORE_LOWERED = [
    ("promotion", False, MmaSyncTile, (2, 12, 12, 12, 9, 7), {}),
    ("promotion", True, WarpgroupTile, (2, 12, 12, 12, 9, 7), {}),
    ("promotion", True, WarpgroupTile, (1, 24, 10, 11, 9, 6), {"row_accumulators": 2}),
    ("promotion", False, WarpgroupTile, (1, 12, 10, 11, 50, 5), {"math_warps": 8}),
    ("correction", True, WarpgroupTile, (2, 12, 12, 12, 20, 7), {"row_accumulators": 3, "group_tiles": 3}),
]


@pytest.mark.parametrize(
    ("what", "positive", "kind", "layer", "wanted"),
    [*LOWERED, *(pytest.param(*case, marks=EXHAUSTIVE) for case in MORE_LOWERED)],
    ids=_ids,
)
def test_the_error_of_long_sums_is_lowered(what, positive, kind, layer, wanted, programs):
    problem, promoted = ConvProblem(*layer), what == "promotion"
    tile = next(
        tile
        for tile in _fitting(kind, problem, LARGE, tile_images=1, **wanted)
        if bool(tile.promotion_interval) == promoted
    )
    assert tile.k_steps > 8 or promoted
    x, w = _random(problem, positive)
    if positive and promoted:
        x = np.floor(256 * x)
    plan = split_precision.plan_of(tile, problem, LARGE)
    without = split_precision.plan_of(replace(tile, promotion_interval=0), problem, LARGE)
    if not promoted:
        without = replace(plan, config={**plan.config, "same_sign_bias": 0.0})
    errors = []
    for each in (plan, without):
        found, recomputed = _run(KERNEL_OF[kind], each, problem, x, w, programs)
        assert found.passed, str(found)
        assert recomputed == 0
        errors.append(found.scaled)
    assert errors[0] < (0.6 if promoted else 0.9) * errors[1], errors


#: Small layers with several tiles per block, so that pipeline stages are used again.
SEVERAL_TILES = {
    OneChannelTile: (9, 1, 12, 12, 5, 5),
    MmaSyncTile: (7, 3, 8, 8, 4, 3),
    WarpgroupTile: (5, 3, 8, 8, 7, 3),
    ImplicitGemmTile: (5, 3, 8, 8, 7, 3),
}


def _races(kind: type[Tile], change: Callable[[str], str], folder: Path) -> int:
    problem = ConvProblem(*SEVERAL_TILES[kind])
    fitting = _fitting(kind, problem, LARGE, tile_images=1)
    plan = split_precision.plan_of(fitting[len(fitting) // 2], problem, LARGE)
    text, changed = KERNEL_OF[kind].text(plan), change(KERNEL_OF[kind].text(plan))
    # Without a barrier, threads may also wait for ever.
    expected = ("race", "uninitialised") + (() if changed == text else ("deadlock",))
    return races(run_plan(changed, plan, problem, *_random(problem), folder, races=True, expected=expected))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in (WarpgroupTile, MmaSyncTile) else EXHAUSTIVE) for kind in KINDS]
)
def test_shared_memory_has_no_races(kind, programs):
    assert _races(kind, str, programs) == 0


#: Barriers that keep two accesses apart, with the text in front of them: of the producers, of a pipeline stage, and of
#: a block that splits filters.
BARRIERS = {
    "ranges": ("= range;\n        ", "named_barrier(PRODUCERS_BARRIER, PRODUCER_THREADS);"),
    "stage is empty": (
        "",
        "if (iteration >= STAGES) mbarrier_wait(s.barriers + EMPTY + stage, iteration / STAGES - 1);",
    ),
    "filters": ("atomicAdd(k_steps_with_low + lane, used_low);\n    ", "__syncthreads();"),
}


@pytest.mark.parametrize("name", BARRIERS)
def test_a_missing_barrier_is_found(name, programs):
    def without(text: str) -> str:
        before, barrier = BARRIERS[name]
        assert text.count(before + barrier) == 1
        return text.replace(before + barrier, before)

    assert _races(MmaSyncTile, without, programs) > 0
