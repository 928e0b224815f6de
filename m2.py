#!/usr/bin/env python3
"""Milestone 2: inference with the operator New on the CPU; `python m2.py --help` says more."""

import sys

from ece408_op import commands

if __name__ == "__main__":
    sys.exit(commands.run("m2"))
