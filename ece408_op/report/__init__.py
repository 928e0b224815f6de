"""``ece408-report``: runs the milestones and benchmarks that this machine can run, and writes one page about them.

_commands.py   the list of commands
_runs.py       runs them, and keeps the result and the printed lines of each
machine.py     a command of its own: the machine as data
_sections.py   the page's tables and charts, from the kept results
page.html.j2   the page
"""
