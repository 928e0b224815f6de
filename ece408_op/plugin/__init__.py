"""Everything that touches MXNet: its import, the operator ``New``, its arrays, layouts, errors and outputs.

mxnet_import    makes MXNet 1.9.1 importable on today's Python and NumPy
connect         registers the operator once MXNet is imported
builder         ``New``: the operator called as a function
attributes      the operator's attributes, parsed and checked
bridge          views of MXNet's arrays, and the rules of waiting for them
default_layout  keeps oneDNN's blocked layout away from the operator
mxnet_errors    brings the reason of an error inside an operator to the caller
op_times        ``op_times``: one entry for each call
host_context    the GPU for arrays in host memory
"""
