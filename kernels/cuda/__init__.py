"""The CUDA kernels, one folder for each family, and the headers that they share.

ladder           the course's optimisations, one file each
float32          register-blocked direct convolutions on the float32 lanes
split_precision  three half-precision tensor-core products for each float32 product

layer.cuh        the layer's sizes and types
waves.cuh        the schedule of blocks
denormals.cuh    storage types that keep denormal numbers
"""
