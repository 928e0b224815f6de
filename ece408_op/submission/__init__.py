"""A course submission or a user's own file: compiled as it is, and called in a process of its own.

Who does what:

    harness (Python)                  the buffers x, w and y, the clock, commands; for the grader also the verdict
    supervisor (native/supervisor)    process 1 of the sandbox: limits; reports how the worker ends
    worker (native/worker)            maps the buffers, loads the submission, calls forward

A submission can write to any memory of its worker, so the harness believes nothing that the worker says: "done" only
stops the harness's clock.

runner          a user's own file, without a sandbox: for m2.py to m4.py and ``ece408-lab``
build           the compiler, behind the replacements for MXNet's headers (headers/)
sources         the files that belong to a submission
networks        the course's networks, and those that a file's constants point to
arrays          memory that the harness and a worker share
worker          the harness's side of one worker
python_worker   the worker for a kernel in Python
sandbox         namespaces and limits for a program
programs        the harness's own programs, compiled once; temporary folders
errors          what ends a submission's run, or the harness
"""
