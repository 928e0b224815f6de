"""The grading harness: it compiles course submissions as they are, runs them in a sandbox, and checks every output.

Who does what:

    harness (this package)            the reference, the random numbers, the buffers x, w and y, the clock, the verdict
    supervisor (native/supervisor)    process 1 of the sandbox: limits; stops, continues and ends the worker
    worker (native/worker)            maps the buffers, loads the submission, calls forward

A submission can write to any memory of its worker, so the harness believes nothing that the worker says: "done" only
stops the harness's clock. The worker is stopped while inputs are written and outputs are checked, and the reference is
computed only then. ``_verdict`` has the rules; see docs/grading.md.

Public modules: cli, python_worker, runner. ``runner`` runs a user's own file in a worker, without a sandbox.
"""
