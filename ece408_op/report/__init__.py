"""``ece408-report``: run the milestones and benchmarks that this machine can run, and write one page about them.

_commands.py     the list of commands
_runs.py         describes the machine, runs the commands, and keeps the result and the printed lines of each
_page.py         the page's tables and charts, from the kept results
report.html.j2   the page
"""
