"""Networks as files and graphs: read, checked, changed and written.

api              load_checkpoint, save_checkpoint and replace_convolution
symbol_json      MXNet's symbol files as plain data
params_io        MXNet's parameter files as NumPy arrays
node_conversion  ``New`` to ``Custom`` and back
"""
