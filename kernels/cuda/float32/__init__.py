"""Convolutions on the float32 units, with the sums in registers.

register_blocked  along rows: a strip of one row for several filters per thread; for several channels
sliding_window    a thread's input window in registers for all filters; for one channel or a few
blocked_gemm      implicit GEMM: every convolution and both of its gradients
waves             grids in waves of shrinking shares
"""
