"""``--profile`` of m1 to m4 and ``python -m ece408_op.profile``: measure where a program spends its time.

Public names: ``session`` (options and start of a profile) and ``counters`` (bytes and warps of GPU kernels,
through Nsight Compute).

_tables.py           activities, and tables of them in nvprof's form
_trace.py            the timeline
_cupti.py            records kernels, copies and CUDA calls through CUPTI
_mxnet_operators.py  records MXNet's operators through MXNet's profiler
"""
