"""Direct convolutions in plain float32.

register_blocked  a strip of a row in the registers of each thread: layers of several channels
sliding_window    a window of the input in the registers of each thread: layers of few channels
"""
