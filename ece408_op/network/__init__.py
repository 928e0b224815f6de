"""Whole inference graphs on a GPU, whatever MXNet knows of it: one Custom node on ``mx.cpu()`` arrays.

door.py          gpu_network: a symbol and its parameters in, the one node out
operator.py      the node as MXNet sees it
engine.py        the network on one GPU: parameters, rounds of images, plans
pipeline.py      images in, outputs back, while the GPU computes
graph.py         a symbol's JSON as typed nodes, or a refusal with every node that is not known
operators.py     the table of operators, one record each; settings.py reads their attributes
fuse.py          activations joined to what feeds them, and moved behind a maximum
plan.py          shapes, and where each value lies in memory
run.py           the plan at work on arrays of any library
gpu.py           what computes a node on the GPU: our kernels (passes.py, split.py), cuBLAS (dense.py),
                     cuDNN (cudnn.py)
"""
