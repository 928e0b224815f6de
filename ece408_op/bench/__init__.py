"""ece408-bench: implementations and their peers, measured in one process on the same arrays.

Public modules:

results  the format of all measured results, its reader and its writer
launches  the launches of a kernel's call, with registers, bytes and occupancy
layers   layers on the CPU and on a GPU, one row per contestant and kind of call
plots    results as SVG
tables   results as Markdown

Run ``python -m ece408_op.bench --help``. Calls are timed and checked by ``ece408_op.core.timer``.
"""
