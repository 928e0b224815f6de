"""The CPU kernels, compiled for each layer by LLVM: loops, im2col, direct, winograd."""
