"""Split precision for layers with many channels, on Hopper: ``general.cu``, and ``pointwise.cu`` for 1 x 1 filters.

The error, as a share of sum |x||w|, is that of ``split_precision``, except for the error of the sums. An accumulator is
promoted after at most 128 products. So truncation costs at most 128 times 2^-22, whatever the length of the sum, and
each promotion costs one or two roundings of 2^-24. The sums of the low products are 2^-10 of the main sums. With one
component ``general.cu`` promotes nothing: 2^-22 per product is below the errors of the factors up to about 4,000
products.

In a data gradient, a value below 2^-28 of the largest of its image or filter errs by up to 2^-50 of that one (with one
component 2^-39) instead of 2^-22 of itself: a network's gradients spread so far in most layers, and recomputing their
images took longer than all products. The error of such a value matters only if all other values of a sum are as small.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import numpy as np

from ece408_op.core.kernel import EPS16, CudaKernel, reduced_precision_bound
from ece408_op.problem import ATTRIBUTES, DATA_GRADIENT, ConvProblem
from ece408_op.runtime.launch import GRID_YZ, SCRATCH_BYTES, Chip, Launch, Plan, ceil_div

from .. import cudnn
from ._convolution import Convolution
from ._wgmma import WGMMA_KERNEL
from ._wide_tiles import THREADS, WideTile, fp16x3_bound, limits, split_filters

_FOLDER = Path(__file__).parent
#: What all kernels for wide layers begin with.
SHARED_SOURCES = tuple(
    _FOLDER / f"{file}.cuh"
    for file in ("../denormals", "instructions", "tma", "range", "split_arrays", "recompute", "wide_tile")
)
#: And those with the main loop of general.cu.
GEMM_SOURCES = (*SHARED_SOURCES, _FOLDER / "implicit_gemm_tma.cuh")
#: Threads of range_of_images; channels and pixels of a block of split_images.
_RANGE_THREADS, _SPLIT_TILE = 512, 64
#: About how many values a block of range_of_images reads; the most blocks per image.
_RANGE_VALUES, _MOST_RANGE_BLOCKS = 1 << 15, 16
#: Blocks of recompute_images per multiprocessor.
_RECOMPUTE_BLOCKS = 4
#: The fewest channels, filters and products per sum for which tensor cores are profitable.
_FEWEST_CHANNELS, _FEWEST_FILTERS, _FEWEST_PRODUCTS = 12, 16, 64


def range_blocks(own: Convolution) -> int:
    """Return the number of blocks that find the range of an image."""
    return max(1, min(_MOST_RANGE_BLOCKS, own.groups * own.channels * own.area // _RANGE_VALUES))


def split_images(own: Convolution, source: str, images: int) -> tuple[Launch, Launch]:
    """Return the launches that write float32 images into the buffers split_x and x_scales."""
    blocks = (ceil_div(own.area, _SPLIT_TILE), ceil_div(own.input_channels, _SPLIT_TILE), images)
    arguments = (source, "ranges", "split_x", "x_scales", "listed", "first", "images")
    ranges, searched = (range_blocks(own), images, 1), (source, "ranges", "listed", "first")
    return (
        Launch("range_of_images", ranges, (_RANGE_THREADS, 1, 1), searched),
        Launch("split_images", blocks, (THREADS, 1, 1), arguments),
    )


def _recomputed(source: str, target: str, chip: Chip) -> Launch:
    arguments = (source, "w", target, "w_exponents", "listed", "first", "images")
    return Launch("recompute_images", (_RECOMPUTE_BLOCKS * chip.multiprocessors, 1, 1), (THREADS, 1, 1), arguments)


def _filter_buffers(components: int, own: Convolution) -> dict[str, int]:
    return {"split_w": 2 * components * own.filter_values, "w_exponents": 4 * own.all_filters}


def _general(components: int, problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    own = Convolution.of(problem)
    source, _, target = problem.operands
    image_bytes = 2 * components * own.area * own.input_channels
    images = max(1, min(problem.batch, SCRATCH_BYTES // image_bytes, own.most_images, GRID_YZ))
    tile = WideTile.of(components, own, chip, own.most_images)  # one binary for every batch

    @cache
    def steps(count: int) -> tuple[Launch, ...]:
        maps = (*tile.image_maps("split_x", own, count), *tile.filter_maps(own))
        gemm = (*maps, "x_scales", "w_exponents", target, "first", "images")
        return (
            *split_images(own, source, count),
            tile.gemm("implicit_gemm_tma", own, count, chip, gemm),
            _recomputed(source, target, chip),
        )

    scratch = {
        **_filter_buffers(components, own),
        "split_x": image_bytes * images,
        "ranges": 8 * range_blocks(own) * images,
        "x_scales": 8 * images,
        "listed": 4 * (1 + images),
    }
    config = tile.config(own, range_blocks=range_blocks(own))
    return Plan(tile.defines, images, steps, (split_filters(own, np.int32(0)),), scratch=scratch, config=config)


def _pointwise(components: int, problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    own = Convolution.of(problem)
    source, _, target = problem.operands
    # The list of images to recompute has two words per image.
    images = max(1, min(problem.batch, own.most_images, SCRATCH_BYTES // 8))
    tile = WideTile.pointwise(components, own, chip)

    @cache
    def steps(count: int) -> tuple[Launch, ...]:
        arguments = (source, *tile.filter_maps(own), "w_exponents", target, "listed", "first", "images")
        return (
            split_filters(own, "images"),
            tile.gemm("pointwise_gemm", own, count, chip, arguments),
            _recomputed(source, target, chip),
        )

    scratch = {**_filter_buffers(components, own), "listed": 4 * (1 + 2 * images)}
    return Plan(tile.defines, images, steps, scratch=scratch, config=tile.config(own, promotion_stages=1))


def bound(components: int, problem: ConvProblem) -> float:
    """Return the largest |y - exact| as a share of sum |x||w|, with a promotion every PROMOTED_PRODUCTS."""
    n = problem.products
    if components == 1:
        return reduced_precision_bound(EPS16, 2.0**-22)(problem) + 2.0**-22
    # A pointwise stage has at least 16 products, and two roundings: of its sum and of the total.
    return fp16x3_bound(n, 2 * ceil_div(n, 16) + 1, n)


def _recommended(components: int, problem: ConvProblem, chip: Chip) -> bool:
    own = Convolution.of(problem)
    enough = own.channels >= _FEWEST_CHANNELS and own.filters >= _FEWEST_FILTERS
    enough = enough and problem.products >= _FEWEST_PRODUCTS
    return enough and not (components == 2 and cudnn.is_faster_than_fp16x3(problem, chip))


def _kernel(name: str, components: int, summary: str) -> CudaKernel:
    pointwise = name == "pointwise"
    return CudaKernel(
        f"fp16x{2 * components - 1}_{name}",
        summary if components == 2 else f"fp16x3_{name} with the high components alone",
        (*(SHARED_SOURCES if pointwise else GEMM_SOURCES), _FOLDER / f"{name}.cu", _FOLDER / "recompute_images.cu"),
        partial(_pointwise if pointwise else _general, components),
        partial(limits, pointwise),
        partial(bound, components),
        **WGMMA_KERNEL,
        precision="float32" if components == 2 else "tf32",
        arithmetic=f"fp16x{2 * components - 1}",
        recommended=partial(_recommended, components),
        features=ATTRIBUTES | {DATA_GRADIENT},
    )


_KERNELS = (
    ("pointwise", "1 x 1 filters by wgmma, inputs converted on their way to shared memory"),
    ("general", "implicit GEMM by wgmma and TMA, three fp16 products per float32 product"),
)
#: Three fp16 products per float32 product, in order of preference; and one.
FP16X3, FP16X1 = (tuple(_kernel(name, components, summary) for name, summary in _KERNELS) for components in (2, 1))
