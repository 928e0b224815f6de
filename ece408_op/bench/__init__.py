"""The benchmark: every implementation beside its peers, in one process, on the same arrays.

python -m ece408_op.bench --help

Public modules: contestants, contexts, one_node, report, results (the format of all measured results), sweep.
"""
