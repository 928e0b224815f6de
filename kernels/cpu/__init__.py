"""The CPU kernels. All but im2col are compiled for each layer by LLVM.

loops     the textbook's seven loops
im2col    windows as the columns of a matrix, then BLAS
direct    blocked for registers and caches
col2im    data gradients: a matrix product, added to the pixels
tap_copies  every attribute
pixel_reduction  weight gradients, pixels in the lanes
winograd  fewer multiplications, images in the lanes
"""
