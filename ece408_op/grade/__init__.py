"""The grading harness: course submissions as they are, compiled, run in containment, checked against float64.

What is the parent's and what is the worker's:

    parent (this package)   the reference, the random numbers, the buffers x, w and y, the clock, the verdict
    keeper (native/sandbox) namespaces, limits; stops, starts and ends the worker; says how it ended
    worker (native/runner)  a process of its own that maps the buffers, loads the submission, calls forward

A submission can write to any memory of its worker, so the parent believes nothing that the worker says: "done"
only stops the parent's clock. The worker is stopped while inputs are written and while outputs are checked, and
the reference is computed only then. See docs/grading.md.

Public modules: cli, python_worker.
"""
