"""The split-precision kernels: float32 products on fp16 tensor cores, as three fp16 products (fp16x3) or one (fp16x1).

``split.cuh`` has the arithmetic and its sources, ``docs/numerics.md`` measurements. Four kernels, each in both
precisions, share the code that splits inputs and filters (``convolution.cu``) and the code that computes in float32 the
images that cannot be split (``recompute_images.cu``). They differ in how they multiply. Two of them compute data
gradients too.

The error, as a share of sum |x||w|. Let u = 2^-11 be the rounding to fp16; values are scaled by powers of two so that
the largest of a tile, or of a filter, lies in [2^14, 2^15):

- A value v >= 2^-14 is high + low / 2^11 + rest. high errs by at most u v. The remainder is exact, is scaled by 2^11
  and rounded to low, which errs by u of it or, among fp16's denormal numbers, by 2^-25 in low's scale, 2^-36 in v's.
  Both errors are at most 2^-22 v. Tiles with a smaller value are not split, so |rest| <= 2^-22 v for every value.
- The product low low is left out: u^2 = 2^-22. So the three products err by at most (3 + 2^-9) 2^-22 of |x||w|.
- Tensor cores align the terms of a sum to the largest and truncate the rest (Fasi et al. 2021): at most 2^-22 per
  product added, as in ``tensor_core``. The sums of high low and low high are 2^-10 of the main sum, and so are their
  errors.
- Truncation is always towards zero, so sums are too small on average, by a measured 0.15 2^-23 per k-step. The bias
  correction enlarges y by as much (``split.cuh``), for no more k-steps than products. Products of one sign lose
  more: for these, long sums without promotion are corrected by up to another 0.8 2^-23 per k-step, and by at most
  0.2 2^-23 per product.
- Accumulators of long sums are promoted every six k-steps if a thread has the registers: then less is truncated, and
  less corrected. A promoted value is rounded at most once per 96 products, by 2^-24.
- Four roundings remain: one joins the main and the small sums, one adds the two small sums, one adds the promoted sum,
  one undoes the scale: 2^-22 in all.

With one component both factors err by u. That is as precise as tf32, whose numbers have as many bits. The scales keep
the whole range of float32, which plain fp16 lacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from itertools import islice
from pathlib import Path

from ece408_op.core.kernel import EPS16, CudaKernel, reduced_precision_bound, sum_bound
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip, Launch, Plan, ceil_div, layer_defines

from ._candidate_tiles import ALIGNED, LONG_SUM, MOST_IMAGES, candidates, kernel_name, tile_for
from ._convolution import Convolution
from ._tiles import ImplicitGemmTile, MmaSyncTile, OneChannelTile, Tile, WarpgroupTile
from ._wgmma import WGMMA_KERNEL

_FOLDER = Path(__file__).parent
#: Blocks of recompute_images per multiprocessor; threads per block of recompute_images and split_precision_filters.
_RECOMPUTE_BLOCKS, _THREADS = 2, 256
#: Below this many products, a sum in plain float32 ((1 + 1) 2^-24 for two products) errs less than the split does.
_SHORT_SUM = 16
#: The largest layers that were timed, rounded up: channels, filters, and sizes of filters.
_TIMED_CHANNELS, _TIMED_FILTERS, _TIMED_KERNELS = 32, 64, range(3, 10)
#: Candidates that tuning measures.
_MEASURED_TILES = 6
#: Blocks of the smallest timed call that was faster than kernels without tensor cores.
_FEWEST_BLOCKS = 10
#: The most bands per image with which ``implicit_gemm`` was faster than other kernels; bands load some rows twice.
_MOST_BANDS = 4
#: The most images per launch: each takes 8 bytes of scratch memory. An image must have fewer pixels than _MOST_PIXELS,
#: because recompute_images counts them.
_MOST_IMAGES, _MOST_PIXELS = 1 << 24, 1 << 30
#: The fewest filters of a padded convolution or a gradient: with fewer, most GEMM columns are empty.
_FEWEST_FILTERS = 4
#: On an H200: the latency of a call's three launches in milliseconds, and the memory traffic in bytes per millisecond.
_LATENCY, _BYTES = 0.012, 4e9
#: The error that a product adds to a tensor core's sum.
_EPS_SUM = 2.0**-22
#: The mean truncation bias per k-step, in units of 2^-23: docs/numerics.md.
_TRUNCATION_BIAS = 0.15
#: The same-sign bias per k-step: the first number times the k-steps of the sum, at most the second, and limited per
#: product. It lies between the losses of uniform data and of small integers, whose products have fewer bits to
#: truncate. A k-step has 16 products, but may be partly filled; sums that fill at least a fourth never reach the limit
#: per product.
_SAME_SIGN_BIAS, _SAME_SIGN_BIAS_PER_PRODUCT = (0.02, 0.8), 0.2
#: The chips to assume if none is known: the first ones with the instructions.
_AMPERE, _HOPPER = Chip("any", (8, 0), 1, 99 * 1024), Chip("any", (9, 0), 1, 227 * 1024)


def split_bound(problem: ConvProblem) -> float:
    """Return the largest |y - exact| as a share of sum |x||w|, as derived above."""
    sums = sum_bound(problem.products, _EPS_SUM * (1 + 2.0**-9) + 2.0**-24 / 96)
    corrections = ((_TRUNCATION_BIAS + _SAME_SIGN_BIAS_PER_PRODUCT) * problem.products + 1) * 2.0**-23
    return (3 + 2.0**-9) * 2.0**-22 + sums + 2.0**-22 + corrections


def plain_convolution(problem: ConvProblem) -> ConvProblem:
    """Return the convolution that the kernel computes; a data gradient's has channels and filters exchanged."""
    own = Convolution.of(problem)
    sizes = (own.channels, own.height, own.width, own.filters, own.kernel_height)
    return ConvProblem(problem.batch, *sizes, pad=(own.pad_height, own.pad_width))


def plan_of(tile: Tile, problem: ConvProblem, chip: Chip) -> Plan:
    """Return the launches for a tile: split the filters, convolve, recompute images that cannot be split."""
    layer, (source, _, target) = tile.layer, problem.operands
    split_blocks = tile.padded_tiles if tile.wgmma else tile.column_tiles

    @cache
    def steps(images: int) -> tuple[Launch, ...]:
        tiles = ceil_div(images, tile.tile_images) * tile.tiles_per_image
        # Programmatic dependent launches: with little work they cost more time than they hide.
        overlap = chip.capability >= (9, 0) and tiles * tile.filter_blocks >= chip.multiprocessors
        resident = max(1, chip.multiprocessors // tile.filter_blocks)
        grid, block = (min(tiles, resident) * tile.filter_blocks, 1, 1), (tile.threads, 1, 1)
        blocks, threads = (_RECOMPUTE_BLOCKS * chip.multiprocessors, 1, 1), (_THREADS, 1, 1)
        split = ("w", "filters", "filter_scales", "state", "images")
        common = ("filter_scales", "state", "first", "images")
        convolved = (source, target, "filters", *common)
        # The filters are split again for each launch, and with them the lists in `state` are emptied.
        return (
            Launch("split_precision_filters", (split_blocks, 1, 1), threads, split),
            Launch("split_precision_convolution", grid, block, convolved, tile.shared_bytes, overlap),
            Launch("recompute_images", blocks, threads, (source, "w", target, *common), programmatic=overlap),
        )

    images = max(1, min(problem.batch, _MOST_IMAGES))
    scratch = {
        "filters": tile.filter_bytes,
        "filter_scales": 4 * 9 * tile.column_tiles,  # and per tile of eight columns, whether they cannot be split
        "state": 4 * (1 + 2 * images + tile.filter_blocks),  # block.cuh
    }
    (per_step, most), per_product = _SAME_SIGN_BIAS, _SAME_SIGN_BIAS_PER_PRODUCT
    config = {
        **asdict(Convolution.of(problem)),
        **tile.config,
        "long_sum": LONG_SUM,
        "truncation_bias": _TRUNCATION_BIAS,
        "same_sign_bias": min(per_step * tile.k_steps, most, per_product * layer.products / tile.k_steps),
    }
    defines = {**layer_defines(layer, tile.tile_images + 1), **tile.defines}
    return Plan(defines, images, steps, scratch=scratch, config=config)


def _kernel(kind: type[Tile], components: int) -> CudaKernel:
    wgmma, features = kind.wgmma, kind.features

    def shape_reasons(problem: ConvProblem) -> list[str]:
        own, reasons = Convolution.of(problem), []
        if kind is OneChannelTile:
            height, width = problem.output_height, problem.output_width
            if problem.channels != 1:
                reasons.append(f"channels: expected 1, got {problem.channels}")
            if width % 2 or height * width % 4:
                expected = "an even width and a multiple of 4 elements"
                reasons.append(f"output map: expected {expected}, got {height} x {width}")
        if not all(0 <= pad < own.kernel_height for pad in (own.pad_height, own.pad_width)):
            reasons.append(f"padding: expected less than the kernel {problem.kernel}, got {problem.pad}")
        if max(own.area, own.output_area) >= _MOST_PIXELS:
            reasons.append(f"image: fewer than 2^30 pixels, got {problem.height} x {problem.width}")
        return reasons

    def limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
        reasons, known = shape_reasons(problem), chip or (_HOPPER if wgmma else _AMPERE)
        if not reasons and tile_for(kind, plain_convolution(problem), known, 4, components) is None:
            memory = f"{known.shared_bytes} bytes of shared memory"
            reasons.append(f"tile: none of the layer fits {memory} and the registers")
        return reasons

    def recommended(problem: ConvProblem, chip: Chip) -> bool:
        # The sizes are in the timed range, float32 would not be more precise, and there are enough blocks.
        if not problem.needs <= features or shape_reasons(problem):
            return False
        layer = plain_convolution(problem)
        if layer.products < _SHORT_SUM or layer.kernel not in _TIMED_KERNELS:
            return False
        if layer.channels > _TIMED_CHANNELS or layer.filters > _TIMED_FILTERS:
            return False
        if problem.needs and layer.filters < _FEWEST_FILTERS:
            return False
        tile = tile_for(kind, layer, chip, ALIGNED, components)
        if tile is None or (tile.implicit_gemm and tile.tiles_per_image > _MOST_BANDS):
            return False
        return ceil_div(problem.batch, tile.tile_images) * tile.tiles_per_image * tile.filter_blocks >= _FEWEST_BLOCKS

    def predicted_milliseconds(problem: ConvProblem, chip: Chip) -> float:
        """The predicted time: the tile's arithmetic and loads, then the layer's memory traffic, not overlapped."""
        tile = tile_for(kind, problem, chip, ALIGNED, components)
        return math.inf if tile is None else _LATENCY + problem.batch * tile.milliseconds + problem.bytes / _BYTES

    def tiles(problem: ConvProblem, chip: Chip, aligned: int) -> list[Mapping[str, int]]:
        if problem.needs:  # the tuning table has only plain convolutions
            return []
        found = candidates(kind, problem.with_batch(MOST_IMAGES), chip, aligned, components)
        return [{name: int(getattr(tile, name)) for name in tile.choices} for tile in islice(found, _MEASURED_TILES)]

    def plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
        tile = tile_for(kind, plain_convolution(problem), chip, aligned, components)
        assert tile is not None, "expected a problem without reasons against it"
        return plan_of(tile, problem, chip)

    shared = ("../layer", "../denormals", "../vectors", "instructions", "range", "recompute", "split", "block")
    return CudaKernel(
        kernel_name(kind, components),
        kind.summary if components == 2 else f"{kernel_name(kind, 2)} with one fp16 product instead of three",
        (
            *(_FOLDER / f"{name}.cuh" for name in shared),
            *(_FOLDER / f"{name}.cu" for name in (*kind.sources, "split_filters", "recompute_images", "convolution")),
        ),
        plan,
        limits,
        split_bound if components == 2 else reduced_precision_bound(EPS16, _EPS_SUM),
        **WGMMA_KERNEL if wgmma else {"capability": (8, 0), "compiler": (11, 8)},
        precision="float32" if components == 2 else "tf32",
        arithmetic="fp16x3" if components == 2 else "fp16x1",
        recommended=recommended,
        predicted_milliseconds=predicted_milliseconds,
        tiles=tiles,
        features=features,
    )


_KINDS = (OneChannelTile, ImplicitGemmTile, WarpgroupTile, MmaSyncTile)
#: Three fp16 products per float32 product, in order of preference; and one.
FP16X3, FP16X1 = (tuple(_kernel(kind, components) for kind in _KINDS) for components in (2, 1))
ONE_CHANNEL, IMPLICIT_GEMM, WARPGROUP, MMA_SYNC = FP16X3
