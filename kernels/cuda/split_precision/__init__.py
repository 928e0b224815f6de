"""Split precision: three fp16 tensor-core products per float32 product (fp16x3), or one (fp16x1).

split_precision  the kernels for few channels; ``block.cuh`` explains their sources, ``split.cuh`` the arithmetic
weight_gradient  weight gradients of layers with few channels and filters
wide             the kernels for many channels; wide_weight_gradient their weight gradients
split_form       convolutions between which activations stay split, NHWC
dense            products of float32 matrices
split_passes     pooling, depthwise convolution and other layers between split-form convolutions
"""
