"""Split precision (fp16x3): three half-precision tensor-core products for each float32 product.

split_precision  the kernels of the family for few channels, with three products and with one
wide             the kernels for many channels
"""
