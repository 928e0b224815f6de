"""Whole inference graphs on a GPU, whatever MXNet knows of it: one Custom node on ``mx.cpu()`` arrays.

api.py         gpu_network: a symbol and its parameters in, the one node out
operator.py    the node as MXNet sees it
engine.py      the network on one GPU: parameters, rounds of images, plans
graph.py       a symbol's JSON as typed nodes, or a refusal with every node that is not known
_operators.py  the table of operators, one record each; _op_attributes.py reads their attributes
_fuse.py       activations joined to what feeds them, and moved behind a maximum
_plan.py       shapes, and where each value lies in memory
_run.py        the plan at work on arrays of any library
_gpu.py        what computes a node on the GPU: our kernels (_passes.py, _split_precision.py), cuBLAS (_dense.py),
               cuDNN (_cudnn.py)
"""
