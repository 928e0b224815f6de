"""``ece408-report``: runs the milestones that this machine can, and writes what the course's reports had, as one page.

_jobs.py       which runs there are; pure
_runner.py     runs them, each once, and keeps each run's JSON
machine.py     a run: what this machine is and can do
kernels.py     a run: every GPU kernel on a network's layers, times, launches, registers, occupancy
counters.py    a run: bytes that each kernel moved, by Nsight Compute's counters
launch_all.py  what counters.py watches
_runs.py       the kept runs, to look things up in
_published.py  the figures that the course's teams published
_document.py   sections, tables and figures; pure
_milestones.py, _speed.py, _others.py   what the page says, from the runs alone
_plots.py      a roofline and bars
_render.py     the page and its Markdown
"""
