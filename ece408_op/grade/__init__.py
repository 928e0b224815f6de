"""The grading harness: it compiles course submissions as they are, runs them in a sandbox, and checks every output.

The worker (``ece408_op.submission``) is stopped while inputs are written and outputs are checked, and the reference is
computed only then. ``_verdict`` has the rules; see docs/grading.md. The public module is ``cli``.
"""
