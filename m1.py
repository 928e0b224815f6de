#!/usr/bin/env python3
"""Milestone 1: inference with MXNet's own Convolution; `python m1.py --help` says more."""

import sys

if __name__ == "__main__":
    try:
        from ece408_op import commands
    except KeyboardInterrupt:
        print("m1.py: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(commands.run("m1"))
