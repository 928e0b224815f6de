"""``ece408-lab FILE``: check a convolution of one's own, and explain its mistakes and, in CUDA, its slow lines.

The file runs in a worker process (``ece408_op.submission.runner``). The emulator runs CUDA files: in its place without
a GPU, after the verdict with one. The result is plain data, which the screen, --json and the page of --html show.

Public modules: none; the command is ``python -m ece408_op lab``.
"""
