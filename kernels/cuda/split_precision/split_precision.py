"""The split-precision kernels: float32-class products on fp16 tensor cores, with three fp16 products each, or with one.

``split.cuh`` has the arithmetic and its sources, ``docs/numerics.md`` measurements. Four kernels, in both precisions,
share how inputs and filters are split (``convolution.cu``) and how images that cannot be split are computed in float32
(``recompute_images.cu``). They differ in how they multiply. Two of them compute data gradients too.

The error, as a share of sum |x||w|. Let u = 2^-11 be the rounding to fp16; values are scaled by powers of two so that
the largest of a tile, or of a filter, lies in [2^14, 2^15):

- A value v >= 2^-14 is high + low / 2^11 + rest. high errs by at most u v. The remainder is exact, is scaled by 2^11
  and rounded to low, which errs by u of it or, among fp16's denormal numbers, by 2^-25 in low's scale, 2^-36 in v's.
  Both are at most 2^-22 v. Tiles with a smaller value are not split, so |rest| <= 2^-22 v for every value.
- The product low low is left out: u^2 = 2^-22. So the three products err by at most (3 + 2^-9) 2^-22 of |x||w|.
- Tensor cores align the terms of a sum to the largest and truncate the rest (Fasi et al. 2021): at most 2^-22 per
  product added, as in ``tensor_core``. The sums of high low and low high are 2^-10 of the main one, and add as much
  less.
- Truncation is always towards zero, so sums are too small in the mean, by 0.15 2^-23 per k-step as measured. The bias
  correction multiplies y by as much (``split.cuh``), for no more k-steps than products. Products of one sign lose
  more: long sums without promotion are corrected by up to 0.8 2^-23 per k-step for that, and by at most 0.2 2^-23 per
  product.
- Accumulators of long sums are promoted every six k-steps where a thread has the registers: less is truncated, and
  less corrected. What moves is rounded at most once per 96 products, by 2^-24.
- One rounding joins the sums, one adds the two small ones, one adds what was promoted, one undoes the scale: 2^-22 in
  all.

With one component both factors err by u. That is as precise as tf32, whose numbers have as many bits, and keeps the
whole range of float32, which fp16 lacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from itertools import islice
from pathlib import Path

from ece408_op.core.kernel import CudaKernel, reduced_precision_bound, sum_bound
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip, Launch, Plan, ceil_div, layer_defines

from ._candidate_tiles import ALIGNED, LONG_SUM, MOST_IMAGES, candidates, kernel_name, tile_for
from ._convolution import Convolution
from ._tiles import ImplicitGemmTile, MmaSyncTile, OneChannelTile, Tile, WarpgroupTile
from ._wgmma import WGMMA_KERNEL

_FOLDER = Path(__file__).parent
#: Blocks of recompute_images per multiprocessor; threads of its blocks and of those that split filters.
_RECOMPUTE_BLOCKS, _THREADS = 2, 256
#: Shorter sums err by less in plain float32, (1 + 1) 2^-24 for two products, than the split of one product does here.
_SHORT_SUM = 16
#: The largest layers that were timed, rounded up: channels, filters, and sizes of filters.
_TIMED_CHANNELS, _TIMED_FILTERS, _TIMED_KERNELS = 32, 64, range(3, 10)
#: Candidates that tuning measures.
_MEASURED_TILES = 6
#: Blocks of the smallest call that was timed and was faster than without tensor cores.
_FEWEST_BLOCKS = 10
#: The most bands per image, which load some rows twice, for which ``implicit_gemm`` was faster than others.
_MOST_BANDS = 4
#: Images per launch: each takes 8 bytes of scratch memory. Pixels per image, which recompute_images counts.
_MOST_IMAGES, _MOST_PIXELS = 1 << 24, 1 << 30
#: With fewer filters, most columns of a padded convolution's or a gradient's product are empty.
_FEWEST_FILTERS = 4
#: The latency of a call's three launches, and the memory traffic per millisecond, of an H200.
_LATENCY, _BYTES = 0.012, 4e9
#: The error of rounding to fp16, and what a product adds to the error of a tensor core's sum.
_EPS, _EPS_SUM = 2.0**-11, 2.0**-22
#: The mean truncation bias per k-step, in units of 2^-23: docs/numerics.md.
_TRUNCATION_BIAS = 0.15
#: The same-sign bias per k-step: it grows with the sum, by the first number per k-step, up to the second, and is
#: limited per product. It lies between what uniform data lose and what small integers do, whose products have less to
#: truncate. K-steps have 16 products, but may be filled in part; sums that fill at least a fourth never meet the limit
#: per product.
_SAME_SIGN_BIAS, _SAME_SIGN_BIAS_PER_PRODUCT = (0.02, 0.8), 0.2
#: Chips to ask for where none is known: the first with the instructions.
_AMPERE, _HOPPER = Chip("any", (8, 0), 1, 99 * 1024), Chip("any", (9, 0), 1, 227 * 1024)


def split_bound(problem: ConvProblem) -> float:
    """Return the largest |y - exact| as a share of sum |x||w|, as derived above."""
    sums = sum_bound(problem.products, _EPS_SUM * (1 + 2.0**-9) + 2.0**-24 / 96)
    corrections = ((_TRUNCATION_BIAS + _SAME_SIGN_BIAS_PER_PRODUCT) * problem.products + 1) * 2.0**-23
    return (3 + 2.0**-9) * 2.0**-22 + sums + 2.0**-22 + corrections


def plain_convolution(problem: ConvProblem) -> ConvProblem:
    """Return the convolution that is computed: for a data gradient, that of y, with channels and filters exchanged."""
    own = Convolution.of(problem)
    sizes = (own.channels, own.height, own.width, own.filters, own.kernel_height)
    return ConvProblem(problem.batch, *sizes, pad=(own.pad_height, own.pad_width))


def plan_of(tile: Tile, problem: ConvProblem, chip: Chip) -> Plan:
    """Return the launches for a tile: split the filters, convolve, and compute in float32 what cannot be split."""
    layer, (source, _, target) = tile.layer, problem.operands
    filter_blocks = tile.padded_tiles if tile.wgmma else tile.column_tiles

    @cache
    def steps(images: int) -> tuple[Launch, ...]:
        tiles = ceil_div(images, tile.tile_images) * tile.tiles_per_image
        # Programmatic dependent launches; with little to do they cost more than they hide.
        overlap = chip.capability >= (9, 0) and tiles * tile.filter_blocks >= chip.multiprocessors
        resident = max(1, chip.multiprocessors // tile.filter_blocks)
        grid, block = (min(tiles, resident) * tile.filter_blocks, 1, 1), (tile.threads, 1, 1)
        blocks, threads = (_RECOMPUTE_BLOCKS * chip.multiprocessors, 1, 1), (_THREADS, 1, 1)
        split = ("w", "filters", "filter_scales", "state", "images")
        common = ("filter_scales", "state", "first", "images")
        convolved = (source, target, "filters", *common)
        # The filters are split again for each launch, and with them the lists in `state` are emptied.
        return (
            Launch("split_precision_filters", (filter_blocks, 1, 1), threads, split),
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
        # In the range that was timed, with sums whose error in float32 is not smaller, and enough blocks.
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
        """The rooflines of what the tile computes and loads, and of the layer's memory traffic, one after the other."""
        tile = tile_for(kind, problem, chip, ALIGNED, components)
        return math.inf if tile is None else _LATENCY + problem.batch * tile.milliseconds + problem.bytes / _BYTES

    def tiles(problem: ConvProblem, chip: Chip, aligned: int) -> list[Mapping[str, int]]:
        if problem.needs:  # the tuning table has plain convolutions only
            return []
        found = candidates(kind, problem.with_batch(MOST_IMAGES), chip, aligned, components)
        return [{name: int(getattr(tile, name)) for name in tile.choices} for tile in islice(found, _MEASURED_TILES)]

    def plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
        tile = tile_for(kind, plain_convolution(problem), chip, aligned, components)
        assert tile is not None, "expected a problem without reasons against it"
        return plan_of(tile, problem, chip)

    shared = ("../layer", "../denormals", "instructions", "range", "recompute", "split", "block")
    return CudaKernel(
        kernel_name(kind, components),
        kind.summary if components == 2 else f"{kernel_name(kind, 2)} with one fp16 product instead of three",
        (
            *(_FOLDER / f"{name}.cuh" for name in shared),
            *(_FOLDER / f"{name}.cu" for name in (*kind.sources, "split_filters", "recompute_images", "convolution")),
        ),
        plan,
        limits,
        split_bound if components == 2 else reduced_precision_bound(_EPS, _EPS_SUM),
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
