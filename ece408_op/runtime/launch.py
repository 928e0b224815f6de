"""How a CUDA kernel is launched, in integers alone: grids, blocks, arguments, constants, scratch memory.

A kernel's plan is made from the problem and the chip's figures, so that all of it is tested without
a GPU; ``cuda.py`` and ``prepared_launch.py`` carry it out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Union

import numpy as np

from ece408_op.problem import ConvProblem, PooledProblem, WeightGradient

#: CUDA's limits on a grid's x, and on its y and z.
GRID_X = 2**31 - 1
GRID_YZ = 65535
#: Shared memory that a block has without asking, and constant memory, in bytes.
SHARED_BYTES = 48 * 1024
CONSTANT_BYTES = 64 * 1024
#: Registers of a multiprocessor, on every chip of compute capability 5.0 or later (CUDA C++ Programming Guide).
REGISTERS = 65536
#: Bytes of a kernel's scratch memory that grow with the images of a launch, or with its partial sums: small buffers
#: come on top, and one image may need more.
SCRATCH_BYTES = 1 << 28
#: Scratch buffers begin at multiples of this many bytes of device memory.
SCRATCH_ALIGNMENT = 256

Pair = tuple[int, int]
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class TensorMap:
    """A kernel's parameter that describes a tensor of 16-bit floats to TMA, the unit that copies tiles of tensors.

    A row of the box spans 32, 64 or 128 bytes, over which it is swizzled in shared memory. What lies outside the tensor
    reads as zero.

    Attributes:
        buffer: the name of the memory.
        sizes: elements of each dimension, the innermost first; the elements lie without gaps.
        box: what one copy takes: elements of each size, or, with ``im2col``, channels and pixels.
        im2col: the columns and rows at which the first and the last window begin, the latter counted from the last
            column and row, and the columns and rows from one window to the next; None for an ordinary tile.
        offset: the tensor's first byte in the buffer.
    """

    buffer: str
    sizes: tuple[int, ...]
    box: tuple[int, ...]
    im2col: tuple[Pair, Pair, Pair] | None = None
    offset: int = 0


#: A buffer ("x", "w", "y" or a scratch name: a pointer), a range's "first" image (long long) or number of "images"
#: (int), a number whose NumPy type is the parameter's type, or a TMA descriptor.
Argument = Union[str, np.int32, np.int64, np.float32, np.float64, TensorMap]


@dataclass(frozen=True)
class Chip:
    """The properties of a GPU that a plan may use.

    Attributes:
        name: the name that CUDA reports.
        capability: the compute capability, such as (9, 0).
        multiprocessors: the number of multiprocessors.
        shared_bytes: the most shared memory of a block, in bytes.
        compiler: the release of NVRTC, which may be older than the chip.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int = SHARED_BYTES
    compiler: tuple[int, int] = (13, 0)

    @property
    def architecture(self) -> int:
        """The compute capability as compilers write it: 90 for 9.0."""
        return 10 * self.capability[0] + self.capability[1]


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        entry: the name of the ``extern "C" __global__`` function.
        grid: blocks in x, y and z.
        block: threads per block in x, y and z.
        args: the arguments, see ``Argument``.
        shared: dynamic shared memory per block, in bytes.
        programmatic: whether to use programmatic dependent launch: the kernel may start before the previous launch has
            ended, and waits for it itself.
    """

    entry: str
    grid: Triple
    block: Triple
    args: tuple[Argument, ...]
    shared: int = 0
    programmatic: bool = False


@dataclass(frozen=True)
class CopyToConstant:
    """A copy of the first ``bytes`` bytes of the buffer ``source`` to the ``__constant__`` array ``symbol``."""

    symbol: str
    source: str
    bytes: int


@dataclass(frozen=True)
class LibraryCall:
    """A call of a library, for one caller at a time.

    Attributes:
        buffers: the names of the buffers that it uses.
        call: ``call(addresses, stream)`` queues its work, with the address of each buffer by name.
    """

    buffers: tuple[str, ...]
    call: Callable[[Mapping[str, int], Any], None]


Step = Union[Launch, CopyToConstant, LibraryCall]


@dataclass(frozen=True)
class Plan:
    """Everything that one call does on the device.

    Attributes:
        defines: names and values of the ``#define``s in front of the source; they do not depend on the batch.
        images_per_launch: images of each range except the last.
        steps: ``steps(n)`` returns the launches, copies and calls for a range of n images; range r runs on stream
            r mod ``streams``.
        setup: steps that run once, before all ranges.
        streams: the number of CUDA streams.
        scratch: additional buffers: name to bytes.
        config: the tile's constants, which the source gets as
            ``struct Config { static constexpr int name = value; ... };``.
    """

    defines: Mapping[str, int | str]
    images_per_launch: int
    steps: Callable[[int], tuple[Step, ...]]
    setup: tuple[Step, ...] = ()
    streams: int = 1
    scratch: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, bool | int | float] = field(default_factory=dict)

    @property
    def scratch_bytes(self) -> int:
        """The bytes of all scratch buffers, one after another, each at a multiple of SCRATCH_ALIGNMENT."""
        return sum(round_up(size, SCRATCH_ALIGNMENT) for size in self.scratch.values())

    @property
    def repeatable(self) -> bool:
        """Whether calls share nothing, so that prepared launches and CUDA graphs can repeat one."""
        steps = (*self.setup, *self.steps(1))
        return self.streams == 1 and not any(isinstance(step, (CopyToConstant, LibraryCall)) for step in steps)

    def launch_ranges(self, batch: int) -> list[tuple[int, int]]:
        """Return the first image and the number of images of each range."""
        most = self.images_per_launch
        return [(first, min(most, batch - first)) for first in range(0, batch, most)]


#: A kernel's plan for a problem on a chip, its pointers all multiples of that many bytes (4, 8 or 16).
Planner = Callable[[ConvProblem, Chip, int], Plan]


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below a / b."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b not below a."""
    return ceil_div(a, b) * b


def even_shares(total: int, most: int) -> list[int]:
    """Return ceil(total / n) for n = 1, 2, ..., without those above ``most``, the smallest first, each once."""
    return [share for share in range(1, min(total, most) + 1) if ceil_div(total, ceil_div(total, share)) == share]


def layer_defines(problem: ConvProblem, images: int = 1) -> dict[str, int | str]:
    """Return the layer's sizes as ``#define``s: C, H, W, M and K, WIDE, and POOL or WEIGHT_GRADIENT for such a problem.

    The attributes L, G, STRIDE_H, STRIDE_W, PAD_H and so on are defined where they, or their pairs, differ from the
    plain convolution's. The batch is an argument of the kernel, so one binary serves all batches. WIDE is 1 if the
    indices inside ``images`` images, the most that a block spans, need 64 bits. Offsets in whole tensors always have 64
    bits.
    """
    image = problem.channels * problem.height * problem.width
    outputs = problem.filters * problem.output_height * problem.output_width
    # Half of the range is left for the last block's indices beyond the end.
    wide = max(images * image, images * outputs, math.prod(problem.w_shape)) >= 2**30
    attributes = {"POOL": 1 + problem.full} if isinstance(problem, PooledProblem) else {}
    for name, pair, plain in (("STRIDE", problem.stride, 1), ("PAD", problem.pad, 0), ("DILATE", problem.dilate, 1)):
        if pair != (plain, plain):
            attributes |= {f"{name}_H": pair[0], f"{name}_W": pair[1]}
    if problem.kernel_width != problem.kernel:
        attributes["L"] = problem.kernel_width
    if problem.groups != 1:
        attributes["G"] = problem.groups
    if isinstance(problem, WeightGradient):
        attributes["WEIGHT_GRADIENT"] = 1
    return {
        "C": problem.channels,
        "H": problem.height,
        "W": problem.width,
        "M": problem.filters,
        "K": problem.kernel,
        "WIDE": int(wide),
        **attributes,
    }


def images_per_launch(batch: int, blocks_per_image: int, scratch_per_image: int = 0) -> int:
    """Return how many images one launch may take, at least 1: the grid's x and the scratch memory limit it."""
    images = min(batch, GRID_X // blocks_per_image)
    if scratch_per_image:
        images = min(images, SCRATCH_BYTES // scratch_per_image)
    return max(1, images)


def one_launch(
    problem: ConvProblem,
    entry: str,
    blocks: Callable[[int], int],
    threads: int | Triple,
    config: Mapping[str, bool | int | float],
    arguments: tuple[Argument, ...] = ("x", "w", "y", "first", "images"),
) -> Plan:
    """Return the plan of a kernel that one launch runs on all images, or on as many as the grid allows.

    Args:
        blocks: ``blocks(n)`` returns the blocks for n images.
        threads: per block.
        entry, config, arguments: as in Launch and Plan.
    """
    block = (threads, 1, 1) if isinstance(threads, int) else threads

    def steps(images: int) -> tuple[Launch, ...]:
        return (Launch(entry, (blocks(images), 1, 1), block, arguments),)

    return Plan(layer_defines(problem), images_per_launch(problem.batch, blocks(1)), steps, config=config)


def grid_reasons(blocks_per_image: int) -> list[str]:
    """Return why the blocks of one image do not fit a grid; empty when they do."""
    if blocks_per_image <= GRID_X:
        return []
    return [f"blocks for one image: at most {GRID_X}, got {blocks_per_image}"]


def with_numbers(step: Step, numbers: Mapping[str, Any]) -> Step:
    """Return the step with numbers in place of its arguments of these names."""
    if not isinstance(step, Launch):
        return step
    return replace(step, args=tuple(numbers.get(a, a) if isinstance(a, str) else a for a in step.args))


def buffers_of(step: Step) -> tuple[str, ...]:
    """Return the names of the buffers that a step uses."""
    if isinstance(step, CopyToConstant):
        return (step.source,)
    if isinstance(step, LibraryCall):
        return step.buffers
    return tuple(a.buffer if isinstance(a, TensorMap) else a for a in step.args if isinstance(a, (str, TensorMap)))
