"""The course's optimisations, in the order of the course.

naive           one thread for each output
shared          tiles in shared memory, then weights in constant memory, then unrolled loops
im2col_gemm     im2col and a tiled matrix product, one image for each launch and many
implicit_gemm   the matrix product without columns in global memory
register_tiled  the same with register tiles, over several streams, and in 16-bit storage
tensor_core     the same on tensor cores
"""
