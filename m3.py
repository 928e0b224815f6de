#!/usr/bin/env python3
"""Milestone 3: inference with a first kernel on the GPU; `python m3.py --help` says more."""

import sys

if __name__ == "__main__":
    try:
        from ece408_op import commands
    except KeyboardInterrupt:
        print("m3.py: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(commands.run("m3"))
