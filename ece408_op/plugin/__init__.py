"""The interface to MXNet: its import, the operator ``New``, MXNet's arrays, layouts, errors and outputs.

mxnet_import      makes MXNet 1.9.1 importable on today's Python and NumPy
connect           registers the operator once MXNet is imported
operator          MXNet's interface of the operator: shapes, types, forward, backward
imperative        the three steps of a call of nd.Custom: synchronous fast path, output pool, default layout
builder           ``New``: the operator called as a function
attributes        the operator's attributes, parsed and checked
bridge            views of MXNet's arrays, and which GPUs MXNet can use
default_layout    keeps oneDNN's blocked layout away from the operator
output_pool       memory for large outputs
engine_queue      queues Python functions in MXNet's engine
fast_custom_op    fast calls of a Custom operator with hundreds of arrays, and its deletion
executors         executors that wait for a pass of another mode, and pin their arguments
array_version     MXNet's count of writes to an array
mxnet_errors      brings the reason of an error inside an operator to the caller
interrupts        defers Ctrl-C while MXNet calls back
op_times          ``op_times``: one entry per call
host_context      a GPU for arrays in host memory
"""
