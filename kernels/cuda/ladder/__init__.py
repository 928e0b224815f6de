"""The course's optimisations, one file per idea, in the order in which the course teaches them.

naive           one thread per output, straight from global memory; block shapes
shared          the input tile and one filter in shared memory
constant        the filters in constant memory instead
unrolled        the inner loops unrolled
im2col_gemm     im2col into global memory, then a tiled matrix product
implicit_gemm   the same product; the columns exist in shared memory only
register_tiled  several outputs per thread in registers, double buffering; the batch over several streams
half            the tiles in shared memory as fp16
tensor_core     the products on tensor cores, in fp16 or tf32

Each ``.cu`` file says what limits its kernel; the next one removes that limit.
"""
