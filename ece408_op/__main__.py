"""python -m ece408_op COMMAND: run a milestone or a tool of an installed package."""

from __future__ import annotations

import sys

from . import commands

_USAGE = f"usage: python -m ece408_op {{{','.join(commands.COMMANDS)}}} [arguments]"
_HELP = f"""{_USAGE}

Run a milestone (m1 to m4) or a tool; COMMAND --help describes each.

example: python -m ece408_op m2 ece408-low 100"""


def main() -> int:
    """Run the command that the first argument names; returns its exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        commands.print_lines([_HELP])
        return commands.OK
    if name not in commands.COMMANDS:
        got = repr(name) if name else "none"
        print(f"{_USAGE}\nexpected a command, one of {', '.join(commands.COMMANDS)}; got {got}", file=sys.stderr)
        return commands.USAGE
    del sys.argv[1]
    return commands.run(name)


if __name__ == "__main__":
    sys.exit(commands.guard("ece408_op", main))
