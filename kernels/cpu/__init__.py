"""The CPU kernels. All but im2col are compiled for each layer by LLVM.

loops            the textbook's seven loops
im2col           windows as the columns of a matrix, then BLAS
direct           blocked for registers and caches
winograd         fewer multiplications, images in the lanes
winograd_gemm    fewer multiplications in 3 x 3 filters, tiles in the lanes
tap_copies       every attribute, from copies of the image for each filter tap
col2im           data gradients: a matrix product, added to the pixels
pixel_reduction  weight gradients, pixels in the lanes
outer_products   weight gradients, channels in the lanes
"""
