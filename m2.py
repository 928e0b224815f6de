#!/usr/bin/env python3
"""Milestone 2: inference with the operator New on the CPU; `python m2.py --help` says more."""

import sys

if __name__ == "__main__":
    try:
        from ece408_op import commands
    except KeyboardInterrupt:
        print("m2.py: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(commands.run("m2"))
