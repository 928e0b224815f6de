"""``ece408-lab FILE``: compile a convolution of one's own, check it, and say why it is wrong or slow.

The file runs in the grader's worker process or, where there is no GPU, in the emulator. The result is plain data, which
the screen, --json and the page of --html show.

Public modules: none; the command is ``python -m ece408_op lab``.
"""
