"""The grading harness, the grader: course submissions are compiled as they are, run in a sandbox, and checked.

The worker (``ece408_op.submission``) is stopped while inputs are written and outputs are checked: see docs/grading.md.
``_submission`` finds files, ``_spec`` reads the grader's file, ``_grading`` grades one or many, ``_rounds`` calls them,
``_buffers`` holds the device and its arrays, ``_judge`` classifies an output and ``_verdict`` a submission,
``_real_images`` measures accuracy, ``medians`` has the statistics of times, ``_reports`` writes pages. ``__main__`` is
the command.
"""
