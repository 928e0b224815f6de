"""Read, check, change and write networks, as files and as graphs.

api              load_checkpoint, save_checkpoint and replace_convolution
symbol_graph     Graph and Node: MXNet's symbols as plain objects
params_io        MXNet's parameter files as NumPy arrays
node_conversion  ``New`` to ``Custom`` and back
fusion           merges activations and poolings into the nodes before them
"""
