"""Convolutions on the float32 units, with the sums in registers.

register_blocked      along rows: a strip of one row for several filters per thread; for several channels
sliding_window        a thread's input window in registers for all filters; for one channel or a few
blocked_gemm          implicit GEMM: every convolution and both of its gradients
depthwise             one group per channel: a thread per column of a map; forward and both gradients
data_gradient_tiles   data gradient of a few channels: a tile of pixels per thread
weight_gradient_rows  weight gradient of few channels and filters: all sums in a block's registers

partial_sums  weight gradients in two launches: blocks add shares of the images, then their sums are added
"""
