"""The CUDA kernels, one folder per family, and the sources that they share.

ladder           the course's optimisations, one file each
float32          direct convolutions on the float32 units
split_precision  three fp16 tensor-core products per float32 product
cudnn            NVIDIA's library

sources.py       where the sources are
layer.cuh        the layer's sizes and types
denormals.cuh    multiplications that keep denormal numbers
vectors.cuh      loads, stores and asynchronous copies of neighbouring floats
"""
