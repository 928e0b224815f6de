"""Run a whole MXNet graph on GPUs as one Custom node, whose inputs and outputs are in ``mx.cpu()``.

api.py        gpu_network: from a symbol and its parameters to the node
operator.py   the node as MXNet sees it
engine.py     inference on one GPU: parameters, chunks of images, memory
trainer.py    training steps on one GPU or several: copies in, computation, copies out
optimizer.py  MXNet's optimisers SGD and Adam with the update on a GPU

Private modules, from the bottom: ``_definition`` says what an operator is; ``_layers``, ``_elementwise``, ``_shaping``
and ``_softmax`` define the operators. ``_network`` lists them and reads a graph, ``_fusion`` fuses it, ``_formats``
decides which values are split activations, ``_schedule`` places all values in memory and computes them in order.
``_gpu`` chooses the implementation of each node on the GPU: the package's kernels on float32 or on split activations
(``_split_layers``), the programs of ``passes.cu`` and ``pooling.cu`` (``_passes``), cuDNN, cuBLAS (``_blas``) or CuPy.
``_batch`` has the memory, the CUDA graphs and the convolutions' times for one batch size. ``_inference`` divides a
batch among GPUs.

Training: ``_training`` computes the values and, in reverse order, their gradients. It saves all values, so ``_fusion``
fuses little for it. ``_training_gpu`` computes convolutions by the package's kernels, and pooling, BatchNorm and
activations by ``pooling.cu`` and ``training.cu``; each other operator class has its gradient as a method on CuPy's
arrays. ``_step`` copies in, computes and copies out for each pass and update. ``_data_parallel`` has the threads of a
pass on several GPUs, ``_cuda_graphs`` the passes as CUDA graphs. ``_gpu_update`` updates parameters, and keeps copies
of them on a GPU.
"""
