"""The declaration of a kernel, its choice, and its check. It knows no MXNet.

kernel     Kernel and CudaKernel: a name, what it supports, its error bound, a call
dispatch   chooses a kernel; the only module here that imports the kernels
tuning     the table of measured times that dispatch reads (tuning.json)
explain    why an output is wrong: likely mistakes compared with it, and a map; source_lines: the line that makes one
check      outputs compared with float64, within the kernel's error bound
reference  the convolution in float64
timer      times calls on a GPU or the CPU
roofline   the least time that a GPU's memory and its float32 lanes allow
"""
