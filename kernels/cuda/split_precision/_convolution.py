"""The convolution that a split-precision kernel computes; CUDA sources read its fields as ``Config::name``."""

from __future__ import annotations

from dataclasses import dataclass

from ece408_op.problem import ConvProblem, DataGradient
from ece408_op.runtime.launch import Pair, round_up

#: TMA needs a multiple of 8 channels per pixel. The most pixels of a launch: 32 bits count them, rounded up to tiles.
_TMA_CHANNELS, _MOST_PIXELS = 8, 2**31 - 2**8


@dataclass(frozen=True)
class Convolution:
    """The convolution that the kernels compute: the problem's or, for a data gradient, a convolution of y.

    The data gradient of a convolution of stride 1 is a convolution of y with padding dilate (K - 1) - pad, in which
    channels and filters change places and the filters' rows and columns are reversed.
    """

    groups: int
    channels: int  # of a group
    filters: int  # of a group
    height: int
    width: int
    output_height: int
    output_width: int
    kernel_height: int
    kernel_width: int
    stride_height: int
    stride_width: int
    pad_height: int  # negative where a data gradient's y is larger than x
    pad_width: int
    dilate_height: int
    dilate_width: int
    transposed: bool

    @classmethod
    def of(cls, problem: ConvProblem) -> Convolution:
        sizes = (problem.channels // problem.groups, problem.filters // problem.groups)
        inputs, outputs = (problem.height, problem.width), (problem.output_height, problem.output_width)
        kernel, pad, dilate = (problem.kernel, problem.kernel_width), problem.pad, problem.dilate
        transposed = isinstance(problem, DataGradient)
        if transposed:
            sizes, inputs, outputs = sizes[::-1], outputs, inputs
            pad = (dilate[0] * (kernel[0] - 1) - pad[0], dilate[1] * (kernel[1] - 1) - pad[1])
        return cls(problem.groups, *sizes, *inputs, *outputs, *kernel, *problem.stride, *pad, *dilate, transposed)

    # Filters of all groups, products per channel, pixels of an image and of an output.
    all_filters = property(lambda self: self.groups * self.filters)
    taps = property(lambda self: self.kernel_height * self.kernel_width)
    area = property(lambda self: self.height * self.width)
    output_area = property(lambda self: self.output_height * self.output_width)
    # Channels of a group in the split images and filters, and of a pixel of the split images.
    padded_channels = property(lambda self: round_up(self.channels, _TMA_CHANNELS))
    input_channels = property(lambda self: self.groups * self.padded_channels)
    # Channels of a pixel of the split outputs; of several groups, each has a multiple of eight.
    output_channels = property(lambda self: round_up(self.all_filters, _TMA_CHANNELS))
    # Values of a component of the split filters; the most images of a launch.
    filter_values = property(lambda self: self.taps * self.padded_channels * self.all_filters)
    most_images = property(lambda self: _MOST_PIXELS // max(self.area, self.output_area))

    @property
    def im2col(self) -> tuple[Pair, Pair, Pair]:
        """TMA's corners and steps of the windows, columns first."""
        lower = (-self.pad_width, -self.pad_height)
        reach = (self.dilate_width * (self.kernel_width - 1), self.dilate_height * (self.kernel_height - 1))
        upper = (-lower[0] - reach[0], -lower[1] - reach[1])
        return lower, upper, (self.stride_width, self.stride_height)
