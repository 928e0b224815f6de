"""Whole inference graphs as one Custom node that computes on a GPU, for arrays in ``mx.cpu()``.

api.py       gpu_network: from a symbol and its parameters to the node
operator.py  the node as MXNet sees it
engine.py    the network on one GPU: parameters, chunks of images, memory

Private modules, from the bottom: ``_definition`` says what an operator is; ``_layers``, ``_pooling``,
``_elementwise`` and ``_shaping`` define the operators, and ``_operators`` lists them. ``_network`` reads a graph,
``_memory_plan`` places its values, ``_schedule`` computes it with a library of arrays. ``_gpu`` chooses what computes a
node on the GPU: our kernels (``_passes``, ``_split_precision``), cuBLAS (``_dense``) or cuDNN (``_cudnn``).
"""
