#!/usr/bin/env python3
"""Milestone 3: inference with a first kernel on the GPU; `python m3.py --help` says more."""

import sys

from ece408_op import commands

if __name__ == "__main__":
    sys.exit(commands.run("m3"))
