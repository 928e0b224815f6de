"""Networks as files and graphs: read, checked, changed and written.

api              load_checkpoint, save_checkpoint and replace_convolution
symbol_graph     Graph and Node: MXNet's symbols as plain objects
params_io        MXNet's parameter files as NumPy arrays
node_conversion  ``New`` to ``Custom`` and back
fusion           activations and poolings computed by the nodes before them
"""
