"""What a program's time goes to: kernels, copies and CUDA calls on a GPU, MXNet's operators on the CPU.

_activity.py   one activity, one profile; pure
_tables.py     nvprof's tables, the lists over 90 %, launch shapes; pure
_occupancy.py  warps that a multiprocessor can hold; pure
text.py        a profile for people; pure
_trace.py      the timeline, for Perfetto or chrome://tracing; pure
_gpu.py        records a GPU through CUPTI
_operators.py  records MXNet's operators through MXNet's own profiler
session.py     both around a program, and what is written at its end
"""
